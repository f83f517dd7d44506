"""Who watches the tape, and what it counts."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from memfit.engine.cell import Call, Cell, Handle


class Observer(Protocol):
    """Who watches the tape: the recorder of a measured step, the guard. All calls come from the step's own thread."""

    def on_begin(self, call: Call) -> None: ...
    def on_failed(self, call: Call) -> None: ...  # it raised; no on_end follows
    def on_internal(self, call: Call) -> None: ...  # autograd has just saved something inside the call that nobody else sees
    def on_part(
        self, part: Call, cells: list[Cell]
    ) -> None: ...  # a recipe for these cells alone, before their call's own on_end
    def on_end(self, call: Call, cells: list[Cell]) -> None: ...
    def on_save(self, handle: Handle, call: Call | None) -> None: ...
    def on_packed(self, bits: torch.UntypedStorage, workspace_bytes: int) -> None: ...  # of a dropout's noise
    def on_evicted(self, handle: Handle) -> None: ...
    def on_unpack(self, handle: Handle) -> None: ...
    def on_restored(self, handle: Handle, num_calls: int) -> None: ...
    def on_drop(self, handle: Handle) -> None: ...


class Counts:
    """What the certificate is made of."""

    def __init__(self) -> None:
        self.num_evicted = self.num_restored = self.num_verified = self.num_replayed_calls = self.num_kept_instead = 0
        self.num_mismatched = self.num_sources_checked = self.num_sources_changed = 0
        self.num_overwritten = self.num_not_overwritten = 0  # calls the plan wanted in place: those that were, and could not be
        self.num_generator_checks = self.num_generators_moved = 0
        self.restore_seconds = 0.0
        self.sources: weakref.WeakSet[Cell] = weakref.WeakSet()  # already counted in num_sources_checked
        self.mismatched_places: list[str] = []
