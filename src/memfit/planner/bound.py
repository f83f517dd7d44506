"""A lower bound on the seconds any plan must spend for a budget: the program of relaxation.py, in whole numbers where the step is short.

Whatever is evicted, pinned or already restored at the moment of the eager peak, it is a solution of that program; so none costs less
than its optimum. Where the plan found costs as much, it is the best there is.
"""

from __future__ import annotations

from memfit.planner.integer import MOST_CALLS, MOST_NODES
from memfit.planner.problem import Problem
from memfit.planner.relaxation import Relaxation

_ROUNDING = 1e-6  # of the solver: a share of the bound


def lower_bound_seconds(problem: Problem, budget_bytes: int) -> float:
    """No choice of cells to evict and pin whose replayed peak fits the budget costs fewer seconds than this.

    Returns 0.0 where the eager step fits, infinity where no choice can fit.
    """
    if problem.eager.peak_bytes <= budget_bytes:
        return 0.0
    program = Relaxation(problem)
    linear = program.minimise(budget_bytes)
    if linear is None:
        return float("inf")
    bound_seconds = linear.seconds
    if len(problem.seconds) <= MOST_CALLS:
        whole = program.minimise(budget_bytes, whole=True, most_nodes=MOST_NODES)
        bound_seconds = max(bound_seconds, whole.bound_seconds if whole is not None else 0.0)
    return max(0.0, bound_seconds * (1 - _ROUNDING) - _ROUNDING * problem.unit)
