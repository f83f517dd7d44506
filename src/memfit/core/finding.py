"""A finding: something a person should know about a training program, with its place, its bytes and the remedy.

Static rules (read from source) and dynamic ones (measured in a run) both end in this shape, so one report prints them all.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Finding:
    """One finding, sorted by place.

    path: the file as the user gave it. line, column: 1-based, as editors count.
    code: `MF` and three digits; `memfit explain CODE` has its long text.
    message: one sentence: what happens there and why. remedy: what to do, one sentence.
    num_bytes: measured bytes the remedy is worth (`per_step`: each step; else at the peak); None where nothing was measured.
    measured: whether it was seen in a run (dynamic) or read from the source alone (static).
    """

    path: str
    line: int
    column: int
    code: str
    message: str
    remedy: str = ""
    num_bytes: int | None = None
    per_step: bool = False
    measured: bool = False
