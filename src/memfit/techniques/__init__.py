"""Techniques, one a file: what can be done to a step, and doing it."""
