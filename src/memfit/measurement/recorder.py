"""The recorder: watches one step and writes its Trace.

A dispatch mode sees every operation's results (weak references on storages tell when they die); the tape tells calls, saved
tensors and handles. What memfit itself does in the step (restoring) is counted in the measured bytes and left out of the trace, so
the trace shows the plain step. Cost: about 0.1 ms an operation; for measuring steps, not for running ones.
Source of the method: `torch.distributed._tools.MemTracker`, with hidden workspaces added (see `backends`).
"""

from __future__ import annotations

import gc
import hashlib
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.core import trace as core
from memfit.core.inplace import SAVES_INPUT
from memfit.core.liveness import DeadName
from memfit.engine import normalising, packing
from memfit.engine.cell import Call, Cell, Handle, PackedCell, StorageRef
from memfit.engine.location import user_line
from memfit.engine.need import tensors_in
from memfit.engine.private import in_backward, num_holders, pop_dispatch_mode, top_dispatch_mode, transform_level
from memfit.measurement.backends import Backend
from memfit.measurement.collecting import CollectionWatch, EmptyingWatch
from memfit.measurement.estimate import bytes_needed, convolution_bytes_needed, copied_bytes, packing_bytes
from memfit.measurement.held import PEAK, START, Held, HolderWatch

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


class _Storage:
    """A storage while it is watched."""

    __slots__ = ("handles", "index", "kind", "last_use", "location", "module", "nbytes", "own", "persistent", "ref", "released")

    ref: Callable[[], torch.UntypedStorage | None]

    def __init__(self, index: int, nbytes: int, kind: str, own: bool) -> None:
        self.index = index
        self.nbytes = nbytes
        self.kind = kind
        self.module = ""
        self.location = ""
        self.persistent = False
        self.own = own  # made by memfit's own restoring: not part of the program's step
        self.handles: set[int] = set()  # handles that hold it now
        self.released = False
        self.last_use = -1  # number of events before the last operation that read it
        self.ref = _dead  # until it is known


def _dead() -> None:
    return None


class Recorder(TorchDispatchMode):
    """Records from `start` to `stop`. `is_restoring` says whether memfit itself is at work at the moment."""

    def __init__(self, backend: Backend, is_restoring: Any, tensors: Mapping[str, Iterable[torch.Tensor]]) -> None:
        """tensors: known tensors by kind ('parameter', 'buffer', 'optimizer state')."""
        super().__init__()
        self.backend = backend
        self.live_bytes = 0
        self.peak_bytes = 0
        self.largest_operation_bytes = 0
        self.peak_phase = "other"
        self.peak_bytes_by_kind: dict[str, int] = {}
        self._live_by_kind: dict[str, int] = {}
        self.phase = "other"
        self.make_room: Callable[[int], None] | None = None  # asked for bytes before an operation comes near limit_bytes
        self.limit_bytes = 0
        self.holders: HolderWatch | None = None  # asked who holds what, where there is time for it
        self._is_restoring = is_restoring
        self._known = tensors
        self._parameter_shapes: list[tuple[tuple[int, ...], str]] = []
        self._storages: list[_Storage] = []
        self._watched: dict[int, _Storage] = {}
        self._waiting: dict[int, _Storage] = {}  # saved, held by handles, not yet seen released by the program
        self._events: list[tuple[str, int]] = []
        self._prelude: list[tuple[str, int]] = []
        self._cells: dict[Cell, int] = {}
        self._cell_rows: list[dict[str, Any]] = []
        self._calls: list[Call] = []
        self._call_rows: list[dict[str, Any]] = []
        self._handles: dict[int, int] = {}
        self._handle_rows: list[tuple[int, int]] = []
        self._handle_storage: dict[int, _Storage] = {}
        self._current: dict[str, Any] | None = None
        self._overwritten: list[_Storage] = []  # let go of by calls in place; told at the next look
        self._estimates: dict[Any, int] = {}
        self._collections = CollectionWatch(lambda: self.live_bytes)
        self._emptyings = EmptyingWatch(backend.process_bytes)
        self._gradients_freed = ""  # the line that cleared gradients before backward
        self._dead: list[tuple[int, _Storage, DeadName, bool]] = []
        self._held: list[Held] = []
        self._shared: list[dict[str, Any]] = []  # names the program deletes while others hold their storage
        self._peak_operation = 0
        self._overhead_seconds = 0.0
        self._start_seconds = 0.0
        self._num_operations = 0
        self._is_on = False
        self._has_left = False

    @property
    def is_on(self) -> bool:
        """Whether it watches."""
        return self._is_on

    def leave(self) -> None:
        """Take this mode, the innermost one, off."""
        if self._has_left:
            pop_dispatch_mode()
        else:
            self._has_left = True
            self.__exit__(None, None, None)

    # ---- life ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """File what is alive, then watch. Garbage is collected first, so that it does not count as the program's."""
        gc.collect()
        for kind, tensors in self._known.items():
            for tensor in tensors:
                if (watched := self._file_known(tensor, kind)) is not None:
                    watched.persistent = kind != "gradient"
        self._parameter_shapes = [(tuple(p.shape), str(p.dtype)) for p in self._known.get("parameter", ())]
        self._known = {}  # or it would keep last step's gradients alive
        for tensor in _tensors_alive():  # parameters that no optimizer has: frozen ones
            self._file_known(tensor, "parameter" if isinstance(tensor, torch.nn.Parameter) else "input")
        take_off_stopped()
        if self.holders is not None and self.holders.peak_operation:
            self._look(START)
        self._is_on = True
        self._set_phase("forward")
        self._start_seconds = time.perf_counter()
        self._overhead_seconds = 0.0
        self._collections.start()
        if self.backend.name != "cpu":  # there nothing freed is kept
            self._emptyings.start()
        self.__enter__()

    def stop(self) -> None:
        """Stop watching; idempotent. Under a mode of the program's ours stays where it is and does nothing."""
        if self._is_on:
            self._collections.stop()
            self._emptyings.stop()
        self._is_on = False
        take_off_stopped()

    def trace_so_far(
        self, meta: dict[str, Any], new_state: Iterable[torch.Tensor], gradients: Iterable[torch.Tensor]
    ) -> core.Trace:
        """The trace from the start until now; watching goes on. `new_state`, `gradients`: optimizer state and gradients as they are."""
        entered = time.perf_counter()
        seconds = entered - self._start_seconds - self._overhead_seconds
        for kind, tensors in (("optimizer state", new_state), ("gradient", gradients)):
            for tensor in tensors:
                watched = self._watched.get(tensor.untyped_storage()._cdata) if _has_storage(tensor) else None
                if watched is not None and watched.kind in ("temporary", "input"):
                    self._reclassify(watched, kind)
                    watched.persistent = kind == "optimizer state"
        renumber: dict[int, int] = {}
        rows: list[core.Storage] = []
        self._note_places()
        for each in self._storages:
            if not each.own:
                renumber[each.index] = len(rows)
                rows.append(core.Storage(each.nbytes, each.kind, each.module, each.location, each.persistent))
        cells = [core.Cell(**{**row, "storage": renumber[row["storage"]]}) for row in self._cell_rows]
        events = [
            (operation, renumber[operand] if operation in (core.ALLOC, core.RELEASE) else operand)
            for operation, operand in self._prelude + self._events
        ]
        signature = hashlib.sha256()
        for shape, dtype in self._parameter_shapes:
            signature.update(f"{shape}{dtype};".encode())
        self._smooth_seconds()
        meta = {"signature": signature.hexdigest()[:16], "torch": torch.__version__, **meta}
        meta["measured_peak_bytes"] = self.peak_bytes
        meta["measured_peak_phase"] = self.peak_phase
        meta["num_operations"] = self._num_operations
        meta["gradients_freed"] = self._gradients_freed
        meta["collections"] = [asdict(each) for each in self._collections.seen]
        meta["emptyings"] = [asdict(each) for each in self._emptyings.seen]
        meta["dead_names"] = [
            {
                "event": len(self._prelude) + position,
                "storage": renumber[watched.index],
                "is_unsaved": is_unsaved,
                **asdict(name),
            }
            for position, watched, name, is_unsaved in self._dead
        ]
        meta["shared_names"] = [
            {**row, "event": len(self._prelude) + row["event"], "storage": renumber[row["storage"]]} for row in self._shared
        ]
        meta["held"] = [
            {
                **asdict(each),
                "storage": renumber[each.storage],
                "last_use": use if (use := self._storages[each.storage].last_use) < 0 else len(self._prelude) + use,
            }
            for each in self._held
        ]
        meta["num_threads"] = torch.get_num_threads()
        trace = core.Trace(
            device=self.backend.name,
            storages=tuple(rows),
            cells=tuple(cells),
            handles=tuple(core.Handle(*row) for row in self._handle_rows),
            calls=tuple(core.Call(**row) for row in self._call_rows),
            events=tuple(events),
            step_seconds=max(seconds, 0.0),
            meta=meta,
        )
        self._overhead_seconds += time.perf_counter() - entered
        return trace

    def _look(self, when: str) -> None:
        """Ask who holds what the program holds, parameters included."""
        assert self.holders is not None
        asked = {}
        for watched in self._watched.values():
            storage = watched.ref()
            if storage is None or watched.own or (watched.persistent and watched.kind != "parameter"):
                continue
            if watched.kind != "gradient" and num_holders(storage) > len(watched.handles):
                asked[watched.index] = storage, watched.kind == "parameter"
        self._held += self.holders.look(asked, self.live_bytes, when)

    def _note_places(self) -> None:
        """Where what is alive was made, for the next step's trace; what this one knows from the last."""
        if self.holders is None:
            return
        for each in self._watched.values():
            storage = each.ref()
            if storage is not None and each.location:
                self.holders.note_made(storage, each.module, each.location)
            elif storage is not None:
                each.module, each.location = self.holders.place_of(storage)
        self.holders.peak_operation = max(self._peak_operation, 1)

    def _smooth_seconds(self) -> None:
        """Give equal calls (same function, same bytes in and out) their median time: one measurement of each is noisy."""
        alike: dict[Any, list[dict[str, Any]]] = {}
        for row in self._call_rows:
            sizes = [
                tuple(self._storages[self._cell_rows[cell]["storage"]].nbytes for cell in row[side])
                for side in ("inputs", "outputs")
            ]
            alike.setdefault((row["function"], *sizes), []).append(row)
        for rows in alike.values():
            median = statistics.median(row["seconds"] for row in rows)
            for row in rows:
                row["seconds"] = median

    def set_phase(self, phase: str) -> None:
        if self._is_on:
            self._set_phase(phase)

    def _set_phase(self, phase: str) -> None:
        if phase != self.phase:
            self.phase = phase
            self._events.append((core.PHASE, core.PHASES.index(phase)))

    # ---- storages --------------------------------------------------------------------------------------------------

    def _file_known(self, tensor: torch.Tensor, kind: str) -> _Storage | None:
        """File a storage that was alive before the step began."""
        if not _has_storage(tensor):
            return None
        storage = tensor.untyped_storage()
        known = self._watched.get(storage._cdata)
        if known is not None:
            return known
        watched = self._file(storage, kind, own=False)
        self._prelude.append((core.ALLOC, watched.index))
        return watched

    def _file(self, storage: torch.UntypedStorage, kind: str, own: bool) -> _Storage:
        watched = _Storage(len(self._storages), storage.nbytes(), "activation" if own else kind, own)
        self._storages.append(watched)
        ref = StorageRef(storage, self._on_death)
        ref.key = storage._cdata
        watched.ref = ref
        self._watched[ref.key] = watched
        self._live_by_kind[watched.kind] = self._live_by_kind.get(watched.kind, 0) + watched.nbytes
        self._add(watched.nbytes)
        return watched

    def _add(self, nbytes: int, spike: int = 0) -> None:
        self.live_bytes += nbytes
        if self.live_bytes + spike > self.peak_bytes:
            self.peak_bytes = self.live_bytes + spike
            self.peak_phase = self.phase
            self._peak_operation = self._num_operations
            self.peak_bytes_by_kind = dict(self._live_by_kind, workspace=spike)
        if self._current is not None:
            self._current["highest"] = max(self._current["highest"], self.live_bytes + spike)

    def _on_death(self, ref: Any) -> None:
        key: int = ref.key
        watched = self._watched.get(key)
        if watched is None or watched.ref is not ref:
            return
        del self._watched[key]
        self._waiting.pop(watched.index, None)
        self.live_bytes -= watched.nbytes
        self._live_by_kind[watched.kind] -= watched.nbytes
        if not watched.own and not watched.released and self._is_on:
            watched.released = True
            self._events.append((core.RELEASE, watched.index))
            if watched.kind == "gradient" and self.phase in ("forward", "loss") and not self._gradients_freed:
                self._gradients_freed = user_line()

    def is_held_by_program(self, cell: Cell) -> bool:
        """Whether the program itself still holds the cell's content, as of the last call."""
        if cell.written or cell.ref() is None:  # a dead storage's key may be another's by now
            return False
        watched = self._watched.get(cell.ref.key)
        return watched is not None and not watched.released

    def live_bytes_by_kind(self) -> list[tuple[str, int]]:
        """Bytes alive now, largest kind first. What is restored counts as activation."""
        return sorted(self._live_by_kind.items(), key=lambda item: -item[1])

    def note_dead(self, storage: torch.UntypedStorage, name: DeadName, num_tensors: int) -> None:
        """The program reads this name no more, and with it would go `num_tensors` that hold the storage: all there are, or not."""
        watched = self._watched.get(storage._cdata)
        if not self._is_on or watched is None:
            return
        if num_tensors and num_holders(storage) <= len(watched.handles) + num_tensors:
            self._dead.append((len(self._events), watched, name, not watched.handles))
        elif (
            name.deleted_line and self.holders is not None and (chain := self.holders.who_else(storage, name, self.live_bytes))
        ):
            self._shared.append({"event": len(self._events), "storage": watched.index, "chain": chain, **asdict(name)})

    def _reclassify(self, watched: _Storage, kind: str) -> None:
        if watched.ref() is not None:
            self._live_by_kind[watched.kind] -= watched.nbytes
            self._live_by_kind[kind] = self._live_by_kind.get(kind, 0) + watched.nbytes
        watched.kind = kind

    def _poll(self) -> None:
        """Which saved storages has the program let go of since the last look? (Handles keep them alive, so nothing tells us.)"""
        self._events += [(core.RELEASE, watched.index) for watched in self._overwritten]
        self._overwritten.clear()
        for index, watched in list(self._waiting.items()):
            storage = watched.ref()
            if storage is not None and num_holders(storage) <= len(watched.handles):
                watched.released = True
                del self._waiting[index]
                self._events.append((core.RELEASE, index))

    # ---- operations ------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._is_on:
            return func(*args, **(kwargs or {}))
        entered = time.perf_counter()
        kwargs = kwargs or {}
        own = self._is_restoring()
        if not own and self.phase in ("forward", "loss") and in_backward():
            self._set_phase("backward")
        nbytes = 0
        key: list[Any] = [func]
        for tensor in tensors_in((args, kwargs)):
            key.append((tensor.shape, tensor.stride() if tensor.layout is torch.strided else (), tensor.dtype))
            if _has_storage(tensor):
                storage = tensor.untyped_storage()
                nbytes += storage.nbytes()
                if not own and (read := self._watched.get(storage._cdata) or self._file_known(tensor, "input")) is not None:
                    read.last_use = len(self._events)
            del tensor
        key.extend(each for each in args if isinstance(each, (int, float, bool)))
        key.extend(tuple(each) for each in args if isinstance(each, list) and all(isinstance(n, int) for n in each))
        if self.make_room is not None and self.live_bytes + self._bytes_at_most(tuple(key), nbytes) > self.limit_bytes:
            self.make_room(self._bytes_needed(func, args, kwargs, tuple(key)))
        result, seconds, highest = self.backend.run(tuple(key), nbytes, lambda: func(*args, **kwargs))
        self._num_operations += 1
        new: list[torch.UntypedStorage] = []
        for tensor in tensors_in(result):
            if _has_storage(tensor) and tensor.untyped_storage()._cdata not in self._watched:
                new.append(tensor.untyped_storage())
        new_bytes = sum(each.nbytes() for each in {id(each): each for each in new}.values())
        self.largest_operation_bytes = max(self.largest_operation_bytes, highest, new_bytes)
        if highest > new_bytes:
            self._add(0, highest)
            if not own:
                self._events.append((core.SPIKE, highest))
        for storage in new:
            if storage._cdata not in self._watched:
                watched = self._file(storage, "temporary", own)
                if not own:
                    self._events.append((core.ALLOC, watched.index))
                    if self._current is not None:
                        watched.module = self._current["module"]
                        watched.location = self._current["location"]
                    elif self.phase != "backward":
                        watched.location = user_line()
        if self._current is not None:
            self._current["seconds"] += seconds
        if self.holders is not None and self._num_operations == self.holders.peak_operation:
            self._look(PEAK)
        self._overhead_seconds += time.perf_counter() - entered - seconds
        return result

    def _bytes_at_most(self, key: Any, nbytes: int) -> int:
        """A quick guess on the high side, so that the answer is looked for only where it matters. (What reads nothing may make anything.)"""
        known = self.backend.known_workspace(key)
        return known if known is not None else 8 * nbytes or self.limit_bytes + 1

    def _bytes_needed(self, func: Any, args: Any, kwargs: Any, key: Any) -> int:
        """Bytes the operation will take at its worst moment: as seen before, else by an estimate."""
        known = self.backend.known_workspace(key)
        if known is not None:
            return known
        if "convolution" not in str(func):
            return bytes_needed(func, args, kwargs) + packing_bytes(func, args) + copied_bytes(func, args)
        if key not in self._estimates:
            make_room = self.make_room or (lambda num_bytes: None)
            self._estimates[key] = convolution_bytes_needed(func, args, kwargs, self.backend.probe, make_room)
        return self._estimates[key]

    # ---- the tape's observer ------------------------------------------------------------------------------------------

    def on_begin(self, call: Call) -> None:
        if not self._is_on:
            return
        entered = time.perf_counter()
        self._poll()
        is_loss = call.func.__name__ in _LOSSES if hasattr(call.func, "__name__") else False
        self._set_phase("loss" if is_loss or (not call.module and self._calls) else "forward")
        self._current = {
            "begin_event": len(self._events), "internal_seconds": 0.0, "internal_highest": 0, "is_product": False, "call": call, "seconds": 0.0, "module": call.module, "location": call.location,
            "before": self.live_bytes, "highest": self.live_bytes,
        }  # fmt: skip
        self._events.append((core.BEGIN, len(self._calls)))
        self._overhead_seconds += time.perf_counter() - entered

    def on_failed(self, call: Call) -> None:
        if self._current is not None:
            del self._events[self._current["begin_event"]]
            self._current = None

    def on_internal(self, call: Call) -> None:
        if self._current is not None:
            self._current["internal_seconds"] = self._current["seconds"]
            self._current["internal_highest"] = self._current["highest"]

    def on_part(self, part: Call, cells: list[Cell]) -> None:
        """A row of its own for what the running call saved inside: for noise the unpacking, else the call's beginning."""
        if not self._is_on or self._current is None:
            return
        index = len(self._calls)
        self._calls.append(part)
        self._events += [(core.BEGIN, index), (core.END, index)]
        inputs = tuple(dict.fromkeys(self._cell_row(cell, -1) for cell in part.inputs))
        outputs = tuple(self._cell_row(cell, index) for cell in cells)
        num_bytes = sum(cell.nbytes for cell in cells)
        function = part.place.rpartition(":")[2]
        seconds = self._current["internal_seconds"]
        extra_bytes = max(0, self._current["internal_highest"] - self._current["before"] - num_bytes)
        if part.makes == "in":
            self._current["is_product"] = True
            function += " noise"
            seconds = packing.MULTIPLICATIONS * (
                self._current["seconds"] - seconds
            )  # all after the noise is the multiplication
            extra_bytes = packing.workspace_bytes(part.args[1])
        elif part.makes == "inner":
            function += " statistics"
            seconds = self._current["seconds"]
            extra_bytes = max(0, self._current["highest"] - self._current["before"] - num_bytes)
        self._call_rows.append(
            {
                "place": part.place, "function": function, "module": part.module, "location": part.location, "seconds": seconds,
                "inputs": inputs, "outputs": outputs, "extra_bytes": extra_bytes,
            }
        )  # fmt: skip

    def on_end(self, call: Call, cells: list[Cell]) -> None:
        if not self._is_on or self._current is None:
            return
        entered = time.perf_counter()
        current, self._current = self._current, None
        index = len(self._calls)
        self._calls.append(call)
        self._events[current["begin_event"]] = (core.BEGIN, index)  # a part may have come between
        inputs = tuple(dict.fromkeys(self._cell_row(cell, -1) for cell in call.inputs))
        if call.is_overwriting:
            self._take_over(call, cells)
        own = [cell for cell in cells if cell.call is call or cell.call is None]
        for cell in own:
            self._cell_row(cell, index)
        own_bytes = sum(cell.nbytes for cell in own if cell.position != "mut0")
        extra_bytes = max(0, current["highest"] - current["before"] - own_bytes)
        seconds = current["seconds"]
        if current["is_product"]:  # replayed as argument times noise, without drawing
            seconds, extra_bytes = seconds - current["internal_seconds"], 0
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
        self._events.append((core.END, index))
        self._overhead_seconds += time.perf_counter() - entered

    def _take_over(self, call: Call, cells: list[Cell]) -> None:
        """A plan has made the call overwrite its input. The trace is that of the plain step: there the result is a storage of its own,
        and the program lets go of the input, which nobody reads, when the call is over."""
        cell = next((each for each in cells if each.position == "mut0"), None)
        old = self._watched.get(cell.ref.key) if cell is not None else None
        if cell is None or old is None or cell.call is None:
            return
        new = _Storage(len(self._storages), old.nbytes, old.kind, False)
        new.module, new.location, new.ref = call.module, call.location, old.ref
        self._storages.append(new)
        self._watched[cell.ref.key] = new
        self._waiting.pop(old.index, None)
        old.released = True
        self._overwritten.append(old)
        self._events.append((core.ALLOC, new.index))

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

    def _storage_of(self, cell: Cell) -> _Storage:
        watched = None if isinstance(cell, PackedCell) else self._watched.get(cell.ref.key)
        if watched is None or watched.own or cell.ref() is None:
            kind = "packed" if isinstance(cell, PackedCell) else "temporary"
            watched = _Storage(len(self._storages), cell.nbytes, kind, False)
            watched.released = True
            self._storages.append(watched)
        return watched

    def on_save(self, handle: Handle, call: Call | None) -> None:
        if not self._is_on or handle.cell is None:
            return
        if not self._handle_rows and self.holders is not None and not self.holders.peak_operation:
            self.holders.note_old(ref for each in self._watched.values() if (ref := each.ref()) is not None)
        watched = self._watched.get(handle.cell.ref.key)
        if watched is not None and watched.own:  # a graph built inside backward on what was restored (reentrant checkpoint)
            return
        entered = time.perf_counter()
        row = self._cell_row(handle.cell, -1)
        index = len(self._handle_rows)
        self._handles[id(handle)] = index
        saving_call = len(self._calls) - 1 if call is not None and self._calls and self._calls[-1] is call else -1
        watched = self._storages[self._cell_rows[row]["storage"]]
        if call is not None and call.is_overwriting and handle.cell.call is call and call.func.__name__ in SAVES_INPUT:
            assert handle.cell.previous is not None
            row = self._cell_row(handle.cell.previous, -1)  # what it saves out of place
        self._handle_rows.append((row, saving_call))
        self._handle_storage[index] = watched
        watched.handles.add(index)
        if watched.kind == "temporary":
            self._reclassify(watched, "activation")
        self._events.append((core.SAVE, index))
        self._overhead_seconds += time.perf_counter() - entered

    def on_packed(self, bits: torch.UntypedStorage) -> None:
        """Bits made while room is made within an operation: this mode is off then and has not seen them."""
        if self._is_on and bits._cdata not in self._watched:
            self._file(bits, "activation", own=True)

    def on_evicted(self, handle: Handle) -> None:
        """The handle no longer holds its storage."""
        index = self._handles.get(id(handle))
        if index is not None:
            self._handle_storage[index].handles.discard(index)

    def on_unpack(self, handle: Handle) -> None:
        index = self._handles.get(id(handle))
        if self._is_on and index is not None:
            self._set_phase("backward")
            self._poll()
            self._events.append((core.UNPACK, index))

    def on_restored(self, handle: Handle, num_calls: int) -> None:
        """The handle holds a tensor again, on storage of memfit's own; the trace knows nothing of it."""

    def on_drop(self, handle: Handle) -> None:
        index = self._handles.pop(id(handle), None)
        if index is None:
            return
        self._handle_storage.pop(index).handles.discard(index)
        if self._is_on:
            self._events.append((core.DROP, index))


def take_off_stopped() -> None:
    """Take stopped recorders off that are the innermost modes now. One stopped inside backward comes back when the pass is over: the
    engine restores the modes with which it began."""
    while isinstance(mode := top_dispatch_mode(), Recorder) and not mode.is_on:
        mode.leave()


def _has_storage(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        and tensor.layout is torch.strided
        and transform_level(tensor) == -1
    )


def _tensors_alive() -> list[torch.Tensor]:
    """Every plain tensor the garbage collector knows of."""
    return [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)]
