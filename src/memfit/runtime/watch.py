"""The size watch: tells before a forward pass when its inputs are larger than any that were measured.

A plan made for one sequence length does not hold for a longer one; such a step must run under the guard. One pre-hook on each root
module compares the number of elements that come in: a microsecond a step, and nothing inside the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class SizeWatch:
    """Watches root modules (those called by the program itself, not by another module)."""

    def __init__(self, on_larger: Callable[[torch.nn.Module, int, int], None]) -> None:
        """on_larger(module, elements, largest measured): called before the forward pass that would be larger."""
        self.is_learning = True  # the step is measured: what comes in now is known afterwards
        self._on_larger = on_larger
        self._largest: dict[int, int] = {}
        self._removers: dict[int, Callable[[], None]] = {}

    def add(self, module: torch.nn.Module) -> None:
        """Watch this module from its next call on."""
        if id(module) not in self._removers:
            self._removers[id(module)] = module.register_forward_pre_hook(self._look, with_kwargs=True).remove

    def remove(self) -> None:
        """Take all hooks off; idempotent."""
        while self._removers:
            self._removers.popitem()[1]()

    def _look(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled():  # an evaluation keeps nothing for backward
            return
        elements = _count((args, kwargs))
        largest = self._largest.get(id(module), 0)
        if elements <= largest:
            return
        if largest and not self.is_learning:
            self._on_larger(module, elements, largest)
        self._largest[id(module)] = elements


def _count(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel()
    if isinstance(value, (list, tuple)):
        return sum(map(_count, value))
    if isinstance(value, dict):
        return sum(map(_count, value.values()))
    return 0
