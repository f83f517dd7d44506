"""Regions: where a long step is cut so that restoring never brings everything back at once.

Restoring a cell restores every pending cell its recipe passes, back to the next kept ones. A border is a position in
the order of calls; the cells that cross it (made before, read by a call after) are kept, so recipes never reach across.
Good borders are those that few bytes cross: between two layers of a transformer it is one hidden state.
"""

from __future__ import annotations

import numpy as np

from memfit.planner.problem import Problem


def crossing_bytes(problem: Problem) -> np.ndarray:
    """Bytes of recomputable cells crossing each position: entry b is for the border before call b."""
    difference = np.zeros(len(problem.seconds) + 2, dtype=np.int64)
    crosses = (problem.producer >= 0) & (problem.last_read > problem.producer)
    np.add.at(difference, problem.producer[crosses] + 1, problem.sizes[crosses])
    np.add.at(difference, problem.last_read[crosses] + 1, -problem.sizes[crosses])
    return np.cumsum(difference)[:-1]


def find_borders(problem: Problem, required: np.ndarray, region_bytes: float) -> list[int]:
    """Positions that part the required cells into regions of at most `region_bytes`, so that the fewest bytes cross in
    all.

    A call that alone makes more is a region of its own. Shortest path over the positions; ties go to the earliest.
    """
    num_calls = len(problem.seconds)
    filling = np.zeros(num_calls + 1, dtype=np.int64)
    np.add.at(filling, problem.producer[required] + 1, problem.sizes[required])
    filling = np.cumsum(filling)  # bytes made before each position
    crossing = crossing_bytes(problem)
    crossing[num_calls] = 0
    cost = np.zeros(num_calls + 1)
    back = np.zeros(num_calls + 1, dtype=np.int64)
    first = np.minimum(np.searchsorted(filling, filling - region_bytes), np.maximum(np.arange(num_calls + 1) - 1, 0))
    for position in range(1, num_calls + 1):
        start = int(first[position])
        back[position] = start + int(np.argmin(cost[start:position]))
        cost[position] = cost[back[position]] + crossing[position] + 1  # the one byte: rather fewer borders
    borders: list[int] = []
    position = int(back[num_calls])
    while position > 0:
        borders.append(position)
        position = int(back[position])
    return borders[::-1]


def border_cells(problem: Problem, borders: list[int]) -> np.ndarray:
    """Which cells cross a border."""
    crosses = np.zeros(len(problem.sizes), dtype=bool)
    for border in borders:
        crosses |= (problem.producer < border) & (problem.last_read >= border)
    return crosses & (problem.producer >= 0)
