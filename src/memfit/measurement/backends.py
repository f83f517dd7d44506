"""What differs between devices: how one operation's worst moment, the free bytes and the process's own bytes are read.

`cpu`: an operation's hidden workspace comes from the allocator's own events, once per operation and shapes.
`cuda`: from the caching allocator's peak counters, around every operation of a measured step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import accumulate
from typing import Any, ClassVar, Protocol

import torch

from memfit.engine.private import is_profiling, run_with_allocations

_SMALL_BYTES = 1 << 16  # operations on less are not worth a look for hidden workspace


class Backend(Protocol):
    """One device's memory and clock."""

    name: str

    def run(self, key: Any, nbytes: int, run: Callable[[], Any]) -> tuple[Any, float, int]:
        """Run one operation: its result, its seconds, and the bytes above the live ones at its worst moment."""
        ...

    def known_workspace(self, key: Any) -> int | None:
        """What `run` found for this key before, or None."""
        ...

    def probe(self, run: Callable[[], Any]) -> int | None:
        """The highest bytes `run` allocates at a time, or None where that cannot be seen now."""
        ...

    def free_bytes(self) -> int | None:
        """Bytes a process can still take, or None where that is no use as a budget."""
        ...

    def process_bytes(self) -> int | None:
        """Bytes this process has taken from the device (reserved, not only allocated), or None if unknown."""
        ...

    def allocated_bytes(self) -> int | None:
        """Bytes of what the process has taken that are in use now, or None if unknown."""
        ...

    def give_back(self) -> None:
        """Give the device what the process has taken and does not use."""
        ...


class CpuBackend:
    """Seconds are those of the calling thread, so that other programs on the machine do not count in what a plan is made of."""

    name = "cpu"
    _workspaces: ClassVar[dict[Any, int]] = {}  # by operation and shapes, for the life of the process

    def run(self, key: Any, nbytes: int, run: Callable[[], Any]) -> tuple[Any, float, int]:
        if nbytes < _SMALL_BYTES and "convolution" not in str(key[0]):  # whose workspace may be far larger than what it reads
            start = time.thread_time()
            return run(), time.thread_time() - start, 0
        known = self._workspaces.get(key)
        if known is not None or is_profiling():
            start = time.thread_time()
            result = run()
            return result, time.thread_time() - start, known or 0
        start = time.thread_time()
        result, deltas = run_with_allocations(run)
        seconds = time.thread_time() - start
        self._workspaces[key] = max(accumulate(deltas, initial=0))
        return result, seconds, self._workspaces[key]

    def known_workspace(self, key: Any) -> int | None:
        return self._workspaces.get(key)

    def probe(self, run: Callable[[], Any]) -> int | None:
        return None if is_profiling() else max(accumulate(run_with_allocations(run)[1], initial=0))

    def free_bytes(self) -> int | None:
        return None

    def process_bytes(self) -> int | None:
        return None

    def allocated_bytes(self) -> int | None:
        return None

    def give_back(self) -> None:
        pass


class CudaBackend:
    """Resets the peak counters of the current device while a step is measured (`torch.cuda.reset_peak_memory_stats`)."""

    name = "cuda"
    _workspaces: ClassVar[dict[Any, int]] = {}

    def run(self, key: Any, nbytes: int, run: Callable[[], Any]) -> tuple[Any, float, int]:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.cuda.synchronize()
        start = time.perf_counter()
        result = run()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        self._workspaces[key] = torch.cuda.max_memory_allocated() - before
        return result, seconds, self._workspaces[key]

    def known_workspace(self, key: Any) -> int | None:
        return self._workspaces.get(key)

    def probe(self, run: Callable[[], Any]) -> int | None:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        return torch.cuda.max_memory_allocated() - before

    def free_bytes(self) -> int | None:
        return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()

    def process_bytes(self) -> int | None:
        return torch.cuda.memory_reserved()

    def allocated_bytes(self) -> int | None:
        return torch.cuda.memory_allocated()

    def give_back(self) -> None:
        torch.cuda.empty_cache()


def backend_for(device: torch.device) -> Backend:
    """The backend of the device's type. Raises ValueError for a type memfit does not know."""
    if device.type == "cpu":
        return CpuBackend()
    if device.type == "cuda":
        return CudaBackend()
    raise ValueError(f"memfit measures on 'cpu' and 'cuda', not on {device.type!r}.")
