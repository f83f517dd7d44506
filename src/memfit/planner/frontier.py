"""Frontier: the choices worth having, each with a lower peak than all that cost less time.

A frontier is found once for a trace and belongs to no budget; every budget picks from it. That is what makes more
budget never slower.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from memfit.planner.problem import Choice


def pareto(choices: Iterable[Choice]) -> list[Choice]:
    """The choices no other beats in both peak and seconds, by rising peak (and so by falling seconds).

    Of equals the one that moves fewer cells stays, of those the first.
    """
    best: list[Choice] = []
    for choice in sorted(choices, key=lambda each: (each.peak_bytes, each.seconds, len(each.evict) + len(each.pin))):
        if not best or choice.seconds < best[-1].seconds:
            best.append(choice)
    return best


def pick(frontier: list[Choice], budget_bytes: int) -> Choice | None:
    """The quickest choice whose peak fits the budget, or None."""
    index = bisect_right(frontier, budget_bytes, key=lambda choice: choice.peak_bytes)
    return frontier[index - 1] if index else None
