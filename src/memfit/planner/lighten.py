"""Lightening: what has come back and only waits for a later reader is let go and brought back again for that one.

A restore keeps what it passes for every reader to come, so that nothing is computed twice. At the lowest peaks that is what fills the
memory: attention's probabilities come back on the way to the feed-forward layer behind them and stay until their own backward. Where such
a cell is cheap (noise from its bits, a product with it), computing it twice is the better bargain. Each step is judged by the replay.
"""

from __future__ import annotations

import re
from collections import defaultdict

from memfit.planner.frontier import pareto
from memfit.planner.problem import Choice, Problem

_MOST_STEPS = 12  # on one choice
_MOST_KINDS = 4  # tried in a step
_LEAST_SHARE = 0.002  # of the peak that a kind of cells must hold to be looked at


def lighten(problem: Problem, frontier: list[Choice], num_replays: int) -> list[Choice]:
    """Choices below the frontier's, the lowest first, with cells made transient kind by kind, until `num_replays` are used up."""
    kinds = _find_kinds(problem)
    alike: dict[str, set[int]] = defaultdict(set)
    for cell, kind in kinds.items():
        alike[kind].add(cell)
    found: list[Choice] = []
    end = problem.num_evaluations + num_replays
    for choice in frontier:
        current: Choice | None = choice
        for _ in range(_MOST_STEPS):
            if current is None or problem.num_evaluations >= end:
                break
            tried = [
                problem.evaluate(current.evict, current.pin, current.transient | alike[kind])
                for kind in _largest_kinds(problem, current, kinds)
            ]
            found += tried
            current = _best(current, tried)
    return pareto(found) if found else []


def _find_kinds(problem: Problem) -> dict[int, str]:
    """By cell that can come back: its place and position without the numbers, which the layers of a network have in common."""
    calls = problem.trace.calls
    return {
        index: re.sub(r"\d+", "*", calls[cell.call].place) + f"|{cell.position}"
        for index, cell in enumerate(problem.trace.cells)
        if problem.producer[index] >= 0
    }


def _largest_kinds(problem: Problem, choice: Choice, kinds: dict[int, str]) -> list[str]:
    """The kinds of the cells that wait at the choice's peak, the largest first."""
    waiting = set(problem.find_waiting(choice)) - choice.transient
    num_bytes: dict[str, int] = defaultdict(int)
    for cell in waiting:
        num_bytes[kinds[cell]] += int(problem.sizes[cell])
    largest = sorted(num_bytes, key=lambda kind: (-num_bytes[kind], kind))[:_MOST_KINDS]
    return [kind for kind in largest if num_bytes[kind] > _LEAST_SHARE * choice.peak_bytes]


def _best(current: Choice, tried: list[Choice]) -> Choice | None:
    """The one that lowers the peak by most bytes for a second."""
    lower = [each for each in tried if each.peak_bytes < current.peak_bytes]
    if not lower:
        return None
    return max(lower, key=lambda each: (current.peak_bytes - each.peak_bytes) / max(each.seconds - current.seconds, 1e-9))
