"""The optimizers of a program, found as they are made, and when their steps end a training step.

Nothing here keeps an optimizer (and so a model and its gradients) alive. PyTorch has a public hook for an optimizer's step but
none for its making; so that a hopeless budget is refused before the first forward, `torch.optim.Optimizer.__init__` is wrapped
while a session runs. An optimizer made before that is found when it first steps.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

# What `note_step` answers.
GOES_ON = "goes on"  # more optimizers are expected to step in this training step
ENDED = "ended"  # a training step is over
JOINED = "joined"  # an optimizer stepped that had no part in the training steps so far
LED = "led"  # another optimizer has stepped twice without the one that ended steps until now: it ends them from here on


class Optimizers:
    """All optimizers known, oldest first.

    The leader ends a training step. It is the last of those that step in the first round; the round is over when all known ones have
    stepped, or when one steps again.
    """

    def __init__(self, given: torch.optim.Optimizer | None, on_new: Callable[[torch.optim.Optimizer], None]) -> None:
        """on_new: called with every optimizer made while `watch` is on."""
        self._known: list[weakref.ref[torch.optim.Optimizer]] = []
        self._leader: weakref.ref[torch.optim.Optimizer] | None = None
        self._num_since: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._ever: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._on_new = on_new
        if given is not None:
            self.add(given)

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return iter([each for ref in self._known if (each := ref()) is not None])

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Know it from now on."""
        if all(each is not optimizer for each in self):
            self._known = [ref for ref in self._known if ref() is not None] + [weakref.ref(optimizer)]

    def watch(self) -> Callable[[], None]:
        """Begin to notice new ones; hand back the function that takes the wrapper off."""
        original = torch.optim.Optimizer.__init__
        is_on = True

        @functools.wraps(original)
        def init(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            if is_on:
                self.add(optimizer)
                self._on_new(optimizer)

        def undo() -> None:
            nonlocal is_on
            is_on = False
            if torch.optim.Optimizer.__init__ is init:  # else somebody wrapped it again; ours stays under it and does nothing
                torch.optim.Optimizer.__init__ = original  # type: ignore[method-assign]

        torch.optim.Optimizer.__init__ = init  # type: ignore[method-assign, assignment]
        return undo

    @property
    def stepped(self) -> list[torch.optim.Optimizer]:
        """Those that have stepped at all."""
        return [each for each in self if each in self._ever]

    def note_step(self, optimizer: torch.optim.Optimizer) -> str:
        """It has stepped: GOES_ON, ENDED, JOINED or LED."""
        leader = self._leader() if self._leader is not None else None
        is_new = optimizer not in self._ever
        self._ever.add(optimizer)
        count = self._num_since[optimizer] = self._num_since.get(optimizer, 0) + 1
        if leader is None:
            is_round_over = count > 1 or all(each in self._num_since for each in self)
            if not is_round_over:
                return GOES_ON
            return self._end(optimizer)
        if optimizer is leader:
            return self._end(optimizer)
        if is_new:
            self.forget_leader()
            self._num_since[optimizer] = 1
            return JOINED
        if count > 1:
            self._end(optimizer)
            return LED
        return GOES_ON

    def forget_leader(self) -> None:
        """Another program begins: its first round decides who leads."""
        self._leader = None
        self._num_since.clear()

    def _end(self, leader: torch.optim.Optimizer) -> str:
        self._leader = weakref.ref(leader)
        self._num_since.clear()
        return ENDED
