"""The guard: keeps a step inside the budget while nothing is planned for it yet.

It cuts the calls behind it into segments. What later calls read across a cut is its frontier; with the frontier kept, everything
else of a segment can be evicted at any later time and recomputed from the frontiers alone: after-the-fact checkpointing, whatever
the program's control flow. A cut is chosen in hindsight, some calls later, when it is known what was read across it. Under pressure
the oldest segment goes first (it comes back last). Source of the idea: Chen et al. 2016 (arXiv:1604.06174), made online; compare DTR
(arXiv:2006.09616).
"""

from __future__ import annotations

from itertools import accumulate

import torch

from memfit.core.errors import BudgetError
from memfit.core.precision import suggest
from memfit.core.sizes import format_size
from memfit.engine.cell import Call, Cell, Handle
from memfit.engine.filing import unpin_all
from memfit.engine.packing import workspace_bytes
from memfit.engine.tape import Tape
from memfit.measurement.recorder import Recorder

_OPERATIONS_IN_RESERVE = 2  # what backward needs to get going, in the largest operation seen
_SEGMENTS_IN_ROOM = 3  # a restored segment may take a third of the room; frontiers and gradients share the rest
_SMALLEST, _LARGEST = 0.5, 1.0  # segments, in parts of that third
_DEAD = 1 << 60  # "bytes" of a frontier that is gone already


class _Segment:
    """Consecutive calls [start, end), by number, and the cells they made."""

    __slots__ = ("cells", "end", "evicted", "frontier", "nbytes", "start")

    def __init__(self, start: int, end: int, cells: list[Cell], frontier: list[Cell]) -> None:
        self.start = start
        self.end = end
        self.cells = cells
        self.frontier = frontier
        self.nbytes = sum(cell.nbytes for cell in cells if cell.handles)
        self.evicted = False

    @property
    def frontier_bytes(self) -> int:
        return sum(cell.nbytes for cell in self.frontier)


class Guard:
    """Watches the tape through the recorder it wraps; an engine Observer itself."""

    def __init__(self, tape: Tape, recorder: Recorder, budget_bytes: int, fixed_bytes: int, *, may_lower: bool) -> None:
        """fixed_bytes: what the step holds whatever is evicted (parameters, gradients, optimizer state).

        may_lower: whether lower precision, not in force yet, may be advised where the budget is too small.
        """
        self.num_evictions = 0
        self._may_lower = may_lower
        self._tape = tape
        self._recorder, self._rows = recorder, recorder.rows
        self._budget_bytes = budget_bytes
        self._segment_bytes = max(budget_bytes - fixed_bytes, 1) / _SEGMENTS_IN_ROOM
        self._packing_bytes = 0  # what packing takes for a moment
        self._saved_in: dict[int, int] = {}  # call number by id of the living handle
        self._forget()
        recorder.make_room = self.make_room
        recorder.limit_bytes = budget_bytes

    def _forget(self) -> None:
        """A new forward begins: what was evicted before belongs to graphs of its own."""
        self._is_backward = False
        self._segments: list[_Segment] = []
        self._number_of: dict[Call, int] = {}
        self._made: dict[Cell, int] = {}
        self._last_read: dict[Cell, int] = {}
        self._num_calls = 0
        self._start_open(0, [])

    def _start_open(self, start: int, cells: list[Cell]) -> None:
        self._open_start = start
        self._open = cells  # made since then
        self._open_bytes = sum(cell.nbytes for cell in cells if cell.handles)
        self._enough_bytes = _LARGEST * self._segment_bytes

    # ---- observer ----------------------------------------------------------------------------------------------------

    def on_begin(self, call: Call) -> None:
        self._rows.on_begin(call)
        if self._is_backward:
            self._forget()
        self._trim_frontiers()
        if self._open_bytes >= self._enough_bytes and not self._cut(_SMALLEST * self._segment_bytes):
            self._enough_bytes = 1.25 * self._open_bytes

    def on_failed(self, call: Call) -> None:
        self._rows.on_failed(call)

    def on_internal(self, call: Call) -> None:
        self._rows.on_internal(call)

    def on_part(self, part: Call, cells: list[Cell]) -> None:
        self._rows.on_part(part, cells)
        self._note(part, cells)
        if part.makes == "in":
            self._packing_bytes = max(self._packing_bytes, workspace_bytes(part.args[1]))

    def on_end(self, call: Call, cells: list[Cell]) -> None:
        self._rows.on_end(call, cells)
        self._note(call, cells)
        self._number_of[call] = self._num_calls
        self._num_calls += 1

    def _note(self, call: Call, cells: list[Cell]) -> None:
        """What the call with the next number made and read."""
        for cell in cells:
            if cell.call is call:
                self._open.append(cell)
                self._made[cell] = self._num_calls
        for cell in call.inputs:
            self._last_read[cell] = self._num_calls

    def on_save(self, handle: Handle, call: Call | None) -> None:
        self._rows.on_save(handle, call)
        cell = handle.cell
        if call is None or cell is None:
            return
        self._saved_in[id(handle)] = self._number_of[call]
        if len(cell.handles) == 1 and self._made.get(cell, -1) >= self._open_start:
            self._open_bytes += cell.nbytes

    def on_packed(self, bits: torch.UntypedStorage, workspace_bytes: int) -> None:
        self._rows.on_packed(bits, workspace_bytes)

    def on_evicted(self, handle: Handle) -> None:
        self._rows.on_evicted(handle)

    def on_unpack(self, handle: Handle) -> None:
        self._is_backward = True
        self._rows.on_unpack(handle)
        reached = self._saved_in.get(id(handle))
        if reached is None:
            return
        while self._segments and self._segments[-1].start > reached:
            self._close(self._segments.pop())
        if self._segments and self._segments[-1].end > reached:
            self._close(self._segments[-1])

    def on_restored(self, handle: Handle, num_calls: int) -> None:
        self._rows.on_restored(handle, num_calls)

    def on_drop(self, handle: Handle) -> None:
        self._rows.on_drop(handle)
        self._saved_in.pop(id(handle), None)

    def before_optimizer(self) -> None:
        """It is about to overwrite parameters. Where no graph is alive nothing can be evicted any more, and what was held for that goes; else
        the tape would keep copies of them."""
        if not self._saved_in:
            unpin_all(self._tape)

    # ---- segments ----------------------------------------------------------------------------------------------------

    def _cut(self, least_bytes: float) -> bool:
        """Close a segment of at least so many saved bytes where the smallest frontier has been read across. False if nowhere."""
        end = self._find_cut(least_bytes)
        if end is None:
            return False
        cells = [cell for cell in self._open if self._made[cell] < end]
        frontier = [cell for cell in cells if self._crosses(cell, end) and cell.living_storage() is not None]
        for cell in frontier:
            cell.keep = True
            self._tape.pin(cell)
        self._segments.append(_Segment(self._open_start, end, cells, frontier))
        self._start_open(end, [cell for cell in self._open if self._made[cell] >= end])
        return True

    def _find_cut(self, least_bytes: float) -> int | None:
        """The call before which to cut the open calls: the smallest frontier, of equals the latest."""
        start, num_calls = self._open_start, self._num_calls - self._open_start
        crossing, saved = [0] * (num_calls + 2), [0] * (num_calls + 2)
        for cell in self._open:
            made = self._made[cell] - start
            if cell.handles:
                saved[made + 1] += cell.nbytes
            is_held = self._rows.is_held_by_program(cell)
            last = num_calls if is_held else self._last_read.get(cell, 0) - start
            if last > made:
                nbytes = cell.nbytes if is_held or cell.living_storage() is not None else _DEAD
                crossing[made + 1] += nbytes
                crossing[last + 1] -= nbytes
        crossing, saved = list(accumulate(crossing)), list(accumulate(saved))
        possible = [
            (crossing[end], -end)
            for end in range(1, num_calls + 1)
            if crossing[end] < _DEAD and saved[end] > max(least_bytes, 0)
        ]
        return start - min(possible)[1] if possible else None

    def _crosses(self, cell: Cell, end: int) -> bool:
        """Whether a call from number `end` on has read the cell, or still may."""
        return self._last_read.get(cell, -1) >= end or self._rows.is_held_by_program(cell)

    def _trim_frontiers(self) -> None:
        """A frontier cell that the program let go of before any later segment read it is no frontier (a local never used again)."""
        for segment in self._segments:
            for cell in segment.frontier:
                if not self._crosses(cell, segment.end):
                    cell.keep = False
                    self._tape.unpin(cell)
                    if segment.evicted:
                        self.num_evictions += self._tape.evict_cell(cell)
            segment.frontier = [cell for cell in segment.frontier if cell.keep]

    def _close(self, segment: _Segment) -> None:
        """Backward has passed all later segments: only what is needed of its frontier stays."""
        for cell in segment.frontier:
            self._tape.unpin(cell)
        segment.frontier = []

    def make_room(self, nbytes: int) -> None:
        """Let go of enough for `nbytes` more, oldest segments first. Raises BudgetError before the budget would be exceeded.

        In forward some room stays for the operations of backward and for what they ask for.
        """
        if self._tape.is_packing:  # in the middle of an eviction; it frees far more than it takes
            return
        for segment in self._segments:
            if self._fits(nbytes):
                return
            if not segment.evicted:
                self._evict(segment)
        if self._is_backward:
            self._let_go_of_restored(nbytes)
        while not self._fits(nbytes) and self._merge_best():
            pass
        while not self._fits(nbytes) and not self._is_backward and self._cut(0):
            self._evict(self._segments[-1])
            while not self._fits(nbytes) and self._merge_best():
                pass
        if self._recorder.ledger.live_bytes + nbytes > self._budget_bytes:
            raise self._error(nbytes)

    def _fits(self, nbytes: int) -> bool:
        reserve = self._packing_bytes if self._is_backward else _OPERATIONS_IN_RESERVE * self._recorder.largest_operation_bytes
        self._recorder.limit_bytes = self._budget_bytes - reserve
        return self._recorder.ledger.live_bytes + nbytes <= self._recorder.limit_bytes

    def _let_go_of_restored(self, nbytes: int) -> None:
        """Evict again what a replay brought back too early: the earliest calls' content is asked for last. Costs further replays."""
        for segment in self._segments:
            for cell in segment.cells:
                if self._fits(nbytes):
                    return
                if not cell.keep and not cell.pinned and cell.storage is not None:
                    self._tape.let_go_again(cell)

    def _merge_best(self) -> bool:
        """Give up frontiers between evicted segments, so that frontiers and the largest segment together become smallest. False
        where no packing of neighbours makes them smaller."""
        sizes = [segment.nbytes for segment in self._segments]
        limits = {sum(sizes[i:j]) for i in range(len(sizes)) for j in range(i + 2, min(i + 9, len(sizes) + 1))}
        best_bytes, best = self._weigh([[segment] for segment in self._segments]), None
        for limit in sorted(limits):
            groups = self._pack(limit)
            weight = self._weigh(groups)
            if weight < best_bytes:
                best_bytes, best = weight, groups
        if best is None:
            return False
        self._segments = [self._join(group) for group in best]
        return True

    def _pack(self, limit_bytes: int) -> list[list[_Segment]]:
        """Neighbouring evicted segments in groups of at most the limit."""
        groups: list[list[_Segment]] = []
        for segment in self._segments:
            group = groups[-1] if groups else []
            fits = sum(each.nbytes for each in group) + segment.nbytes <= limit_bytes
            if group and fits and group[-1].evicted and segment.evicted:
                group.append(segment)
            else:
                groups.append([segment])
        return groups

    @staticmethod
    def _weigh(groups: list[list[_Segment]]) -> int:
        """Bytes of the frontiers that stay, and of the largest group to be brought back at once."""
        evicted = [group for group in groups if group[-1].evicted]
        largest = max((sum(each.nbytes for each in group) for group in evicted), default=0)
        return sum(group[-1].frontier_bytes for group in evicted) + largest

    def _join(self, group: list[_Segment]) -> _Segment:
        last = group[-1]
        for segment in reversed(group[:-1]):
            last.frontier = [cell for cell in segment.frontier if not self._tape.abandon(cell)] + last.frontier
            last.cells = segment.cells + last.cells
            last.nbytes += segment.nbytes
            last.start = segment.start
        return last

    def _evict(self, segment: _Segment) -> None:
        segment.evicted = True
        for cell in segment.cells:
            if not cell.keep:
                self.num_evictions += self._tape.evict_cell(cell)

    def _error(self, nbytes: int) -> BudgetError:
        live = self._recorder.ledger.live_bytes
        needed = live + nbytes
        live_by_kind = dict(self._recorder.ledger.live_bytes_by_kind())
        by_kind = ", ".join(f"{kind} {format_size(size)}" for kind, size in live_by_kind.items())
        lower = ""
        if self._may_lower:
            wanted = {**live_by_kind, "temporary": live_by_kind.get("temporary", 0) + nbytes}
            lower = suggest(wanted, needed, self._budget_bytes)
        message = (
            f"{format_size(self._budget_bytes)} is too small for this step: in the {self._recorder.ledger.phase} phase, with everything "
            f"evicted that can be recomputed, {format_size(live)} are alive and the next operation allocates "
            f"{format_size(nbytes)}. Alive: {by_kind}. No parameter was changed in this step. This operation "
            f"takes a budget of {format_size(needed)}, a later one may take more: `memfit trace` and `memfit plan` say what the whole step takes at "
            f"least. A smaller batch takes less. {lower}"
        )
        return BudgetError(message.rstrip(), needed_bytes=needed, may_lower=bool(lower))
