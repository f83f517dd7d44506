"""What the program's own calls of `gc.collect` cost and give back, while a step is measured.

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

from memfit.engine.location import user_line


@dataclass(frozen=True)
class Collection:
    """One call of `gc.collect`. location: 'file:line'. freed_bytes: of tensors that died in it."""

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
