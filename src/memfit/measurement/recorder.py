"""The recorder: watches one step and writes its Trace.

A dispatch mode sees every operation's results (the ledger's weak references on storages tell when they die); the tape tells calls, saved
tensors and handles (rows.py). What memfit itself does in the step (restoring) is counted in the measured bytes and left out of the trace,
so the trace shows the plain step. Cost: about 0.1 ms an operation; for measuring steps, not for running ones.
Source of the method: `torch.distributed._tools.MemTracker`, with hidden workspaces added (see `backends`).
"""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.core import trace as core
from memfit.core.inplace import LetGo
from memfit.engine.filing import PLAIN_TYPES
from memfit.engine.need import tensors_in
from memfit.engine.private import in_backward, num_holders, pop_dispatch_mode, top_dispatch_mode
from memfit.measurement.backends import Backend
from memfit.measurement.collecting import CollectionWatch, EmptyingWatch
from memfit.measurement.estimate import bytes_needed, convolution_bytes_needed, copied_bytes, packing_bytes
from memfit.measurement.held import PEAK, START, Held, HolderWatch
from memfit.measurement.ledger import Watched, has_storage
from memfit.measurement.rows import Rows


class Recorder(TorchDispatchMode):
    """Records from `start` to `stop`. `is_restoring` says whether memfit itself is at work at the moment.

    rows: what the tape's observer has to be. ledger: the bytes. make_room: asked for bytes before an operation comes near limit_bytes.
    """

    def __init__(
        self,
        backend: Backend,
        is_restoring: Any,
        tensors: Mapping[str, Iterable[torch.Tensor]],
        holders: HolderWatch | None = None,
        let_go: Mapping[str, LetGo] | None = None,
    ) -> None:
        """tensors: known tensors by kind ('parameter', 'buffer', 'optimizer state'). holders: asked who holds what, where there is time for
        it. let_go: of an earlier step of the same program, see core.inplace."""
        super().__init__()
        self.backend = backend
        self.rows = Rows(holders, let_go or {})
        self.ledger = self.rows.ledger
        self.largest_operation_bytes = 0
        self.make_room: Callable[[int], None] | None = None
        self.limit_bytes = 0
        self._holders = holders
        self._is_restoring = is_restoring
        self._known = tensors
        self._parameter_shapes: list[tuple[tuple[int, ...], str]] = []
        self._estimates: dict[Any, int] = {}
        self._collections = CollectionWatch(lambda: self.ledger.live_bytes)
        self._emptyings = EmptyingWatch(backend.process_bytes)
        self._held: list[Held] = []
        self._start_seconds = 0.0
        self._has_left = False

    @property
    def is_on(self) -> bool:
        """Whether it watches."""
        return self.rows.is_on

    def set_phase(self, phase: str) -> None:
        """What comes next is of this phase, if it watches."""
        if self.is_on:
            self.rows.set_phase(phase)

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
        if self._holders is not None and self._holders.peak_operation:
            self._look(START)
        self.rows.is_on = True
        self.set_phase("forward")
        self._start_seconds = time.perf_counter()
        self.rows.overhead_seconds = 0.0
        self._collections.start()
        if self.backend.name != "cpu":  # there nothing freed is kept
            self._emptyings.start()
        self.__enter__()

    def stop(self) -> None:
        """Stop watching; idempotent. Under a mode of the program's ours stays where it is and does nothing."""
        if self.is_on:
            self._collections.stop()
            self._emptyings.stop()
        self.rows.is_on = False
        take_off_stopped()

    def leave(self) -> None:
        """Take this mode, the innermost one, off."""
        if self._has_left:
            pop_dispatch_mode()
        else:
            self._has_left = True
            self.__exit__(None, None, None)

    def trace_so_far(
        self, meta: dict[str, Any], new_state: Iterable[torch.Tensor], gradients: Iterable[torch.Tensor]
    ) -> core.Trace:
        """The trace from the start until now; watching goes on. `new_state`, `gradients`: optimizer state and gradients as they are."""
        entered = time.perf_counter()
        seconds = entered - self._start_seconds - self.rows.overhead_seconds
        for kind, tensors in (("optimizer state", new_state), ("gradient", gradients)):
            for tensor in tensors:
                watched = self.ledger.find(tensor)
                if watched is not None and watched.kind in ("temporary", "input"):
                    self.ledger.reclassify(watched, kind)
                    watched.persistent = kind == "optimizer state"
        self._note_places()
        facts = {
            "signature": self._signature(),
            "torch": torch.__version__,
            **meta,
            "measured_peak_bytes": self.ledger.peak_bytes,
            "measured_peak_phase": self.ledger.peak_phase,
            "num_operations": self.ledger.num_operations,
            "collections": [asdict(each) for each in self._collections.seen],
            "emptyings": [asdict(each) for each in self._emptyings.seen],
            "num_threads": torch.get_num_threads(),
        }
        trace = self.rows.trace(self.backend.name, max(seconds, 0.0), self._held, facts)
        self.rows.overhead_seconds += time.perf_counter() - entered
        return trace

    def _signature(self) -> str:
        """Of the parameters' shapes and types, where the caller knows no better one."""
        signature = hashlib.sha256()
        for shape, dtype in self._parameter_shapes:
            signature.update(f"{shape}{dtype};".encode())
        return signature.hexdigest()[:16]

    def _look(self, when: str) -> None:
        """Ask who holds what the program holds, parameters included."""
        assert self._holders is not None
        asked = {}
        for watched in self.ledger:
            storage = watched.ref()
            if storage is None or watched.own or (watched.persistent and watched.kind != "parameter"):
                continue
            if watched.kind != "gradient" and num_holders(storage) > len(watched.handles):
                asked[watched.index] = storage, watched.kind == "parameter"
        self._held += self._holders.look(asked, self.ledger.live_bytes, when)

    def _note_places(self) -> None:
        """Where what is alive was made, for the next step's trace; what this one knows from the last."""
        if self._holders is None:
            return
        for each in self.ledger:
            storage = each.ref()
            if storage is not None and each.location:
                self._holders.note_made(storage, each.module, each.location)
            elif storage is not None:
                each.module, each.location = self._holders.place_of(storage)
        self._holders.peak_operation = max(self.ledger.peak_operation, 1)

    def _file_known(self, tensor: torch.Tensor, kind: str) -> Watched | None:
        """File a storage that was alive before the step began."""
        if not has_storage(tensor):
            return None
        if (known := self.ledger.find(tensor)) is not None:
            return known
        watched = self.ledger.file(tensor.untyped_storage(), kind, own=False)
        self.rows.was_there(watched)
        return watched

    # ---- operations ------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rows, ledger = self.rows, self.ledger
        if not rows.is_on:
            return func(*args, **(kwargs or {}))
        entered = time.perf_counter()
        kwargs = kwargs or {}
        own = self._is_restoring()
        if not own and ledger.phase in ("forward", "loss") and in_backward():
            rows.set_phase("backward")
        nbytes = 0
        key: list[Any] = [func]
        for tensor in tensors_in((args, kwargs)):
            key.append((tensor.shape, tensor.stride() if tensor.layout is torch.strided else (), tensor.dtype))
            if has_storage(tensor):
                nbytes += tensor.untyped_storage().nbytes()
                if not own and (read := self._file_known(tensor, "input")) is not None:
                    read.last_use = len(rows.events)
            del tensor
        key.extend(each for each in args if isinstance(each, (int, float, bool)))
        key.extend(tuple(each) for each in args if isinstance(each, list) and all(isinstance(n, int) for n in each))
        if self.make_room is not None and ledger.live_bytes + self._bytes_at_most(tuple(key), nbytes) > self.limit_bytes:
            self.make_room(self._bytes_needed(func, args, kwargs, tuple(key)))
        result, seconds, highest = self.backend.run(tuple(key), nbytes, lambda: func(*args, **kwargs))
        ledger.num_operations += 1
        new = {
            storage._cdata: storage
            for tensor in tensors_in(result)
            if has_storage(tensor) and (storage := tensor.untyped_storage())._cdata not in ledger
        }
        new_bytes = sum(each.nbytes() for each in new.values())
        self.largest_operation_bytes = max(self.largest_operation_bytes, highest, new_bytes)
        if highest > new_bytes:
            ledger.note_bytes(highest)
            if not own:
                rows.events.append((core.SPIKE, highest))
        for storage in new.values():
            watched = ledger.file(storage, "temporary", own=own)
            if not own:
                rows.was_made(watched)
        if rows.running is not None:
            rows.running.seconds += seconds
        if self._holders is not None and ledger.num_operations == self._holders.peak_operation:
            self._look(PEAK)
        rows.overhead_seconds += time.perf_counter() - entered - seconds
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


def take_off_stopped() -> None:
    """Take stopped recorders off that are the innermost modes now. One stopped inside backward comes back when the pass is over: the
    engine restores the modes with which it began."""
    while isinstance(mode := top_dispatch_mode(), Recorder) and not mode.is_on:
        mode.leave()


def _tensors_alive() -> list[torch.Tensor]:
    """Every plain tensor the garbage collector knows of."""
    return [each for each in gc.get_objects() if type(each) in PLAIN_TYPES]
