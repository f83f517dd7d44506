"""The options --precision and --half, which `run` and `trace` share."""

from __future__ import annotations

from memfit.core.errors import PrecisionError
from memfit.core.precision import Choice, choose


def read_precision(precision: str | None, half: str | None) -> Choice | None:
    """What the two options ask for; None where they were not given. Raises PrecisionError for unknown words, and for --half alone."""
    if precision is None:
        if half is not None:
            raise PrecisionError(f"--half {half} says nothing without an opt level. Add --precision O1, or leave it out.")
        return None
    return choose(precision, half)
