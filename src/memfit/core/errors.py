"""The errors memfit raises. Each message says what happened with the value, why, and what to do next."""

from __future__ import annotations


class MemfitError(Exception):
    """Base of everything memfit raises on purpose; the CLI prints its sentence without a traceback."""


class BudgetError(MemfitError):
    """The budget cannot be met, or cannot be understood.

    `needed_bytes` is the smallest budget known to be feasible, where one is known (else None).
    `may_lower`: whether training in lower precision might meet it, as far as the bytes alive at the peak tell.
    """

    def __init__(self, message: str, *, needed_bytes: int | None = None, may_lower: bool = False) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.may_lower = may_lower


class TraceError(MemfitError):
    """A trace could not be taken, or a trace file could not be read."""


class PlanError(MemfitError):
    """A plan file could not be read, or the plan does not belong to this model or trace."""


class CertificateError(MemfitError):
    """A restored tensor, a buffer or a generator differs from what plain eager holds."""


class UnsupportedError(MemfitError):
    """The program does something memfit refuses to touch rather than get wrong."""


class PrecisionError(MemfitError, RuntimeError):
    """Lower precision was asked for where it cannot be had, or was lost on the way. A RuntimeError too, as apex's own were."""
