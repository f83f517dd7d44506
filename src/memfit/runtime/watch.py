"""Watches: what tells that the program which trains is no longer the one that was measured.

The size watch tells before a forward pass when its inputs are larger than any that were measured. A plan made for one sequence length does
not hold for a longer one; such a step must run under the guard. Compared is the number of elements that come into each root module (one
the program calls itself): a few microseconds a step, and nothing inside the model. The step watch tells after a step, from two numbers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from memfit.core.plan import Move
from memfit.engine.private import keywords_of_module_call
from memfit.engine.tape import Tape

_MORE_SAVED, _FEWER_EVICTED = 1.02, 0.9  # tensors, of those in the measured step: the program is another one
_MOST_CHANGES = 3  # one that changes with every step is not measured for ever


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


class StepWatch:
    """Compares a step that is not measured with the last that was: how many tensors autograd saved, and of how many the plan let go."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._num_saved = self._num_evicted = 0  # in the last step
        self._num_evicted_before = 0
        self._usual_saved = self._usual_evicted = 0
        self._moves: tuple[Move, ...] = ()  # of the plan under which so many are usual
        self._num_changes = 0

    def end_step(self) -> None:
        """A step is over, whatever comes of it."""
        num_evicted = self._tape.counts.num_evicted
        self._num_saved, self._tape.num_saved = self._tape.num_saved, 0
        self._num_evicted, self._num_evicted_before = num_evicted - self._num_evicted_before, num_evicted

    def learn(self, moves: tuple[Move, ...], num_unplanned: int) -> None:
        """It was measured, under a plan of these moves; so many saved tensors were let go of beside it."""
        self._usual_saved = self._num_saved
        self._moves, self._usual_evicted = moves, self._num_evicted - num_unplanned

    def why_changed(self, moves: tuple[Move, ...]) -> str:
        """Why the program is another one, after a step under a plan that was not measured; '' if it is not, or has been too often."""
        reason = ""
        if self._num_saved > _MORE_SAVED * self._usual_saved:
            reason = f"autograd saved {self._num_saved} tensors, {self._usual_saved} when it was measured"
        elif self._num_saved < self._usual_saved / _MORE_SAVED:  # fewer micro-batches, say
            return ""
        elif self._moves != moves:
            self._moves, self._usual_evicted = moves, self._num_evicted
        elif self._num_evicted < _FEWER_EVICTED * self._usual_evicted:
            reason = f"of what the plan names {self._num_evicted} saved tensors were let go of, {self._usual_evicted} in an earlier step"
        self._num_changes += bool(reason)
        return reason if self._num_changes <= _MOST_CHANGES else ""
