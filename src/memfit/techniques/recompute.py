"""Recompute: cells leave after forward and are computed again when backward asks for them.

Bitwise: the same calls run again on the same inputs, with the random state, autocast and kernel choice of the first run, and
never write a buffer. Source: Chen et al. 2016 (arXiv:1604.06174) for the trade; DESIGN.md section 2 for the mechanism.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from memfit.core.plan import BITWISE, Move
from memfit.engine.policy import Policy
from memfit.engine.tape import Tape

name = "recompute"
exactness = BITWISE


def apply(tape: Tape, moves: Iterable[Move], untouched: Iterable[str] = ()) -> Callable[[], None]:
    """Let the tape evict what the moves say from its next step on; hand back the function that takes it back.

    untouched: Plan.untouched.
    """
    mine = [move for move in moves if move.technique == name]
    before = tape.policy
    tape.policy = Policy(
        replayed=(place for move in mine for place in move.calls),
        evict=(key for move in mine for key in move.evict),
        keep=(key for move in mine for key in move.keep),
        pin=(key for move in mine for key in move.pin),
        transient=(key for move in mine for key in move.transient),
        untouched=untouched,
    ) if mine else None  # fmt: skip
    tape.restart_section()

    def undo() -> None:
        tape.policy = before
        tape.restart_section()

    return undo
