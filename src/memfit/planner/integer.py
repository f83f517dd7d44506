"""Choices as integer programs: where one moment decides, the optimum itself.

For budgets spread over the frontier, and with the step in regions as in the sweep (so that a restore never reaches through the whole
step), the relaxation is solved in whole numbers. What its replay peaks too high by is taken off the room, and it is solved again.
A program whose linear optimum is no better than what is known for that budget is not solved.
"""

from __future__ import annotations

import numpy as np

from memfit.planner.problem import Choice, Problem
from memfit.planner.regions import border_cells, find_borders
from memfit.planner.relaxation import Relaxation

MOST_CALLS = 600  # above, a program takes seconds
_NUM_LEVELS = 12
_NUM_REGIONS = (1, 3, 8, 20)
_MOST_TRIES = 3
MOST_NODES = 100
_GAP = 0.01
_WORTH_OF_KNOWN, _WORTH_OF_STEP = (
    0.01,
    0.0005,
)  # seconds to be won, as shares of a choice's and of the whole step's, to be worth a program


def solve_levels(problem: Problem, frontier: list[Choice], required: np.ndarray) -> list[Choice]:
    """New choices at budgets between the frontier's lowest peak and the eager one. For steps of at most MOST_CALLS."""
    total = int(problem.sizes[required].sum())
    if not total:
        return []
    found: list[Choice] = []
    lowest, highest = frontier[0].peak_bytes, problem.eager.peak_bytes
    levels = [lowest + (highest - lowest) * number // _NUM_LEVELS for number in range(_NUM_LEVELS)]
    for num_regions in _NUM_REGIONS:
        crossing = border_cells(problem, find_borders(problem, required, total / num_regions))
        program = Relaxation(problem, frozenset(np.flatnonzero(crossing).tolist()))
        for level in levels:
            found += _solve(problem, program, level, [*frontier, *found])
    return found


def _solve(problem: Problem, program: Relaxation, budget_bytes: int, known: list[Choice]) -> list[Choice]:
    """What the program gives for a budget, and for a little less where its replay is above."""
    least_seconds = min(choice.seconds for choice in known if choice.peak_bytes <= budget_bytes)
    worth_seconds = least_seconds - max(_WORTH_OF_KNOWN * least_seconds, _WORTH_OF_STEP * problem.trace.step_seconds)
    room_bytes = budget_bytes
    found: list[Choice] = []
    for _ in range(_MOST_TRIES):
        linear = program.minimise(room_bytes)
        if linear is None or linear.seconds > worth_seconds:
            break
        whole = program.minimise(room_bytes, whole=True, gap=_GAP, most_nodes=MOST_NODES)
        if whole is None or whole.seconds > worth_seconds:
            break
        choice = problem.evaluate(whole.evict, whole.pin)
        found.append(choice)
        if choice.peak_bytes <= budget_bytes:
            break
        room_bytes -= choice.peak_bytes - budget_bytes
    return found
