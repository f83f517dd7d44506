"""Frontier: the choices worth having, each with a lower peak than all that cost less time.

A frontier is found once for a trace and belongs to no budget; every budget picks from it. That is what makes more
budget never slower.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

from memfit.planner.problem import Choice


def pareto(choices: Iterable[Choice]) -> list[Choice]:
    """The choices no other beats in both peak and seconds, by rising peak (and so by falling seconds).

    Of equals the one that moves fewer cells stays, of those the first.
    """
    best: list[Choice] = []
    for choice in sorted(choices, key=_worth):
        if not best or choice.seconds < best[-1].seconds:
            best.append(choice)
    return best


def join(frontier: list[Choice], choices: Iterable[Choice]) -> None:
    """Make it the frontier of both, in place: as `pareto` of all, for a few choices more."""
    for choice in choices:
        start = bisect_left(frontier, choice.peak_bytes, key=lambda each: each.peak_bytes)
        if start < len(frontier) and frontier[start].peak_bytes == choice.peak_bytes:
            if _worth(frontier[start]) <= _worth(choice):
                continue
        elif start and frontier[start - 1].seconds <= choice.seconds:
            continue
        end = start
        while end < len(frontier) and frontier[end].seconds >= choice.seconds:
            end += 1
        frontier[start:end] = [choice]


def _worth(choice: Choice) -> tuple[int, float, int]:
    return choice.peak_bytes, choice.seconds, len(choice.evict) + len(choice.pin)


def pick(frontier: list[Choice], budget_bytes: int) -> Choice | None:
    """The quickest choice whose peak fits the budget, or None."""
    index = bisect_right(frontier, budget_bytes, key=lambda choice: choice.peak_bytes)
    return frontier[index - 1] if index else None
