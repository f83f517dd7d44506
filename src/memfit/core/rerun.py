"""Rerun: a trace's events run again with some cells evicted: the bookkeeping under `core.replay`.

The live counterpart is engine/need.py; the two must agree to the byte.
"""

from __future__ import annotations

from typing import NamedTuple

from memfit.core.trace import ALLOC, BEGIN, DROP, END, OPERATIONS, PHASE, RELEASE, SAVE, SPIKE, UNPACK, Trace

_ALLOC, _RELEASE, _SAVE, _UNPACK, _DROP, _BEGIN, _END, _SPIKE, _PHASE = (
    OPERATIONS.index(each) for each in (ALLOC, RELEASE, SAVE, UNPACK, DROP, BEGIN, END, SPIKE, PHASE)
)
_FOLD = len(OPERATIONS)  # a run of events that no plan can change: (net bytes, highest rise)
_PENDING, _EMPTY = -1, -2  # states of a handle that holds no storage: evicted and awaited; not yet saved or dropped


class Restore(NamedTuple):
    """A moment in which evicted content came back: the event, the cell asked for, the calls run for it."""

    event: int
    cell: int
    calls: tuple[int, ...]
    seconds: float


class Tables:
    """A trace as the rerun reads it: in columns, with `short_events` for when only the sums matter."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        number = {operation: index for index, operation in enumerate(OPERATIONS)}
        self.events = [(number[operation], operand) for operation, operand in trace.events]
        self.sizes = [storage.nbytes for storage in trace.storages]
        self.cell_storage = [cell.storage for cell in trace.cells]
        self.handle_cell = [handle.cell for handle in trace.handles]
        # A cell nothing can bring back is a source wherever it lives, as an external one is.
        self.producer = [cell.call if cell.evictable else -1 for cell in trace.cells]
        self.inputs = [call.inputs for call in trace.calls]
        self.outputs = [call.outputs for call in trace.calls]
        self.seconds = [call.seconds for call in trace.calls]
        self.extra_bytes = [call.extra_bytes for call in trace.calls]
        self.previous = [cell.previous if cell.position.startswith("mut") else -1 for cell in trace.cells]
        self.overwrites = [[self.previous[c] for c in call.outputs if self.previous[c] >= 0] for call in trace.calls]
        self.saved = frozenset(self.handle_cell)
        self.is_packed = [storage.kind == "packed" for storage in trace.storages]
        self.packing_bytes = {  # by packed cell: packing takes at its worst moment what unpacking takes
            cell: self.extra_bytes[call]
            for call, inputs in enumerate(self.inputs)
            for cell in inputs
            if self.is_packed[self.cell_storage[cell]]
        }
        self.short_events = self._fold_events()

    def _fold_events(self) -> list[tuple[int, int, int]]:
        """The events as `Rerun.play` reads them, what no plan can change folded together: 2-4 times fewer."""
        released = {operand for operation, operand in self.events if operation == _RELEASE}
        has_cell = set(self.cell_storage)
        is_fixed = [p < 0 and s not in released for p, s in zip(self.producer, self.cell_storage, strict=True)]
        folded: list[tuple[int, int, int]] = []
        net = rise = 0
        is_backward = False  # an unpack has been seen since the last call ended, so nothing is pinned
        for operation, operand in self.events:
            if operation in (_ALLOC, _RELEASE) and operand not in has_cell:
                net += self.sizes[operand] if operation == _ALLOC else -self.sizes[operand]
                rise = max(rise, net)
            elif operation == _SPIKE:
                rise = max(rise, net + operand)
            elif not (
                operation == _PHASE
                or (operation == _BEGIN and not self.overwrites[operand])
                or (operation in (_SAVE, _DROP) and is_fixed[self.handle_cell[operand]])
                or (operation == _UNPACK and is_backward and self.producer[self.handle_cell[operand]] < 0)
            ):
                if net or rise:
                    folded.append((_FOLD, net, rise))
                    net = rise = 0
                is_backward = operation == _UNPACK or (is_backward and operation != _END)
                folded.append((operation, operand, 0))
        folded.append((_FOLD, net, rise))
        return folded


class Rerun:
    """The state of one replay. Instances are storages of the trace and, after them, restored copies.

    holds: by instance, how many hold it (program, handles, needs, pins).
    need: by cell, pending handles on it and wanted calls that read it.
    store: by cell, the instance a need or pin holds, else -1. wanted: by call, its needed cells that are not held.
    passing: by transient cell that a restore passes, its instance and the calls of the restore that have yet to read it.
    """

    def __init__(self, tables: Tables, evict: frozenset[int], pin: frozenset[int], transient: frozenset[int]) -> None:
        self.tables = tables
        num_cells = len(tables.cell_storage)
        self.evict, self.pin, self.transient = evict, pin, transient
        self.keepable = [producer < 0 for producer in tables.producer]
        for cell in tables.saved - evict:
            self.keepable[cell] = True
        for cell in pin:
            self.keepable[cell] = True
        self.sizes = list(tables.sizes)
        self.origin = list(range(len(self.sizes)))
        self.holds = [0] * len(self.sizes)
        self.need = [0] * num_cells
        self.store = [-1] * num_cells
        self.written = [False] * num_cells
        self.wanted = [0] * len(tables.inputs)
        self.handles = [_EMPTY] * len(tables.handle_cell)
        self.pinned: set[int] = set()
        self.passing: dict[int, list[int]] = {}
        self.live = self.high = self.peak_bytes = self.peak_event = 0
        self.live_bytes: list[int] = []
        self.high_bytes: list[int] = []
        self.restores: list[Restore] = []
        self.recipes: set[int] = set()
        self.num_kept_instead = 0
        self.held: list[int] = []
        self.waiting: list[int] = []

    def play(
        self, events: list[tuple[int, int, int]], until_event: int = -1, until_bytes: int = 0, *, only_peak: bool = False
    ) -> None:
        """Run the events (operation, operand, highest rise of a fold).

        With `until_event`, stop within it as soon as `until_bytes` are reached, and fill `held` with the storages that are there and
        `waiting` with the cells that have come back and wait for a reader. only_peak: find `peak_bytes`, and not where it is.
        """
        holds, sizes, handles, evict = self.holds, self.sizes, self.handles, self.evict
        handle_cell, cell_storage = self.tables.handle_cell, self.tables.cell_storage
        self.until_bytes = 0
        is_recorded = events is not self.tables.short_events
        pinning = {self.tables.producer[cell] for cell in self.pin}
        for index, (operation, operand, rise) in enumerate(events):
            if not only_peak:
                self.high = self.live
                if index == until_event:
                    self.until_bytes = until_bytes
            if operation == _FOLD:
                self._reach(self.live + rise)
                self.live += operand
            elif operation == _ALLOC:
                self._hold(operand)
            elif operation == _RELEASE:
                holds[operand] -= 1
                if not holds[operand]:
                    self.live -= sizes[operand]
            elif operation == _END:
                if operand in pinning:
                    self._pin(operand)
            elif operation == _SAVE:
                cell = handle_cell[operand]
                if cell in evict and not self.written[cell] and self._evictable(cell):
                    handles[operand] = _PENDING
                else:
                    handles[operand] = storage = cell_storage[cell]
                    if holds[storage]:
                        holds[storage] += 1
                    else:
                        self._hold(storage)
            elif operation == _UNPACK:
                if self.pinned:
                    self._unpin()
                if handles[operand] == _PENDING:
                    self._restore(index, operand)
            elif operation == _DROP:
                state, handles[operand] = handles[operand], _EMPTY
                if state == _PENDING:
                    self._drop_need(handle_cell[operand])
                elif state != _EMPTY:
                    holds[state] -= 1
                    if not holds[state]:
                        self.live -= sizes[state]
            elif operation == _BEGIN:
                for cell in self.tables.overwrites[operand]:
                    self._keep_content(cell)
            elif operation == _SPIKE:
                self._reach(self.live + operand)
            if only_peak:
                continue
            if self.high > self.peak_bytes:
                self.peak_bytes, self.peak_event = self.high, index
            if is_recorded:
                self.live_bytes.append(self.live)
                self.high_bytes.append(self.high)
            if self.held:
                return
        if only_peak:
            self.peak_bytes = self.high

    # ---- bytes -----------------------------------------------------------------------------------------------------

    def _reach(self, num_bytes: int) -> None:
        if num_bytes > self.high:
            self.high = num_bytes
        if self.until_bytes and num_bytes >= self.until_bytes and not self.held:
            self.held = [self.origin[each] for each, count in enumerate(self.holds) if count]
            self.waiting = [cell for cell, instance in enumerate(self.store) if instance >= len(self.tables.sizes)]

    def _hold(self, instance: int) -> None:
        self.holds[instance] += 1
        if self.holds[instance] == 1:
            self.live += self.sizes[instance]
            self._reach(self.live)

    def _release(self, instance: int) -> None:
        self.holds[instance] -= 1
        if not self.holds[instance]:
            self.live -= self.sizes[instance]

    def _copy_of(self, cell: int) -> int:
        """A new instance with the cell's content, not yet held."""
        storage = self.tables.cell_storage[cell]
        self.sizes.append(self.tables.sizes[storage])
        self.origin.append(storage)
        self.holds.append(0)
        return len(self.sizes) - 1

    # ---- pins and in-place calls -----------------------------------------------------------------------------------

    def _pin(self, call: int) -> None:
        for cell in self.tables.outputs[call]:
            storage = self.tables.cell_storage[cell]
            if cell in self.pin and cell not in self.pinned and self.holds[storage]:
                if self.store[cell] < 0:
                    self.store[cell] = storage
                    self._hold(storage)
                self.pinned.add(cell)

    def _unpin(self) -> None:
        for cell in sorted(self.pinned):
            if not self.need[cell]:
                self._release(self.store[cell])
                self.store[cell] = -1
        self.pinned.clear()

    def _keep_content(self, cell: int) -> None:
        """The cell is about to be overwritten: who holds its content, holds a copy from now on, as in the engine."""
        if self.store[cell] == self.tables.cell_storage[cell]:
            copy = self._copy_of(cell)
            self._hold(copy)
            self._release(self.store[cell])
            self.store[cell] = copy
        self.written[cell] = True

    # ---- needs -----------------------------------------------------------------------------------------------------

    def _evictable(self, cell: int) -> bool:
        """Count a need on the cell. False, and nothing changed, if its content could not be brought back."""
        need, store, wanted, producer = self.need, self.store, self.wanted, self.tables.producer
        counted: list[int] = []
        held: list[int] = []
        called: list[int] = []
        stack = [cell]
        while stack:
            current = stack.pop()
            counted.append(current)
            need[current] += 1
            if need[current] > 1 or store[current] >= 0:
                continue
            storage = self.tables.cell_storage[current]
            is_packed = self.tables.is_packed[storage]
            if self.keepable[current] and (self.holds[storage] or is_packed) and not self.written[current]:
                store[current] = storage
                self._hold(storage)
                if is_packed:
                    self._reach(self.live + self.tables.packing_bytes[current])
                held.append(current)
                continue
            call = producer[current]
            if call < 0:
                for each in counted:
                    need[each] -= 1
                for each in held:
                    self._release(store[each])
                    store[each] = -1
                for each in called:
                    wanted[each] -= 1
                self.num_kept_instead += 1
                return False
            wanted[call] += 1
            called.append(call)
            if wanted[call] == 1:
                stack.extend(self.tables.inputs[call])
        self.recipes.update(called)
        return True

    def _drop_need(self, cell: int) -> None:
        need, store, wanted = self.need, self.store, self.wanted
        stack = [cell]
        while stack:
            current = stack.pop()
            need[current] -= 1
            if need[current] > 0:
                continue
            if store[current] >= 0:
                if current not in self.pinned:
                    self._release(store[current])
                    store[current] = -1
            else:
                call = self.tables.producer[current]
                wanted[call] -= 1
                if not wanted[call]:
                    stack.extend(self.tables.inputs[call])

    # ---- restoring -------------------------------------------------------------------------------------------------

    def _restore(self, event: int, handle: int) -> None:
        cell = self.tables.handle_cell[handle]
        if self.store[cell] < 0:
            calls = self._missing_calls(cell)
            passed = self.transient - {cell}
            made: set[int] = set()
            if passed:
                self._note_passing(calls, passed)
            for call in calls:
                self._run_call(call, made, passed)
            self.restores.append(Restore(event, cell, calls, sum([self.tables.seconds[call] for call in calls])))
        self.handles[handle] = self.store[cell]
        self.holds[self.store[cell]] += 1
        self._drop_need(cell)

    def _missing_calls(self, cell: int) -> tuple[int, ...]:
        producer, inputs, store = self.tables.producer, self.tables.inputs, self.store
        found: set[int] = set()
        stack = [producer[cell]]
        while stack:
            call = stack.pop()
            if call not in found:
                found.add(call)
                stack += [producer[each] for each in inputs[call] if store[each] < 0]
        return tuple(sorted(found))

    def _note_passing(self, calls: tuple[int, ...], passed: frozenset[int]) -> None:
        for call in calls:
            for source in self.tables.inputs[call]:
                if source in passed and self.store[source] < 0:
                    self.passing.setdefault(source, [-1, 0])[1] += 1

    def _run_call(self, call: int, made: set[int], passed: frozenset[int]) -> None:
        """Replay one call: every result takes its bytes, the needed ones stay, sources nobody needs any more leave.

        passed: cells whose content goes once this restore has read it, whoever else needs it.
        """
        tables, need, store = self.tables, self.need, self.store
        outputs = tables.outputs[call]
        is_last_run = not passed or not any(need[c] and store[c] < 0 for c in passed.intersection(outputs))
        moment_bytes = self.live + tables.extra_bytes[call]  # with all results, those included that go at once
        for cell in outputs:
            previous = tables.previous[cell]
            if previous in made and is_last_run and need[previous] == 1 and previous not in self.pinned:
                instance = store[previous]
            else:
                instance = -1
                moment_bytes += tables.sizes[tables.cell_storage[cell]]
            if cell in self.passing:
                self.passing[cell][0] = self._hold_result(cell, instance)
            elif need[cell] > 0 and store[cell] < 0 and cell not in passed:
                store[cell] = self._hold_result(cell, instance)
                made.add(cell)
                self.wanted[call] -= 1
        self._reach(moment_bytes)
        if not self.wanted[call]:
            for source in self.tables.inputs[call]:
                self._drop_need(source)
        if self.passing:
            self._pass_on(call)

    def _hold_result(self, cell: int, instance: int) -> int:
        """The instance (-1: a new one) holds the cell's content, and is held once more."""
        if instance < 0:
            instance = self._copy_of(cell)
            self.live += self.sizes[instance]
        self.holds[instance] += 1
        return instance

    def _pass_on(self, call: int) -> None:
        """The call has read its transient sources: the last reader lets them go."""
        for source in self.tables.inputs[call]:
            if source in self.passing:
                state = self.passing[source]
                state[1] -= 1
                if not state[1]:
                    self._release(state[0])
                    del self.passing[source]
