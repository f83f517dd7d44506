"""The ledger: the storages alive now, their bytes by kind, and the most there have been at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from memfit.engine.cell import StorageRef
from memfit.engine.filing import PLAIN_TYPES
from memfit.engine.private import transform_level


class Watched:
    """A storage from when it is filed until it dies, and what a trace will say of it.

    own: made by memfit's own restoring, so no part of the program's step. persistent: outlives the step. handles: those that hold it now.
    released: the program holds it no more. last_use: the number of events before the last operation that read it, -1 before any.
    """

    __slots__ = ("handles", "index", "kind", "last_use", "location", "module", "nbytes", "own", "persistent", "ref", "released")

    ref: Callable[[], torch.UntypedStorage | None]

    def __init__(self, index: int, nbytes: int, kind: str, own: bool) -> None:
        self.index = index
        self.nbytes = nbytes
        self.kind = kind
        self.module = ""
        self.location = ""
        self.persistent = False
        self.own = own
        self.handles: set[int] = set()
        self.released = False
        self.last_use = -1
        self.ref = _dead  # until it is known


def _dead() -> None:
    return None


class Ledger:
    """Filed storages by number in `storages`; those alive are iterated over.

    phase, num_operations: where the step is; whoever drives the ledger says so, and the peak is told with it.
    highest_bytes: the most since somebody set it to `live_bytes`.
    """

    def __init__(self, on_death: Callable[[Watched], None]) -> None:
        self.storages: list[Watched] = []
        self.live_bytes = self.highest_bytes = 0
        self.phase = self.peak_phase = "other"
        self.num_operations = self.peak_operation = 0
        self.peak_bytes = 0
        self.peak_bytes_by_kind: dict[str, int] = {}
        self._alive: dict[int, Watched] = {}
        self._bytes_by_kind: dict[str, int] = {}
        self._on_death = on_death

    def __iter__(self) -> Iterator[Watched]:
        return iter(self._alive.values())

    def __contains__(self, key: int) -> bool:
        return key in self._alive

    def get(self, key: int) -> Watched | None:
        """What is filed under a storage's `_cdata`, while it lives."""
        return self._alive.get(key)

    def find(self, tensor: torch.Tensor) -> Watched | None:
        """What is filed of the tensor's storage."""
        return self._alive.get(tensor.untyped_storage()._cdata) if has_storage(tensor) else None

    def file(self, storage: torch.UntypedStorage, kind: str, *, own: bool) -> Watched:
        """The storage is alive from now on until it dies."""
        watched = self.add(storage.nbytes(), "activation" if own else kind, own=own)
        ref = StorageRef(storage, self._note_death)
        key = ref.key = storage._cdata
        watched.ref = ref
        self._alive[key] = watched
        self._bytes_by_kind[watched.kind] = self._bytes_by_kind.get(watched.kind, 0) + watched.nbytes
        self.live_bytes += watched.nbytes
        self.note_bytes(0)
        return watched

    def add(self, nbytes: int, kind: str, *, own: bool = False) -> Watched:
        """A number for a storage that is not there (any more)."""
        watched = Watched(len(self.storages), nbytes, kind, own)
        self.storages.append(watched)
        return watched

    def take_over(self, key: int) -> Watched:
        """The storage filed under the key is another one from now on, with other content in the same bytes."""
        old = self._alive[key]
        new = self._alive[key] = self.add(old.nbytes, old.kind)
        new.ref = old.ref
        return new

    def note_bytes(self, num_bytes: int) -> None:
        """So many bytes are, or were for a moment, there as well."""
        reached = self.live_bytes + num_bytes
        if reached > self.peak_bytes:
            self.peak_bytes, self.peak_phase, self.peak_operation = reached, self.phase, self.num_operations
            self.peak_bytes_by_kind = dict(self._bytes_by_kind, workspace=num_bytes)
        self.highest_bytes = max(self.highest_bytes, reached)

    def reclassify(self, watched: Watched, kind: str) -> None:
        """It is of another kind than was thought."""
        if watched.ref() is not None:
            self._bytes_by_kind[watched.kind] -= watched.nbytes
            self._bytes_by_kind[kind] = self._bytes_by_kind.get(kind, 0) + watched.nbytes
        watched.kind = kind

    def live_bytes_by_kind(self) -> list[tuple[str, int]]:
        """Bytes alive now, largest kind first. What is restored counts as activation."""
        return sorted(self._bytes_by_kind.items(), key=lambda item: -item[1])

    def _note_death(self, ref: Any) -> None:
        key: int = ref.key
        watched = self._alive.get(key)
        if watched is None or watched.ref is not ref:
            return
        del self._alive[key]
        self.live_bytes -= watched.nbytes
        self._bytes_by_kind[watched.kind] -= watched.nbytes
        self._on_death(watched)


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether it is a plain tensor with bytes of its own."""
    return type(tensor) in PLAIN_TYPES and tensor.layout is torch.strided and transform_level(tensor) == -1
