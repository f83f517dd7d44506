"""The guard: keeps a step inside the budget while nothing is planned for it yet.

It cuts the calls into segments as they are recorded. At a cut only what the program still holds can be read by later calls, so
with that frontier kept, everything else of a segment can be evicted at any later time and recomputed from the frontier alone:
after-the-fact checkpointing, whatever the program's control flow. Under pressure the oldest segment goes first (it comes back
last). Source of the idea: Chen et al. 2016 (arXiv:1604.06174), made online; compare DTR (arXiv:2006.09616).
"""

from __future__ import annotations

from collections import deque

from memfit.core.errors import BudgetError
from memfit.core.sizes import format_size
from memfit.engine.cell import Call, Cell, Handle
from memfit.engine.tape import Tape
from memfit.measurement.recorder import Recorder

_WINDOW = 64  # calls over which the lowest number of unread bytes is looked for
_OPERATIONS_IN_RESERVE = 2  # what backward needs to get going, in the largest operation seen
_SEGMENTS_IN_ROOM = 3  # a restored segment may take a third of the room; frontiers and gradients share the rest


class _Segment:
    """Consecutive calls, cut where little was alive."""

    __slots__ = ("cells", "evicted", "frontier", "nbytes", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.cells: list[Cell] = []
        self.frontier: list[Cell] = []
        self.nbytes = 0  # of what autograd saved in it
        self.evicted = False

    @property
    def frontier_bytes(self) -> int:
        return sum(cell.nbytes for cell in self.frontier)


class Guard:
    """Watches the tape through the recorder it wraps; an engine Observer itself."""

    def __init__(self, tape: Tape, recorder: Recorder, budget_bytes: int, fixed_bytes: int) -> None:
        """fixed_bytes: what the step holds whatever is evicted (parameters, gradients, optimizer state)."""
        self.num_evictions = 0
        self._tape = tape
        self._recorder = recorder
        self._budget_bytes = budget_bytes
        self._room_bytes = max(budget_bytes - fixed_bytes, 1)
        self._segments: list[_Segment] = []
        self._open = _Segment(0)
        self._segment_of: dict[Call, int] = {}
        self._saved_in: dict[int, int] = {}  # segment by id of the living handle
        self._is_backward = False
        self._unread_bytes: deque[int] = deque(maxlen=_WINDOW)
        self._last_read: dict[Cell, int] = {}  # the last segment that read it
        recorder.make_room = self.make_room
        recorder.limit_bytes = budget_bytes

    # ---- observer ----------------------------------------------------------------------------------------------------

    def on_begin(self, call: Call) -> None:
        self._recorder.on_begin(call)
        if self._is_backward:  # a new forward: what was evicted before belongs to graphs of its own
            self._is_backward = False
            self._segments.clear()
            self._segment_of.clear()
            self._last_read.clear()
            self._open = _Segment(0)
        self._consider_cut()

    def on_end(self, call: Call, cells: list[Cell]) -> None:
        self._recorder.on_end(call, cells)
        self._segment_of[call] = self._open.number
        self._open.cells.extend(cell for cell in cells if cell.call is call)
        for cell in call.inputs:
            self._last_read[cell] = self._open.number

    def on_save(self, handle: Handle, call: Call | None) -> None:
        self._recorder.on_save(handle, call)
        if call is not None and handle.cell is not None and handle.cell.call is not None:
            self._open.nbytes += handle.cell.nbytes if len(handle.cell.handles) == 1 else 0
        if call is not None:
            self._saved_in[id(handle)] = self._segment_of[call]

    def on_evicted(self, handle: Handle) -> None:
        self._recorder.on_evicted(handle)

    def on_unpack(self, handle: Handle) -> None:
        self._is_backward = True
        self._recorder.on_unpack(handle)
        reached = self._saved_in.get(id(handle))
        while reached is not None and self._segments and self._segments[-1].number > reached:
            self._close(self._segments.pop())
        if reached is not None and self._segments and self._segments[-1].number == reached:
            self._close(self._segments[-1])

    def on_restored(self, handle: Handle, num_calls: int) -> None:
        self._recorder.on_restored(handle, num_calls)

    def on_drop(self, handle: Handle) -> None:
        self._recorder.on_drop(handle)
        self._saved_in.pop(id(handle), None)

    # ---- segments ----------------------------------------------------------------------------------------------------

    def _consider_cut(self) -> None:
        """Cut where little is alive that nobody has read yet, once the open segment is large enough to be worth it."""
        self._trim_frontiers()
        unread_bytes = sum(
            cell.nbytes for cell in self._open.cells if cell not in self._last_read and self._recorder.is_held_by_program(cell)
        )
        if unread_bytes:
            self._unread_bytes.append(unread_bytes)
        size = self._open.nbytes
        target = self._room_bytes // _SEGMENTS_IN_ROOM
        lowest = min(self._unread_bytes, default=0)
        if (
            (size * 2 >= target and unread_bytes <= 2 * lowest)
            or (size >= target and unread_bytes * 4 <= target)
            or size >= 2 * target
        ):
            self._cut()

    def _cut(self) -> None:
        segment = self._open
        segment.frontier = [cell for cell in segment.cells if self._recorder.is_held_by_program(cell)]
        for cell in segment.frontier:
            cell.keep = True
            self._tape.pin(cell)
        self._segments.append(segment)
        self._open = _Segment(segment.number + 1)

    def _trim_frontiers(self) -> None:
        """A frontier cell that the program let go of before any later segment read it is no frontier (a local never used again)."""
        for segment in self._segments:
            for cell in segment.frontier:
                if not self._recorder.is_held_by_program(cell) and self._last_read.get(cell, 0) <= segment.number:
                    cell.keep = False
                    self._tape.unpin(cell)
                    if segment.evicted:
                        self._evict_cell(cell)
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
        for segment in self._segments:
            if self._fits(nbytes):
                return
            if not segment.evicted:
                self._evict(segment)
        if self._is_backward:
            self._let_go_of_restored(nbytes)
        while not self._fits(nbytes) and self._merge_best():
            pass
        if not self._fits(nbytes) and not self._is_backward and self._open.cells:
            self._cut()
            self._evict(self._segments[-1])
            while not self._fits(nbytes) and self._merge_best():
                pass
        if self._recorder.live_bytes + nbytes > self._budget_bytes:
            raise self._error(nbytes)

    def _fits(self, nbytes: int) -> bool:
        reserve = 0 if self._is_backward else _OPERATIONS_IN_RESERVE * self._recorder.largest_operation_bytes
        self._recorder.limit_bytes = self._budget_bytes - reserve
        return self._recorder.live_bytes + nbytes <= self._recorder.limit_bytes

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
        return last

    def _evict(self, segment: _Segment) -> None:
        segment.evicted = True
        for cell in segment.cells:
            if not cell.keep:
                self._evict_cell(cell)

    def _evict_cell(self, cell: Cell) -> None:
        for ref in cell.handles:
            handle = ref()
            if handle is not None and handle.alias is not None and self._tape.evict_handle(handle):
                self.num_evictions += 1

    def _error(self, nbytes: int) -> BudgetError:
        live = self._recorder.live_bytes
        needed = live + nbytes
        by_kind = ", ".join(f"{kind} {format_size(size)}" for kind, size in self._recorder.live_bytes_by_kind())
        return BudgetError(
            f"{format_size(self._budget_bytes)} is too small for this step: in the {self._recorder.phase} phase, with everything "
            f"evicted that can be recomputed, {format_size(live)} are alive and the next operation allocates "
            f"{format_size(nbytes)}. Alive: {by_kind}. No parameter was changed in this step. Use a budget of at least "
            f"{format_size(needed)}, a smaller batch, or `memfit trace` and `memfit plan` to see the smallest feasible one.",
            needed_bytes=needed,
        )
