"""Optimizer steps that can be held back, and learning-rate schedulers that then wait too.

`torch.amp.GradScaler` holds a step back by not calling it; a program that calls `optimizer.step()` itself needs it done inside. The classes'
own `step` is wrapped, under whatever PyTorch and its schedulers put on the instance, so no scheduler warns that it came first.

A scheduler waits if, since its last step, its optimizer was held back and never stepped: so one that steps with the optimizer does not
advance without it, and one that steps once an epoch does.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from memfit.runtime.patching import patch

Step = Callable[..., Any]


class Stepping:
    """Watches optimizers given to `watch`, and between `enter` and `exit` every optimizer and scheduler there is.

    run_step(optimizer, step, args, kwargs): called in the place of a step; returns what it returns, and says with `hold_back` if it was not made.
    """

    def __init__(
        self, run_step: Callable[[Optimizer, Step, Any, Any], Any], on_new: Callable[[Optimizer], None] = lambda new: None
    ) -> None:
        self.num_steps = self.num_held_back = 0
        self._run_step = run_step
        self._on_new = on_new
        self._made: weakref.WeakKeyDictionary[Optimizer, list[int]] = weakref.WeakKeyDictionary()  # steps made, held back
        self._seen: weakref.WeakKeyDictionary[LRScheduler, list[int]] = (
            weakref.WeakKeyDictionary()
        )  # the same, at its last step
        self._wrapped: set[type] = set()
        self._running: list[Any] = []
        self._undo: list[Callable[[], None]] = []

    def enter(self) -> None:
        """Begin to notice new ones, and know those that exist.

        The constructor of a scheduler puts a wrapper of the class's `step` of that day on the optimizer: of those that exist it is wrapped too.
        """
        self._undo += [patch(Optimizer, "__init__", self._wrap_optimizer), patch(LRScheduler, "__init__", self._wrap_scheduler)]
        for kind in _with_subclasses(LRScheduler):  # not all of them call LRScheduler.__init__
            self._wrap_class(kind, self._schedule)
        for each in gc.get_objects():
            if issubclass(type(each), Optimizer):
                self.watch(each)
                if "step" in vars(each):
                    self._undo.append(patch(each, "step", functools.partial(self._step_of, each)))

    def watch(self, optimizer: Optimizer) -> None:
        """Know this one from now on."""
        self._made.setdefault(optimizer, [0, 0])
        self._wrap_class(type(optimizer), self._step)

    def exit(self) -> None:
        """Take all wrappers off."""
        while self._undo:
            self._undo.pop()()

    def optimizers(self) -> list[Optimizer]:
        """All that are known and alive."""
        return list(self._made)

    def hold_back(self, optimizer: Optimizer) -> None:
        """The step that runs now is not made."""
        self.num_held_back += 1
        self._made[optimizer][1] += 1

    # ---- optimizers ------------------------------------------------------------------------------------------------

    def _wrap_optimizer(self, original: Callable[..., None]) -> Callable[..., None]:
        def init(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            self.watch(optimizer)
            self._on_new(optimizer)

        return init

    def _step(self, original: Step) -> Step:
        def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if any(each is optimizer for each in self._running) or optimizer not in self._made:  # super().step()
                return original(optimizer, *args, **kwargs)
            self._running.append(optimizer)
            num_held_back = self._made[optimizer][1]
            try:
                result = self._run_step(optimizer, original, args, kwargs)
            finally:
                self._running.pop()
            if self._made[optimizer][1] == num_held_back:
                self.num_steps += 1
                self._made[optimizer][0] += 1
            return result

        return step

    def _step_of(self, optimizer: Optimizer, original: Step) -> Step:
        return functools.partial(self._step(lambda _, *args, **kwargs: original(*args, **kwargs)), optimizer)

    # ---- schedulers ------------------------------------------------------------------------------------------------

    def _wrap_scheduler(self, original: Callable[..., None]) -> Callable[..., None]:
        def init(scheduler: LRScheduler, *args: Any, **kwargs: Any) -> None:
            self._wrap_class(type(scheduler), self._schedule)
            original(scheduler, *args, **kwargs)

        return init

    def _schedule(self, original: Step) -> Step:
        def step(scheduler: LRScheduler, *args: Any, **kwargs: Any) -> Any:
            if any(isinstance(each, LRScheduler) for each in self._running):  # a scheduler of schedulers, or super().step()
                return original(scheduler, *args, **kwargs)
            optimizer = getattr(scheduler, "optimizer", None)
            made = self._made.get(optimizer, [0, 0]) if isinstance(optimizer, Optimizer) else [0, 0]
            seen = self._seen.get(scheduler, [0, 0])
            if made[0] == seen[0] and made[1] > seen[1]:
                return None
            self._running.append(scheduler)
            try:
                return original(scheduler, *args, **kwargs)
            finally:
                self._running.pop()
                self._seen[scheduler] = list(made)

        return step

    def _wrap_class(self, kind: type, wrap: Callable[[Step], Step]) -> None:
        """Wrap the `step` this class defines or inherits, once."""
        owner = next(each for each in kind.__mro__ if "step" in each.__dict__)
        if owner not in self._wrapped:
            self._wrapped.add(owner)
            self._undo.append(patch(owner, "step", wrap))


def _with_subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    for each in kind.__subclasses__():
        yield from _with_subclasses(each)
