"""In place: a call writes its result over its input, where nobody reads the input any more.

Bitwise, for the functions whose in-place form gives the same bits (engine.overwriting). No module and no source is changed: the tape
replaces the call it is told of, right before it runs and only if it is safe at that moment (nothing saved the input for backward, no
view of it lives, and every reference to it is one that nobody can read again, engine.frames); else the call runs as it is written.
What it saves is often only a temporary and nothing at the peak: `core.inplace` says how much, by replay.

Cost: 10-20 us for each call that is in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from memfit.core.inplace import edit, propose
from memfit.core.plan import BITWISE, Move
from memfit.engine.policy import Policy
from memfit.engine.tape import Tape

__all__ = ["apply", "edit", "exactness", "name", "propose"]

name = "inplace"
exactness = BITWISE


def apply(tape: Tape, moves: Iterable[Move], untouched: Iterable[str] = ()) -> Callable[[], None]:
    """Let the tape run the moves' calls in place from its next step on, beside what it does already; hand back the function that takes
    it back.

    untouched: Plan.untouched.
    """
    places = [place for move in moves if move.technique == name for place in move.calls]
    before = tape.policy
    if places:
        tape.policy = (before or Policy((), (), (), ())).with_in_place(places, untouched)
        tape.restart_section()

    def undo() -> None:
        tape.policy = before
        tape.restart_section()

    return undo
