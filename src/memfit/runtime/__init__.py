"""A plan on a live run: guard, apply, undo, certificate."""
