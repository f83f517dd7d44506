"""Rows: what the tape tells of a measured step, written down as a trace's calls, cells, handles and events."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from memfit.core import trace as core
from memfit.core.inplace import SAVES_INPUT, LetGo
from memfit.core.liveness import DeadName
from memfit.engine import normalising, packing
from memfit.engine.cell import Call, Cell, Handle, PackedCell
from memfit.engine.location import user_line
from memfit.engine.private import num_holders
from memfit.measurement.held import Held, HolderWatch
from memfit.measurement.ledger import Ledger, Watched

_LOSSES = frozenset(
    [
        "cross_entropy",
        "nll_loss",
        "mse_loss",
        "l1_loss",
        "smooth_l1_loss",
        "huber_loss",
        "binary_cross_entropy",
        "ctc_loss",
        "kl_div",
        "binary_cross_entropy_with_logits",
        "cosine_embedding_loss",
        "margin_ranking_loss",
        "triplet_margin_loss",
    ]
)

_OVERHEAD_SECONDS = (
    50e-6  # of recording a call (10 to 45 us) and of its replay (18 us), beside the work itself: benchmarks/overhead.py
)


@dataclass
class _Running:
    """The recorded call that runs. begin_event: its own. before_bytes: alive when it began.

    seconds: of its operations so far. internal_seconds, internal_highest: of those, and the most bytes, until autograd last saved something inside.
    """

    call: Call
    begin_event: int
    before_bytes: int
    seconds: float = 0.0
    internal_seconds: float = 0.0
    internal_highest: int = 0
    is_product: bool = False


class Rows:
    """An engine Observer that writes rows while `is_on`.

    overhead_seconds: what that took, no part of the program's time. running: the recorded call that runs.
    """

    def __init__(self, holders: HolderWatch | None, let_go: Mapping[str, LetGo]) -> None:
        """Both are the recorder's."""
        self.is_on = False
        self.overhead_seconds = 0.0
        self.running: _Running | None = None
        self._holders = holders
        self._let_go = let_go
        self.ledger = Ledger(self._note_death)
        self.events: list[tuple[str, int]] = []
        self._prelude: list[tuple[str, int]] = []  # what was there before the step began
        self._cells: dict[Cell, int] = {}
        self._cell_rows: list[dict[str, Any]] = []
        self._calls: list[Call] = []
        self._call_rows: list[dict[str, Any]] = []
        self._handles: dict[int, int] = {}
        self._handle_rows: list[tuple[int, int]] = []
        self._handle_storage: dict[int, Watched] = {}
        self._waiting: dict[int, Watched] = {}  # saved, held by handles, not yet seen released by the program
        # Inputs and results of calls in place, with the call before which the program lets go of them ('' the next one).
        self._overwritten: list[tuple[Watched, str]] = []
        self._gradients_freed = ""  # the line that cleared gradients before backward
        self._dead: list[tuple[int, Watched, DeadName, bool]] = []
        self._shared: list[dict[str, Any]] = []  # names the program deletes while others hold their storage

    def set_phase(self, phase: str) -> None:
        """What comes next is of this phase."""
        if phase != self.ledger.phase:
            self.ledger.phase = phase
            self.events.append((core.PHASE, core.PHASES.index(phase)))

    # ---- storages --------------------------------------------------------------------------------------------------

    def was_there(self, watched: Watched) -> None:
        """It was alive before the step began."""
        self._prelude.append((core.ALLOC, watched.index))

    def was_made(self, watched: Watched) -> None:
        """The program has just made it."""
        self.events.append((core.ALLOC, watched.index))
        if self.running is not None:
            watched.module, watched.location = self.running.call.module, self.running.call.location
        elif self.ledger.phase != "backward":
            watched.location = user_line()

    def _note_death(self, watched: Watched) -> None:
        if watched.own or watched.released or not self.is_on:
            self._waiting.pop(watched.index, None)
            return
        self._release(watched)
        if watched.kind == "gradient" and self.ledger.phase in ("forward", "loss") and not self._gradients_freed:
            self._gradients_freed = user_line()

    def is_held_by_program(self, cell: Cell) -> bool:
        """Whether the program itself still holds the cell's content, as of the last call."""
        if cell.written or cell.ref() is None:  # a dead storage's key may be another's by now
            return False
        watched = self.ledger.get(cell.ref.key)
        return watched is not None and not watched.released

    def note_dead(self, storage: torch.UntypedStorage, name: DeadName, num_tensors: int) -> None:
        """The program reads this name no more, and with it would go `num_tensors` that hold the storage: all there are, or not."""
        watched = self.ledger.get(storage._cdata)
        if not self.is_on or watched is None:
            return
        if num_tensors and num_holders(storage) <= len(watched.handles) + num_tensors:
            self._dead.append((len(self.events), watched, name, not watched.handles))
        elif (
            name.deleted_line
            and self._holders is not None
            and (chain := self._holders.who_else(storage, name, self.ledger.live_bytes))
        ):
            self._shared.append({"event": len(self.events), "storage": watched.index, "chain": chain, **asdict(name)})

    def _poll(self, place: str = "") -> None:
        """Which saved storages has the program let go of since the last look? (Handles keep them alive, so nothing tells us.)

        place: of the call that is about to begin.
        """
        if self._overwritten:
            gone = [each for each in self._overwritten if not place or each[1] in (place, "")]
            self._overwritten = [each for each in self._overwritten if each not in gone]
            for watched, _ in gone:
                self._release(watched)
        for watched in list(self._waiting.values()):
            storage = watched.ref()
            if storage is not None and num_holders(storage) <= len(watched.handles):
                self._release(watched)

    def _release(self, watched: Watched) -> None:
        """The program holds it no more."""
        self._waiting.pop(watched.index, None)
        if not watched.released:
            watched.released = True
            self.events.append((core.RELEASE, watched.index))

    # ---- calls ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _timed(self) -> Iterator[None]:
        entered = time.perf_counter()
        yield
        self.overhead_seconds += time.perf_counter() - entered

    def on_begin(self, call: Call) -> None:
        if not self.is_on:
            return
        with self._timed():
            self._poll(call.place)
            is_loss = call.func.__name__ in _LOSSES if hasattr(call.func, "__name__") else False
            self.set_phase("loss" if is_loss or (not call.module and self._calls) else "forward")
            self.running = _Running(call, len(self.events), self.ledger.live_bytes)
            self.ledger.highest_bytes = self.ledger.live_bytes
            self.events.append((core.BEGIN, len(self._calls)))

    def on_failed(self, call: Call) -> None:
        if self.running is not None:
            del self.events[self.running.begin_event]
            self.running = None

    def on_internal(self, call: Call) -> None:
        if self.running is not None:
            self.running.internal_seconds = self.running.seconds
            self.running.internal_highest = self.ledger.highest_bytes

    def on_part(self, part: Call, cells: list[Cell]) -> None:
        """A row of its own for what the running call saved inside: for noise the unpacking, else the call's beginning."""
        running = self.running
        if not self.is_on or running is None:
            return
        index = len(self._calls)
        self._calls.append(part)
        self.events += [(core.BEGIN, index), (core.END, index)]
        inputs = tuple(dict.fromkeys(self._cell_row(cell, -1) for cell in part.inputs))
        outputs = tuple(self._cell_row(cell, index) for cell in cells)
        num_bytes = sum(cell.nbytes for cell in cells)
        function = part.place.rpartition(":")[2]
        seconds = running.internal_seconds
        extra_bytes = max(0, running.internal_highest - running.before_bytes - num_bytes)
        if part.makes == "in":
            running.is_product = True
            function += " noise"
            seconds = packing.MULTIPLICATIONS * (running.seconds - seconds)  # all after the noise is the multiplication
            extra_bytes = packing.workspace_bytes(part.args[1])
        elif part.makes == "inner":
            function += " statistics"
            seconds = running.seconds
            extra_bytes = max(0, self.ledger.highest_bytes - running.before_bytes - num_bytes)
        self._call_rows.append(
            {
                "place": part.place, "function": function, "module": part.module, "location": part.location, "seconds": seconds,
                "inputs": inputs, "outputs": outputs, "extra_bytes": extra_bytes,
            }
        )  # fmt: skip

    def on_end(self, call: Call, cells: list[Cell]) -> None:
        if not self.is_on or self.running is None:
            return
        with self._timed():
            running, self.running = self.running, None
            index = len(self._calls)
            self._calls.append(call)
            self.events[running.begin_event] = (core.BEGIN, index)  # a part may have come between
            inputs = tuple(dict.fromkeys(self._cell_row(cell, -1) for cell in call.inputs))
            if call.is_overwriting:
                self._take_over(call, cells)
            own = [cell for cell in cells if cell.call is call or cell.call is None]
            for cell in own:
                self._cell_row(cell, index)
            own_bytes = sum(cell.nbytes for cell in own if cell.position != "mut0")
            extra_bytes = max(0, self.ledger.highest_bytes - running.before_bytes - own_bytes)
            seconds = running.seconds
            if running.is_product:  # replayed as argument times noise, without drawing
                seconds, extra_bytes = seconds - running.internal_seconds, 0
            elif call.func is normalising.normalise:
                seconds *= normalising.SHARE_OF_CALL
                extra_bytes = normalising.workspace_bytes(call.values[-1].cell.nbytes)
            self._call_rows.append(
                {
                    "place": call.place,
                    "function": call.place.rpartition(":")[2],
                    "module": call.module,
                    "location": call.location,
                    "seconds": seconds,
                    "inputs": inputs,
                    "outputs": tuple(self._cells[cell] for cell in cells if cell.call is call),
                    "extra_bytes": extra_bytes,
                    "in_place": call.in_place,
                }
            )
            self.events.append((core.END, index))

    def _take_over(self, call: Call, cells: list[Cell]) -> None:
        """A plan has made the call overwrite its input. The trace is that of the plain step: there the result is a storage of its own,
        and the program lets go of both when an earlier step did; where none says, of the input, which nobody reads, when the call is over."""
        cell = next((each for each in cells if each.position == "mut0"), None)
        old = self.ledger.get(cell.ref.key) if cell is not None else None
        if cell is None or old is None or cell.call is None:
            return
        new = self.ledger.take_over(cell.ref.key)
        new.module, new.location = call.module, call.location
        self.events.append((core.ALLOC, new.index))
        known = self._let_go.get(call.place)
        self._waiting.pop(old.index, None)
        self._overwritten.append((old, known.input_before if known is not None else ""))
        if known is not None:
            self._overwritten.append((new, known.result_before))

    def _cell_row(self, cell: Cell, call: int) -> int:
        index = self._cells.get(cell)
        if index is None:
            index = self._cells[cell] = len(self._cell_rows)
            is_recipe = cell.call is not None and call >= 0
            is_result = is_recipe and cell.position == "mut0" and cell.call is not None and cell.call.is_overwriting
            watched = self._storage_of(cell)
            if not watched.persistent and not watched.released:
                self._waiting[watched.index] = watched
            self._cell_rows.append(
                {
                    "storage": watched.index,
                    "call": call if is_recipe else -1,
                    "position": ("out0" if is_result else cell.position) if is_recipe else "",
                    "previous": self._cells.get(cell.previous, -1) if cell.previous is not None and not is_result else -1,
                    "evictable": is_recipe,
                }
            )
        return index

    def _storage_of(self, cell: Cell) -> Watched:
        watched = None if isinstance(cell, PackedCell) else self.ledger.get(cell.ref.key)
        if watched is None or watched.own or cell.ref() is None:
            watched = self.ledger.add(cell.nbytes, "packed" if isinstance(cell, PackedCell) else "temporary")
            watched.released = True
        return watched

    # ---- saved tensors ------------------------------------------------------------------------------------------------

    def on_save(self, handle: Handle, call: Call | None) -> None:
        if not self.is_on or handle.cell is None:
            return
        if not self._handle_rows and self._holders is not None and not self._holders.peak_operation:
            self._holders.note_old(ref for each in self.ledger if (ref := each.ref()) is not None)
        watched = self.ledger.get(handle.cell.ref.key)
        if watched is not None and watched.own:  # a graph built inside backward on what was restored (reentrant checkpoint)
            return
        with self._timed():
            row = self._cell_row(handle.cell, -1)
            index = len(self._handle_rows)
            self._handles[id(handle)] = index
            saving_call = len(self._calls) - 1 if call is not None and self._calls and self._calls[-1] is call else -1
            watched = self.ledger.storages[self._cell_rows[row]["storage"]]
            if call is not None and call.is_overwriting and handle.cell.call is call and call.func.__name__ in SAVES_INPUT:
                assert handle.cell.previous is not None
                row = self._cell_row(handle.cell.previous, -1)  # what it saves out of place
            self._handle_rows.append((row, saving_call))
            self._handle_storage[index] = watched
            watched.handles.add(index)
            if watched.kind == "temporary":
                self.ledger.reclassify(watched, "activation")
            self.events.append((core.SAVE, index))

    def on_packed(self, bits: torch.UntypedStorage, workspace_bytes: int) -> None:
        """Bits made while room is made within an operation: no dispatch mode of ours sees them, nor what packing took."""
        if self.is_on and bits._cdata not in self.ledger:
            self.ledger.file(bits, "activation", own=True)
            self.ledger.note_bytes(workspace_bytes)

    def on_evicted(self, handle: Handle) -> None:
        """The handle no longer holds its storage."""
        index = self._handles.get(id(handle))
        if index is not None:
            self._handle_storage[index].handles.discard(index)

    def on_unpack(self, handle: Handle) -> None:
        index = self._handles.get(id(handle))
        if self.is_on and index is not None:
            self.set_phase("backward")
            self._poll()
            self.events.append((core.UNPACK, index))

    def on_restored(self, handle: Handle, num_calls: int) -> None:
        """The handle holds a tensor again, on storage of memfit's own; the trace knows nothing of it."""

    def on_drop(self, handle: Handle) -> None:
        index = self._handles.pop(id(handle), None)
        if index is None:
            return
        self._handle_storage.pop(index).handles.discard(index)
        if self.is_on:
            self.events.append((core.DROP, index))

    # ---- the trace ----------------------------------------------------------------------------------------------------

    def trace(self, device: str, seconds: float, held: list[Held], meta: dict[str, Any]) -> core.Trace:
        """The trace of all so far; of memfit's own storages nothing is in it. seconds: that the program took."""
        renumber: dict[int, int] = {}
        storages: list[core.Storage] = []
        for each in self.ledger.storages:
            if not each.own:
                renumber[each.index] = len(storages)
                storages.append(core.Storage(each.nbytes, each.kind, each.module, each.location, each.persistent))
        self._smooth_seconds()
        return core.Trace(
            device=device,
            storages=tuple(storages),
            cells=tuple(core.Cell(**{**row, "storage": renumber[row["storage"]]}) for row in self._cell_rows),
            handles=tuple(core.Handle(*row) for row in self._handle_rows),
            calls=tuple(core.Call(**{**row, "seconds": row["seconds"] + _OVERHEAD_SECONDS}) for row in self._call_rows),
            events=tuple(
                (operation, renumber[operand] if operation in (core.ALLOC, core.RELEASE) else operand)
                for operation, operand in self._prelude + self.events
            ),
            step_seconds=seconds,
            meta={**meta, **self._facts(held, renumber.__getitem__)},
        )

    def _facts(self, held: list[Held], renumber: Callable[[int], int]) -> dict[str, Any]:
        """What the trace's meta says of names, holders and gradients; events count from the beginning of the trace's."""
        first = len(self._prelude)
        dead = [
            {"event": first + event, "storage": renumber(watched.index), "is_unsaved": is_unsaved, **asdict(name)}
            for event, watched, name, is_unsaved in self._dead
        ]
        shared = [{**row, "event": first + row["event"], "storage": renumber(row["storage"])} for row in self._shared]
        last_uses = [self.ledger.storages[each.storage].last_use for each in held]
        return {
            "gradients_freed": self._gradients_freed,
            "dead_names": dead,
            "shared_names": shared,
            "held": [
                {**asdict(each), "storage": renumber(each.storage), "last_use": use if use < 0 else first + use}
                for each, use in zip(held, last_uses, strict=True)
            ],
        }

    def _smooth_seconds(self) -> None:
        """Give equal calls (same function, same bytes in and out) their median time: one measurement of each is noisy."""
        alike: dict[Any, list[dict[str, Any]]] = {}
        for row in self._call_rows:
            sizes = [
                tuple(self.ledger.storages[self._cell_rows[cell]["storage"]].nbytes for cell in row[side])
                for side in ("inputs", "outputs")
            ]
            alike.setdefault((row["function"], *sizes), []).append(row)
        for rows in alike.values():
            median = statistics.median(row["seconds"] for row in rows)
            for row in rows:
                row["seconds"] = median
