"""Problem: a trace as solvers see it, and the minimum cut at the heart of choosing what to recompute.

Choosing is project selection (Picard 1976; for autograd: torch's min-cut partitioner). With a price of `price` seconds
for each byte kept, the best choice is a minimum cut of this graph, where 'on the source's side' reads 'required' for a
cell and 'replayed' for a call:

    source -> cell         infinite      every saved cell is required
    cell   -> its call     price * size  a required cell is kept, at that price, or its call is replayed
    cell   -> sink         price * size  instead of that, where it must not be recomputed: it crosses a region's border
    call   -> its inputs   infinite      a replayed call requires its inputs
    call   -> sink         seconds

A cut takes about 1 ms for 1,500 calls: scipy's Dinic on integers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from memfit.core.keys import Cells
from memfit.core.replay import Replayer
from memfit.core.trace import BEGIN, DROP, RELEASE, Trace

OnProgress = Callable[[str, int, int | None], None]  # stage, plans replayed so far, of how many in all

_INFINITE = 2**30
_SCALE = 2**28  # all seconds of the step in integer units; the sum of a finite cut stays below _INFINITE


@dataclass(frozen=True, eq=False)
class Choice:
    """Cells to evict, to pin, and to bring back for each reader anew, and what the replay says of them. One object for each set of moves, so
    equal to itself alone."""

    peak_bytes: int
    seconds: float
    evict: frozenset[int]
    pin: frozenset[int]
    transient: frozenset[int] = frozenset()

    @property
    def cells(self) -> Cells:
        """Its moves, as the replay takes them."""
        return Cells(self.evict, self.pin, self.transient)


@dataclass(frozen=True)
class Cut:
    """Cells to evict and to pin, and the cut's value: seconds of the replayed calls and prices of what is kept."""

    evict: frozenset[int]
    pin: frozenset[int]
    value: float


class Problem:
    """The trace with what every solver asks of it, as arrays over its cells.

    sizes: bytes. producer: the call that can bring the cell back, or -1. saved: autograd saved it and it may be
    evicted.
    lonely_from, lonely_until: the events between which only handles hold the storage: evicting pays in there alone.
    last_read: the last call that reads the cell, or -1.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.replayer = Replayer(trace)
        self.num_evaluations = 0
        self._known: dict[tuple[frozenset[int], frozenset[int], frozenset[int]], Choice] = {}
        self._replayed: dict[tuple[frozenset[int], frozenset[int]], frozenset[int]] = {}
        self.eager = self.replayer.run()
        num_cells, num_calls = len(trace.cells), len(trace.calls)
        self.sizes = np.array([trace.storages[cell.storage].nbytes for cell in trace.cells], dtype=np.int64)
        self.producer = np.array(self.replayer.producer, dtype=np.int64)
        self.seconds = np.array(self.replayer.seconds)
        self.saved = np.zeros(num_cells, dtype=bool)
        self.saved[list(self.replayer.saved)] = True
        self.saved &= self.producer >= 0
        self.last_read = np.full(num_cells, -1, dtype=np.int64)
        for index, call in enumerate(trace.calls):
            self.last_read[list(call.inputs)] = index
        self._find_lonely_spans()
        self._build_graph(num_cells, num_calls)

    def _find_lonely_spans(self) -> None:
        num_cells = len(self.trace.cells)
        released = np.full(len(self.trace.storages), len(self.trace.events), dtype=np.int64)
        self.lonely_until = np.full(num_cells, -1, dtype=np.int64)
        self.begin_event = np.zeros(len(self.trace.calls), dtype=np.int64)
        for index, (operation, operand) in enumerate(self.trace.events):
            if operation == RELEASE:
                released[operand] = index
            elif operation == DROP:
                self.lonely_until[self.trace.handles[operand].cell] = index
            elif operation == BEGIN:
                self.begin_event[operand] = index
        self.is_held_for_ever = np.array(
            [
                released[cell.storage] == len(self.trace.events) and self.trace.storages[cell.storage].kind != "packed"
                for cell in self.trace.cells
            ],
            dtype=bool,
        )
        self.lonely_from = np.array([released[cell.storage] for cell in self.trace.cells], dtype=np.int64)

    def _build_graph(self, num_cells: int, num_calls: int) -> None:
        self.source, self.sink = num_cells + num_calls, num_cells + num_calls + 1
        cells = np.flatnonzero(self.producer >= 0)
        # A source nobody can recompute costs its bytes as well, unless the program holds it anyway.
        self.foreign = np.flatnonzero((self.producer < 0) & ~self.is_held_for_ever)
        reads = [(num_cells + call, cell) for call, each in enumerate(self.replayer.inputs) for cell in each]
        tails = [np.full(len(cells), self.source), cells, cells, self.foreign]
        heads = [cells, num_cells + self.producer[cells]]
        heads += [np.full(len(cells), self.sink), np.full(len(self.foreign), self.sink)]
        tails += [np.array([a for a, _ in reads], dtype=np.int64), num_cells + np.arange(num_calls)]
        heads += [np.array([b for _, b in reads], dtype=np.int64), np.full(num_calls, self.sink)]
        self._lengths = [len(each) for each in tails]
        size = self.sink + 1
        tail, head = np.concatenate(tails), np.concatenate(heads)
        numbered = csr_array((np.arange(1, len(tail) + 1), (tail, head)), shape=(size, size))
        self._order, self._indices, self._indptr = numbered.data - 1, numbered.indices, numbered.indptr
        self._cells = cells
        self.unit = max(float(self.seconds.sum()), 1e-9) / _SCALE

    def relevant(self, level_bytes: float) -> np.ndarray:
        """Cells that handles alone hold at a moment when the eager step is at `level_bytes` or above."""
        above = np.concatenate([[0], np.cumsum(np.array(self.eager.high_bytes) >= level_bytes)])
        start = np.minimum(self.lonely_from, len(above) - 2)
        return self.saved & (self.lonely_until > start) & (above[self.lonely_until + 1] > above[start])

    def cut(self, required: np.ndarray, prices: np.ndarray, borders: np.ndarray) -> Cut:
        """The cheapest choice at these prices. All three are arrays over cells.

        required: the saved cells in question; the others are left alone and, as sources, cost as much as an unsaved
        one.
        prices: seconds for keeping the whole cell. borders: cells that must be kept if they are required.
        """
        units = np.minimum(prices / self.unit, _SCALE + 1).astype(np.int64)
        price, border = units[self._cells], borders[self._cells]
        capacity = np.concatenate(
            [
                np.where(required[self._cells], _INFINITE, 0),
                np.where(border, 0, price),
                np.where(border, price, 0),
                units[self.foreign],
                np.full(self._lengths[4], _INFINITE),
                np.ceil(self.seconds / self.unit).astype(np.int64),
            ]
        )
        graph = csr_array(
            (capacity[self._order].astype(np.int32), self._indices, self._indptr), shape=(self.sink + 1, self.sink + 1)
        )
        flow = maximum_flow(graph, self.source, self.sink)
        rest = graph - flow.flow
        rest.data = np.maximum(rest.data, 0)
        rest.eliminate_zeros()
        reached = np.zeros(self.sink + 1, dtype=bool)
        reached[breadth_first_order(rest, self.source, return_predecessors=False)] = True
        num_cells = len(self.sizes)
        replayed = np.zeros(num_cells, dtype=bool)
        has_producer = self.producer >= 0
        replayed[has_producer] = reached[num_cells + self.producer[has_producer]]
        is_needed = reached[:num_cells] & has_producer
        keep = is_needed & (~replayed | borders)
        evict = required & is_needed & ~keep
        pin = keep & ~self.saved
        return Cut(
            frozenset(np.flatnonzero(evict).tolist()),
            frozenset(np.flatnonzero(pin).tolist()),
            flow.flow_value * self.unit,
        )

    def evaluate(self, evict: frozenset[int], pin: frozenset[int], transient: frozenset[int] = frozenset()) -> Choice:
        """The choice with its peak and seconds as the replay finds them; what has nothing to do with the evicted is left out."""
        pin = self._useful_pins(evict, pin)
        if transient:
            transient &= {cell for call in self.replayed_calls(evict, pin) for cell in self.replayer.outputs[call]}
            transient -= pin
        known = self._known.get((evict, pin, transient))
        if known is None:
            self.num_evaluations += 1
            known = Choice(*self.replayer.measure(evict, pin, transient), evict, pin, transient)
            self._known[evict, pin, transient] = known
        return known

    def find_waiting(self, choice: Choice) -> tuple[int, ...]:
        """See `Replayer.waiting`; counts as two evaluations, for it replays twice."""
        self.num_evaluations += 2
        return self.replayer.waiting(*choice.cells)

    def replayed_calls(self, evict: frozenset[int], pin: frozenset[int]) -> frozenset[int]:
        """Calls that evicted cells are computed from, by structure alone."""
        known = self._replayed.get((evict, pin))
        if known is None:
            known = self._replayed[evict, pin] = frozenset(self._find_replayed_calls(evict, pin))
        return known

    def _find_replayed_calls(self, evict: frozenset[int], pin: frozenset[int]) -> set[int]:
        producer, inputs, saved = self.replayer.producer, self.replayer.inputs, self.replayer.saved
        stack = [producer[cell] for cell in evict if producer[cell] >= 0]
        found = set(stack)
        while stack:
            for cell in inputs[stack.pop()]:
                call = producer[cell]
                if call >= 0 and call not in found and cell not in pin and (cell in evict or cell not in saved):
                    found.add(call)
                    stack.append(call)
        return found

    def _useful_pins(self, evict: frozenset[int], pin: frozenset[int]) -> frozenset[int]:
        if not pin:
            return pin
        inputs = self.replayer.inputs
        return pin & {cell for call in self.replayed_calls(evict, pin) for cell in inputs[call]}
