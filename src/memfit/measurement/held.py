"""Who in the program holds what at the peak of a measured step: attributes, elements, closures, hooks, tracebacks, optimizers.

What a *variable* holds for nothing can be read from the source (core.liveness). For everything else references are searched upwards from the
large storages the program holds (`holders`), twice in a step: at its beginning, and after the operation in which the step before had its
peak. Nothing is concluded here; the rows go into the trace, and `diagnosis.held` reads them. A row is made of words: no tensor is kept.
Costs two searches, each some 15 ms for 170,000 objects times the depth of the chains.
"""

from __future__ import annotations

import gc
import inspect
import sys
import types
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from memfit.core.liveness import DeadName
from memfit.engine.frames import read_locals
from memfit.engine.location import is_library
from memfit.measurement.holders import Chain, Heap, find_holders, take_heap

START, PEAK = "start", "peak"
ATTRIBUTE, ELEMENT, CLOSURE, HOOK, TRACEBACK, OPTIMIZER = "attribute", "element", "closure", "hook", "traceback", "optimizer"
_SMALLEST_SHARE = 0.005  # of the bytes alive: less is not searched for
_MAX_SEARCHED = 200  # storages a look, the largest first


@dataclass(frozen=True)
class Held:
    """One storage in one look. storage: its index in the recorder. when: START or PEAK.

    kind: of the holder. name: the same for all elements of a container; chain: the whole way, in words. is_old: it was there before
    the first forward pass that autograd saved something of.
    """

    storage: int
    when: str
    kind: str
    name: str
    chain: str
    is_old: bool


class HolderWatch:
    """Remembers from step to step where the peak was, what was there before the first, and where what is still alive was made."""

    def __init__(self) -> None:
        self.peak_operation = 0  # of the step before, counted from 1
        self._old: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._told: set[DeadName] = set()
        self._made: dict[int, tuple[weakref.ref[torch.UntypedStorage], str, str]] = {}

    def note_old(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """These were alive before autograd saved anything of the first step."""
        self._old = {storage._cdata: weakref.ref(storage) for storage in storages}

    def note_made(self, storage: torch.UntypedStorage, module: str, location: str) -> None:
        self._made[storage._cdata] = weakref.ref(storage), module, location

    def place_of(self, storage: torch.UntypedStorage) -> tuple[str, str]:
        """(module, 'file:line') in which an earlier step made it; empty where none did."""
        ref, module, location = self._made.get(storage._cdata, (None, "", ""))
        return (module, location) if ref is not None and ref() is storage else ("", "")

    def look(self, storages: Mapping[int, tuple[torch.UntypedStorage, bool]], live_bytes: int, when: str) -> list[Held]:
        """Rows for those of the storages, {index: (storage, is it a parameter)}, that something other than a variable holds.

        Of parameters only those count that an optimizer has and no module.
        """
        large = sorted(
            (index for index in storages if storages[index][0].nbytes() >= _SMALLEST_SHARE * live_bytes),
            key=lambda index: -storages[index][0].nbytes(),
        )[:_MAX_SEARCHED]
        if not large:
            return []
        heap = take_heap(sys._getframe(1))
        _keep_own_names(heap)
        modules = [each for each in gc.get_objects() if issubclass(type(each), torch.nn.Module)]
        in_modules = {id(parameter) for module in modules for parameter in vars(module).get("_parameters", {}).values()}
        del modules
        targets: list[tuple[int, torch.Tensor]] = []
        for index in large:
            storage, is_parameter = storages[index]
            tensors = heap.by_storage.get(storage._cdata, ())
            if not is_parameter or not any(id(tensor) in in_modules for tensor in tensors):
                targets += [(index, tensor) for tensor in tensors]
        chains = find_holders(heap, [tensor for _, tensor in targets])
        best: dict[int, Chain] = {}
        for (index, _), chain in zip(targets, chains, strict=True):
            if chain.root and (index not in best or len(chain.words) < len(best[index].words)):
                best[index] = chain
        rows = []
        for index, chain in best.items():
            storage, is_parameter = storages[index]
            kind = _kind_of(chain)
            if kind and is_parameter == (kind == OPTIMIZER):
                old = self._old.get(storage._cdata)
                rows.append(Held(index, when, kind, chain.name, chain.text, old is not None and old() is storage))
        return rows

    def who_else(self, storage: torch.UntypedStorage, name: DeadName, live_bytes: int) -> str:
        """Who holds the storage beside the name, in words; '' where that cannot be told, was told before, or does not matter.

        Called from the frame in which the name is, in the second measured step.
        """
        if not self.peak_operation or name in self._told or storage.nbytes() < _SMALLEST_SHARE * live_bytes:
            return ""
        self._told.add(name)
        heap = take_heap(sys._getframe(1))
        _keep_own_names(heap, name.name)
        tensors = heap.by_storage.get(storage._cdata, [])
        chains = find_holders(heap, tensors)
        shown = [chain.text for chain in chains if chain.root and chain.words != [name.name]]
        return min(shown, key=len, default="")


def _keep_own_names(heap: Heap, dying: str = "") -> None:
    """Only the program's variables count as roots: those of torch's frames stand for them. `dying`: one of the innermost does not."""
    heap.names.clear()
    own = [frame for frame in heap.frames if not is_library(frame.f_code.co_filename)]
    for frame in reversed(own):
        if frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            for name, value in read_locals(frame).items():
                if name != dying or frame is not own[0]:
                    heap.names[id(value)] = (name, f"{frame.f_code.co_name}()")


def _kind_of(chain: Chain) -> str:
    """What kind of holder it is; '' for a plain variable, which liveness judges better."""
    if len(chain.words) < 2:
        return ""
    objects = chain.objects
    if any(isinstance(each, (BaseException, types.TracebackType)) for each in objects):
        return TRACEBACK
    if any(isinstance(each, torch.optim.Optimizer) for each in objects):
        return OPTIMIZER
    if any("_hooks" in word for word in chain.words):
        return HOOK
    if any(isinstance(each, types.CellType) for each in objects):
        return CLOSURE
    return ELEMENT if chain.words[-1].startswith("[") else ATTRIBUTE
