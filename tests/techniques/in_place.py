"""Programs run in place: with every call that is safe when it runs (`everywhere`), or with a move's calls (`applied`)."""

from __future__ import annotations

from typing import Any

import pytest

import memfit
from equality import Program, make, snapshot
from memfit.core.inplace import Site, find_sites
from memfit.core.plan import Move
from memfit.core.trace import Trace
from memfit.engine.cell import Call, Handle
from memfit.engine.frames import UNDERSTOOD
from memfit.engine.policy import CallPolicy
from memfit.engine.tape import Tape
from memfit.techniques import inplace

on_a_python_understood = pytest.mark.skipif(not UNDERSTOOD, reason="on this Python no call is ever made in place")

_NOTHING: frozenset[str] = frozenset()


class _AnyName(str):
    __hash__ = str.__hash__

    def __ne__(self, other: object) -> bool:
        return False


class _EveryCall(dict):
    def get(self, ordinal: int, default: Any = None) -> CallPolicy:
        return CallPolicy(_AnyName(), _NOTHING, _NOTHING, _NOTHING, in_place=True)


class _EveryPath(dict):
    def get(self, path: str, default: Any = None) -> list[_EveryCall]:
        return [_EveryCall()]


class _Everywhere:
    def section(self, number: int) -> _EveryPath:
        return _EveryPath()


class _Evicting(Tape):
    """Lets go of all that autograd saves, at once."""

    def __init__(self) -> None:
        super().__init__()
        self.record_all = self.pin_sources = self.verify = True

    def settle_handle(self, handle: Handle, call: Call | None) -> None:
        super().settle_handle(handle, call)
        self.evict_handle(handle)


def everywhere(program: Program, *, evict: bool = False, num_steps: int = 3) -> tuple[list[dict[str, str]], Tape]:
    """What every step leaves behind with each call in place that may be at that moment; evict: and nothing saved kept."""
    tape = _Evicting() if evict else Tape()
    tape.policy = _Everywhere()  # type: ignore[assignment]
    return _train(program, tape, num_steps)


def applied(program: Program, move: Move, num_steps: int = 3) -> tuple[list[dict[str, str]], Tape]:
    """The same with the move's calls in place."""
    tape = Tape()
    inplace.apply(tape, [move])
    return _train(program, tape, num_steps)


def _train(program: Program, tape: Tape, num_steps: int) -> tuple[list[dict[str, str]], Tape]:
    run = make(program)
    found = []
    tape.enter()
    try:
        for number in range(num_steps):
            loss = run.step(number)
            found.append(snapshot(run, loss))
            del loss
            tape.end_step()
    finally:
        tape.exit()
    return found, tape


def trace_of(program: Program, num_steps: int = 1) -> Trace:
    run = make(program)
    return memfit.trace(lambda: run.step(0), num_steps)


def sites_of(trace: Trace) -> dict[str, Site]:
    """By function; of several calls of one the last."""
    return {trace.calls[site.call].function: site for site in find_sites(trace)}


def move_for(trace: Trace, calls: list[int]) -> Move:
    return Move("inplace", "", (), calls=tuple(trace.calls[call].place for call in calls))


__all__ = ["applied", "everywhere", "move_for", "on_a_python_understood", "sites_of", "trace_of"]
