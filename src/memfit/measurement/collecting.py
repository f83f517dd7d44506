"""What the program's own calls of `gc.collect` and `torch.cuda.empty_cache` cost and give back, while a step is measured.

Python tells of every collection through `gc.callbacks`; the program's own are those that begin on a line of its with `collect` in it.
Source: https://docs.python.org/3/library/gc.html#gc.callbacks
"""

from __future__ import annotations

import gc
import linecache
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from memfit.engine.location import user_line


@dataclass(frozen=True)
class Collection:
    """One call. location: 'file:line'. freed_bytes: of tensors that died in it, or that the device got back."""

    location: str
    seconds: float
    freed_bytes: int


class CollectionWatch:
    """Fills `seen` between `start` and `stop`."""

    def __init__(self, live_bytes: Callable[[], int]) -> None:
        """live_bytes: the bytes of all tensors alive at the moment."""
        self.seen: list[Collection] = []
        self._live_bytes = live_bytes
        self._begun: tuple[str, float, int] | None = None

    def start(self) -> None:
        gc.callbacks.append(self._note)

    def stop(self) -> None:
        """Idempotent."""
        if self._note in gc.callbacks:
            gc.callbacks.remove(self._note)

    def _note(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            location = user_line()
            path, _, line = location.rpartition(":")
            is_own = bool(path) and "collect" in linecache.getline(path, int(line))
            self._begun = (location, time.perf_counter(), self._live_bytes()) if is_own else None
        elif self._begun is not None:
            location, start, before = self._begun
            self._begun = None
            self.seen.append(Collection(location, time.perf_counter() - start, before - self._live_bytes()))


class EmptyingWatch:
    """Fills `seen` between `start` and `stop`. A call made through another name than `torch.cuda.empty_cache` is not seen."""

    def __init__(self, process_bytes: Callable[[], int | None]) -> None:
        """process_bytes: what the process has taken from the device."""
        self.seen: list[Collection] = []
        self._process_bytes = process_bytes
        self._real: Callable[[], None] | None = None

    def start(self) -> None:
        if self._real is None:
            self._real = torch.cuda.empty_cache
            torch.cuda.empty_cache = self._empty

    def stop(self) -> None:
        """Idempotent."""
        if self._real is not None:
            torch.cuda.empty_cache, self._real = self._real, None

    def _empty(self) -> None:
        assert self._real is not None
        before, start = self._process_bytes() or 0, time.perf_counter()
        self._real()
        self.seen.append(Collection(user_line(), time.perf_counter() - start, before - (self._process_bytes() or 0)))
