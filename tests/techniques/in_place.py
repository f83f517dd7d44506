"""Programs run with every call in place that their own trace proposes, on a tape and without a planner."""

from __future__ import annotations

import memfit
from equality import Program, Run, make, snapshot
from memfit.core.inplace import Site, edit, find_sites, propose
from memfit.core.plan import Move
from memfit.core.trace import Trace
from memfit.engine.tape import Tape
from memfit.techniques import inplace


def trace_of(program: Program, num_steps: int = 2) -> Trace:
    run = make(program)
    return memfit.trace(lambda: run.step(0), num_steps)


def sites_of(trace: Trace) -> dict[str, Site]:
    """By '<module>:<function>'; of several at one place the last."""
    return {f"{trace.calls[site.call].module}:{trace.calls[site.call].function}": site for site in find_sites(trace)}


def move_for(trace: Trace, calls: list[int] | None = None) -> Move:
    chosen = propose(trace) if calls is None else calls
    return Move("inplace", "", (), calls=tuple(trace.calls[call].place for call in chosen))


def in_place(program: Program, move: Move, num_steps: int = 3) -> tuple[list[dict[str, str]], Tape]:
    """What every step leaves behind with the move's calls in place, and the tape."""
    run: Run = make(program)
    tape = Tape()
    tape.enter()
    inplace.apply(tape, [move])
    found = []
    try:
        for number in range(num_steps):
            found.append(snapshot(run, run.step(number)))
            tape.end_step()
    finally:
        tape.exit()
    return found, tape


__all__ = ["edit", "in_place", "move_for", "sites_of", "trace_of"]
