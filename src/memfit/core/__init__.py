"""Frozen data and pure functions on it; standard library only."""
