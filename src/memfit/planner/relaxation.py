"""A linear program of what every plan must hold in memory, and must compute again after it, at one moment of the step.

Each tensor that autograd will still read is in memory at the moment, or the call that makes it runs later; each call that runs
later has its inputs in memory, or the calls that make those run later too (engine/need.py keeps exactly this). With a
variable for each of these, a row for each of these sentences and one for the bytes, the least seconds of calls that run
bound every plan from below: rematerialisation as an integer program (Checkmate, Jain et al. 2020), its stages folded into one,
since in a backward pass no call is replayed twice.

    in_memory[cell]     the content is in memory at the moment
    runs_after[call]    the call is replayed after it, which costs its seconds

What it does not see is what lives within a replay, so its optimum may replay to a higher peak. Solved by HiGHS through scipy:
10 ms for 190 calls, as integers 10 to 100 ms.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from memfit.core.trace import ALLOC, BEGIN, DROP, RELEASE, SAVE, UNPACK
from memfit.planner.problem import Problem

_UNIT = 2**20  # the row of bytes counts in MiB, so that all coefficients are of one order

_Terms = list[tuple[int, float]]


@dataclass(frozen=True)
class _Moment:
    """The state of the plain step within an event.

    held: storages the program holds. overwritten: cells a call has written over. open_cells, to_read, handed_out: cells of the
    handles autograd has, of those among them it will read, of those it has read.
    """

    held: frozenset[int]
    overwritten: frozenset[int]
    open_cells: frozenset[int]
    to_read: frozenset[int]
    handed_out: frozenset[int]


@dataclass(frozen=True)
class Relaxed:
    """An optimum of the program.

    seconds: of the calls that run. bound_seconds: no solution takes less; below `seconds` by the gap that was allowed.
    evict, pin: the cells that are not in memory though autograd will read them, and those that are though it did not save them; a
    choice only if the optimum is whole.
    """

    seconds: float
    bound_seconds: float
    evict: frozenset[int]
    pin: frozenset[int]


class Relaxation:
    """The program of a trace at the eager peak.

    crossing: cells that are kept if they are needed, so that no replay reaches back beyond them (see regions.py).
    """

    def __init__(self, problem: Problem, crossing: frozenset[int] = frozenset()) -> None:
        self.problem = problem
        self._crossing = crossing
        self._moment = _look(problem, problem.eager.peak_event)
        self._rows: list[tuple[_Terms, float]] = []  # terms, and what their sum must reach
        producer = problem.producer
        to_read = sorted(cell for cell in self._moment.to_read if producer[cell] >= 0)
        # What backward is reading, is there whatever a plan does.
        held = [cell for cell in self._moment.handed_out if producer[cell] >= 0 and not self._is_free(cell)]
        calls, cells = self._close(to_read)
        self._in_memory = {cell: number for number, cell in enumerate(sorted(cells | set(held)))}
        self._runs_after = {call: len(self._in_memory) + number for number, call in enumerate(sorted(calls))}
        for call, runs in self._runs_after.items():
            for cell in problem.replayer.inputs[call]:
                self._rows.append(([(runs, -1.0), *self._there_or_made(cell)], 0))
        self._rows += [(self._there_or_made(cell), 1) for cell in to_read]
        self._rows += [([(self._in_memory[cell], 1.0)], 1) for cell in held]
        sizes = {variable: int(problem.sizes[cell]) for cell, variable in self._in_memory.items() if not self._is_free(cell)}
        self._rows.append(([(variable, -size / _UNIT) for variable, size in sizes.items()], 0))  # the bytes: last
        storages = {problem.trace.cells[cell].storage for cell in self._moment.open_cells if self._is_movable(cell)}
        self._fixed_bytes = problem.eager.peak_bytes - sum(problem.trace.storages[each].nbytes for each in storages)
        self._costs = np.zeros(len(self._in_memory) + len(self._runs_after))
        self._costs[list(self._runs_after.values())] = problem.seconds[list(self._runs_after)]
        terms = [(row, *term) for row, (row_terms, _) in enumerate(self._rows) for term in row_terms]
        places = [[term[0] for term in terms], [term[1] for term in terms]]
        self._matrix = csr_array(([term[2] for term in terms], places), shape=(len(self._rows), len(self._costs)))

    def minimise(
        self, room_bytes: int, *, whole: bool = False, gap: float = 0.0, most_nodes: int | None = None
    ) -> Relaxed | None:
        """The least seconds with at most `room_bytes` at the moment; None where that cannot be, or was not found.

        whole: no fractions, so that the cells are a choice; found to within the share `gap` of the best, or as the best of
        `most_nodes` nodes of the search.
        """
        if not len(self._costs):
            return Relaxed(0.0, 0.0, frozenset(), frozenset()) if self._fixed_bytes <= room_bytes else None
        least = np.array([bound for _, bound in self._rows], dtype=float)
        least[-1] = -(room_bytes - self._fixed_bytes) / _UNIT
        found = milp(
            self._costs,
            constraints=LinearConstraint(self._matrix, least, np.inf),
            bounds=Bounds(0, 1),
            integrality=np.full(len(self._costs), int(whole)),
            # Undoing HiGHS's presolve can miss its own tolerance; it then says so on the program's standard output.
            options={"mip_rel_gap": gap, "presolve": False} | ({} if most_nodes is None else {"node_limit": most_nodes}),
        )
        if found.x is None:
            return None
        bound_seconds = found.mip_dual_bound if whole else found.fun
        return Relaxed(float(found.fun), float(bound_seconds), *self._choice(found.x > 0.5))

    def _choice(self, is_one: np.ndarray) -> tuple[frozenset[int], frozenset[int]]:
        can_come_back = {cell: variable for cell, variable in self._in_memory.items() if self.problem.producer[cell] >= 0}
        to_read, saved = self._moment.to_read, self.problem.saved
        evict = (cell for cell, variable in can_come_back.items() if cell in to_read and not is_one[variable])
        return frozenset(evict), frozenset(
            cell for cell, variable in can_come_back.items() if not saved[cell] and is_one[variable]
        )

    def _there_or_made(self, cell: int) -> _Terms:
        call = self.problem.producer[cell]
        there = [(self._in_memory[cell], 1.0)]
        return there if call < 0 or cell in self._crossing else [*there, (self._runs_after[call], 1.0)]

    def _close(self, cells: list[int]) -> tuple[set[int], set[int]]:
        """All calls that could have to run for the cells, and all cells those read or make on the way."""
        producer, inputs = self.problem.producer, self.problem.replayer.inputs
        found, calls, stack = set(cells), set[int](), list(cells)
        while stack:
            call = int(producer[stack.pop()])
            if call >= 0 and call not in calls:
                calls.add(call)
                stack += [cell for cell in inputs[call] if cell not in found]
                found.update(inputs[call])
        return calls, found

    def _is_movable(self, cell: int) -> bool:
        """Of a cell that autograd has: a plan may take its bytes away. (A copy of overwritten content is not in the plain step.)"""
        is_held = self.problem.trace.cells[cell].storage in self._moment.held
        return self.problem.producer[cell] >= 0 and not is_held and cell not in self._moment.overwritten

    def _is_free(self, cell: int) -> bool:
        """To have it in memory takes no byte beyond those of the plain step that no plan can take away."""
        storage = self.problem.trace.cells[cell].storage
        if cell in self._moment.overwritten:
            return False
        if storage in self._moment.held or self.problem.trace.storages[storage].persistent:
            return True
        return self.problem.producer[cell] < 0 and cell in self._moment.open_cells


def _look(problem: Problem, moment: int) -> _Moment:
    """The state after the event `moment`."""
    trace = problem.trace
    will_read = {operand for operation, operand in trace.events if operation == UNPACK}
    held: set[int] = set()
    overwritten: set[int] = set()
    is_open: set[int] = set()
    read: set[int] = set()
    for operation, operand in trace.events[: moment + 1]:
        if operation == ALLOC:
            held.add(operand)
        elif operation == RELEASE:
            held.discard(operand)
        elif operation == SAVE:
            is_open.add(operand)
        elif operation == DROP:
            is_open.discard(operand)
        elif operation == UNPACK:
            read.add(operand)
        elif operation == BEGIN:
            overwritten.update(problem.replayer.overwrites[operand])
    handles = (is_open, is_open & will_read - read, is_open & read)
    cells = [frozenset(trace.handles[each].cell for each in some) for some in handles]
    return _Moment(frozenset(held), frozenset(overwritten), *cells)
