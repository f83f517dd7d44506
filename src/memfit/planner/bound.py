"""A lower bound on the seconds any plan must spend for a budget.

Look at one moment t of the step, here the eager peak. Whatever is evicted, pinned or already restored: every tensor
that autograd has saved and will still read is in memory at t, or its call will run after t; and each call that will run
after t for something needed at t has each of its inputs in memory at t, or that input's call runs after t as well
(engine/need.py keeps exactly this). So the state at t is a feasible choice of the minimum-cut problem in which a cell
costs its bytes if only handles and needs can hold it at t, within what the budget leaves beside the rest. The cheapest
such choice is a lower bound, and Lagrange's relaxation is one for it: for any price of a byte, the value of the cut
less the price of the bytes there are.
"""

from __future__ import annotations

import numpy as np

from memfit.core.trace import ALLOC, DROP, RELEASE, SAVE, UNPACK
from memfit.planner.problem import Problem

_NUM_HALVINGS = 30


def lower_bound_seconds(problem: Problem, budget_bytes: int) -> float:
    """No choice of cells to evict and pin whose replayed peak fits the budget costs fewer seconds than this.

    Costs about 30 cuts. Returns 0.0 where the eager step fits.
    """
    eager = problem.eager
    if eager.peak_bytes <= budget_bytes:
        return 0.0
    required, sizes, freed_bytes = _state_at(problem, eager.peak_event)
    room = budget_bytes - (eager.peak_bytes - freed_bytes)
    no_borders = np.zeros(len(sizes), dtype=bool)
    rounding = problem.unit * len(problem.seconds)
    total = float(problem.seconds.sum())
    low, high, best = total * 1e-15, 2.0 * total, 0.0  # seconds per byte
    for _ in range(_NUM_HALVINGS):
        price = (low * high) ** 0.5
        cut = problem.cut(required, sizes * price, no_borders)
        best = max(best, cut.value - rounding - price * room)
        needs_more_room = int(sizes[required].sum()) - int(sizes[list(cut.evict)].sum()) > room
        low, high = (price, high) if needs_more_room else (low, price)
    return best


def _state_at(problem: Problem, moment: int) -> tuple[np.ndarray, np.ndarray, int]:
    """At an event: which cells are required, what holding each costs, and the bytes eager has in such storages."""
    trace = problem.trace
    held: set[int] = set()
    is_open: set[int] = set()
    unpacked: set[int] = set()
    for index, (operation, operand) in enumerate(trace.events):
        if operation == UNPACK:
            unpacked.add(operand)
        elif index <= moment:
            if operation == ALLOC:
                held.add(operand)
            elif operation == RELEASE:
                held.discard(operand)
            elif operation == SAVE:
                is_open.add(operand)
            elif operation == DROP:
                is_open.discard(operand)
    open_cells = {trace.handles[each].cell for each in is_open}
    read_cells = {trace.handles[each].cell for each in is_open & unpacked}
    required = np.zeros(len(trace.cells), dtype=bool)
    sizes = np.where(problem.producer >= 0, problem.sizes, 0)
    freed: dict[int, int] = {}
    for index, cell in enumerate(trace.cells):
        if cell.storage in held:
            sizes[index] = 0
        elif index in open_cells and problem.producer[index] >= 0:
            # A storage written in place may be held by handles of several cells at once: then the first is the dear
            # one's share.
            required[index] = index in read_cells
            if not required[index] or cell.storage in freed:
                sizes[index] = 0
            freed[cell.storage] = problem.trace.storages[cell.storage].nbytes
    return required, sizes, sum(freed.values())
