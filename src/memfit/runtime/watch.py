"""The size watch: tells before a forward pass when its inputs are larger than any that were measured.

A plan made for one sequence length does not hold for a longer one; such a step must run under the guard. Compared is the number of
elements that come into each root module (one the program calls itself): a few microseconds a step, and nothing inside the model.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from memfit.engine.private import keywords_of_module_call


class SizeWatch:
    """Remembers the largest inputs of each root module in measured steps."""

    def __init__(self, on_larger: Callable[[torch.nn.Module, int, int], None]) -> None:
        """on_larger(module, elements, largest measured): called before a forward pass larger than what was measured."""
        self.is_learning = True  # the step is measured under the guard: what comes in now is known afterwards
        self._on_larger = on_larger
        self._largest: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()  # a model may go
        self._in_step: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()
        self._removers: list[Callable[[], None]] = []

    def look(self, module: torch.nn.Module, args: Any) -> None:
        """The program calls a root module while the tape is installed."""
        self._compare(module, args, keywords_of_module_call())

    def begin_step(self) -> None:
        """What comes in from here on is the next measured step's."""
        self._in_step.clear()

    @property
    def was_smaller(self) -> bool:
        """Whether less came into some root module in this step than in the largest that was measured."""
        return any(self._in_step.get(module, 0) < largest for module, largest in self._largest.items())

    def stay(self) -> None:
        """Go on watching without the tape: one pre-hook on each root module seen so far."""
        self.leave()
        for module in list(self._largest):
            self._removers.append(module.register_forward_pre_hook(self._compare, with_kwargs=True).remove)

    def leave(self) -> None:
        """Take the hooks of `stay` off; idempotent."""
        while self._removers:
            self._removers.pop()()

    def forget(self) -> None:
        """Another program begins."""
        self.leave()
        self._largest.clear()

    def _compare(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled():  # an evaluation keeps nothing for backward
            return
        elements = _count((args, kwargs))
        largest = self._largest.get(module, 0)
        self._in_step[module] = max(self._in_step.get(module, 0), elements)
        if elements <= largest:
            return
        self._largest[module] = elements
        if not self.is_learning:
            self._on_larger(module, elements, largest)


def _count(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel()
    if isinstance(value, (list, tuple)):
        return sum(map(_count, value))
    if isinstance(value, dict):
        return sum(map(_count, value.values()))
    return 0
