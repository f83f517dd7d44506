"""A finding (MF611): a forward pass without gradients that fills autocast's cache of cast weights.

`torch.autocast` keeps the half copy of every float32 weight it has cast until its region ends, so that a weight used twice is cast once. Where no
backward follows, the copies are held for nothing: half the bytes of all weights used, on top of the evaluation. Measured, not guessed: the first such
call of a module runs under a dispatch mode that sees the casts. Source: pytorch/pytorch 48049.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.core.finding import Finding
from memfit.core.sizes import format_size
from memfit.engine.location import is_library

CODE = "MF611"


class _Casts(TorchDispatchMode):
    """Adds up what is cast of leaves that require gradients: what autocast caches."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            source = args[0]
            if source.dtype is torch.float32 and source.requires_grad and source.is_leaf and result.itemsize == 2:
                self.num_bytes += result.nbytes
        return result


class CacheWatch:
    """Runs module calls, and looks at each module's first one that could fill the cache for nothing."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, int], tuple[list[str], int]] = {}  # file and line -> modules called there, bytes cast
        self._seen: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._is_counting = False

    def call(self, original: Callable[..., Any], module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """What the module's call gives."""
        is_of_interest = not torch.is_grad_enabled() and torch.is_autocast_cache_enabled() and not self._is_counting
        if not is_of_interest or module in self._seen or not _is_autocast_on(module):
            return original(module, *args, **kwargs)
        self._seen.add(module)
        self._is_counting = True
        try:
            with _Casts() as casts:
                return original(module, *args, **kwargs)
        finally:
            self._is_counting = False
            if casts.num_bytes:
                place = _user_place()
                names, num_bytes = self._found.get(place, ([], 0))
                self._found[place] = ([*names, type(module).__name__], num_bytes + casts.num_bytes)

    @property
    def findings(self) -> list[Finding]:
        """One for each line that called modules so."""
        return [_finding(*place, names, num_bytes) for place, (names, num_bytes) in self._found.items()]


def _is_autocast_on(module: torch.nn.Module) -> bool:
    first = next(module.parameters(), None)
    return first is not None and torch.is_autocast_enabled(first.device.type)


def _user_place() -> tuple[str, int]:
    """File and line of the program's own call that runs now."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return (frame.f_code.co_filename, frame.f_lineno) if frame is not None else ("", 0)


def _finding(path: str, line: int, names: list[str], num_bytes: int) -> Finding:
    kinds = ", ".join(dict.fromkeys(names))
    calls = (
        f"A forward pass of {kinds} without gradients leaves"
        if len(names) == 1
        else f"{len(names)} forward passes ({kinds}) without gradients leave"
    )
    return Finding(
        path=path,
        line=line,
        column=1,
        code=CODE,
        message=f"{calls} {format_size(num_bytes)} of cast weights in autocast's cache until the region ends, for no backward.",
        remedy="Give the evaluation a region of its own with cache_enabled=False.",
        num_bytes=num_bytes,
        measured=True,
    )
