"""The tape: records tensor function calls, puts handles in place of saved tensors, and brings evicted ones back."""
