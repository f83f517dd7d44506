"""Solver 'exhaustive': every subset of the cells, replayed. The tests' yardstick, and for steps of a few calls."""

from __future__ import annotations

from itertools import combinations

from memfit.core.errors import PlanError
from memfit.planner.frontier import pareto
from memfit.planner.problem import Choice, OnProgress, Problem

_MOST_CELLS = 16


def solve_exhaustively(problem: Problem, progress: OnProgress | None = None) -> list[Choice]:
    """The true frontier over evicted saved cells and pinned unsaved ones. Raises PlanError beyond 16 cells."""
    cells = [cell for cell, call in enumerate(problem.producer.tolist()) if call >= 0]
    if len(cells) > _MOST_CELLS:
        raise PlanError(
            f"The solver 'exhaustive' would try 2**{len(cells)} plans: it is for steps of at most {_MOST_CELLS} "
            "recomputable cells. Use 'sweep'."
        )
    found = set()
    for count in range(len(cells) + 1):
        for chosen in combinations(cells, count):
            evict = frozenset(cell for cell in chosen if problem.saved[cell])
            found.add(problem.evaluate(evict, frozenset(chosen) - evict))
        if progress is not None:
            progress("planning", count, len(cells))
    return pareto(found)
