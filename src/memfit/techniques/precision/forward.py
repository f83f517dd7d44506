"""Forward passes in the precision of a level.

A *root* is a module the program itself calls; what follows it up to the backward pass (the loss, mostly) belongs to its *region*.

By lists (O1): the region is one `torch.autocast` context, entered at the root's call and left before backward or the optimizer's step,
so autocast's cache of cast weights never outlives a weight. A forward pass without gradients runs without that cache: it would hold a half
copy of every weight for nothing. An evaluation (no gradients, or a root in eval mode outside a region) has autocast for the call only, and its
outputs are cast to float32: nobody knows what the program does with them.

In half with float32 masters (O2): for the root's call the weights of its modules are half copies, made by differentiable casts, and
so they are again during backward, for what a checkpoint recomputes then. In half without masters (O3) the weights themselves are half.
Both cast a root's inputs to half and its outputs to float32.

Source of what the levels mean: apex's documentation (nvidia.github.io/apex/amp.html). Known limit: in O2 a function that a checkpoint
recomputes after its root was collected finds float32 weights.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memfit.core.errors import PrecisionError
from memfit.core.precision import Level
from memfit.engine.private import in_backward
from memfit.techniques.precision.casting import Copies, cast, swap_in_half
from memfit.techniques.precision.weights import check_weights, turn_half

_MIXED_TYPES = re.compile(r"dtype|same type|scalar type|Input type")
Call = Callable[..., Any]  # (module, *args, **kwargs) -> what the module's forward pass returns


class Forwards:
    """Runs module calls. `call` stands in the place of `torch.nn.Module.__call__`.

    half: the half precision; None is what torch.autocast takes on the module's device. output: what O2 and O3 cast outputs to.
    """

    def __init__(self, level: Level, half: torch.dtype | None, output: torch.dtype = torch.float32) -> None:
        self.level = level
        self.admits: Callable[[torch.nn.Module, str], bool] = lambda root, device_type: True  # asked before every root's call
        self._half = half
        self._output = output
        self._depth = 0
        self._autocast: torch.autocast | None = None  # the open region's
        self._copies: Copies = {}
        self._roots: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # all greeted
        self._versions: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()  # of the region's roots

    @property
    def is_open(self) -> bool:
        """Whether a region is open, so that autocast is on because of this."""
        return self._autocast is not None

    def half_on(self, device_type: str) -> torch.dtype:
        """The half precision used on a type of device."""
        return self._half or torch.get_autocast_dtype(device_type)

    def call(self, original: Call, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """What the module's call gives in this precision."""
        if self._depth:
            if self._autocast is not None and not torch.is_grad_enabled() and torch.is_autocast_cache_enabled():
                return self._call_without_cache(original, module, args, kwargs)
            return original(module, *args, **kwargs)
        device_type = _device_type_of(module)
        if device_type is None or in_backward():  # a loss without weights; a checkpoint's recomputation
            return original(module, *args, **kwargs)
        if not self.admits(module, device_type):
            return original(module, *args, **kwargs)
        if module not in self._roots:
            self._greet(module, device_type)
        self._depth += 1
        try:
            if self.level.by_lists:
                return self._call_by_lists(original, module, args, kwargs, device_type)
            return self._call_in_half(original, module, args, kwargs, self.half_on(device_type))
        finally:
            self._depth -= 1

    def _greet(self, module: torch.nn.Module, device_type: str) -> None:
        check_weights(module, self.level)
        self._roots.add(module)
        if self.level.half_weights and not self.level.masters:
            turn_half(module, self.half_on(device_type), self.level)

    # ---- by lists --------------------------------------------------------------------------------------------------

    def _call_by_lists(self, original: Call, module: torch.nn.Module, args: Any, kwargs: Any, device_type: str) -> Any:
        is_inside, has_gradients = self._autocast is not None, torch.is_grad_enabled()
        if not has_gradients or not (is_inside or module.training):
            with torch.autocast(device_type, self.half_on(device_type), cache_enabled=has_gradients):
                output = original(module, *args, **kwargs)
            return output if is_inside else cast(output, self._output)
        version = sum(weight._version for weight in module.parameters())
        if self._autocast is None:
            self._autocast = torch.autocast(device_type, self.half_on(device_type))
            self._autocast.__enter__()
        elif self._versions.get(module, version) != version:  # written since it was cast, by no optimizer
            torch.clear_autocast_cache()
        self._versions[module] = version
        return original(module, *args, **kwargs)

    def _call_without_cache(self, original: Call, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        device_type = self._autocast.device  # type: ignore[union-attr]
        with torch.autocast(device_type, self.half_on(device_type), cache_enabled=False):
            return original(module, *args, **kwargs)

    def leave(self) -> None:
        """End the region: before backward, before a step. Drops autocast's cache. Idempotent."""
        self._versions.clear()
        autocast, self._autocast = self._autocast, None
        if autocast is not None:
            autocast.__exit__(None, None, None)

    def forget(self) -> None:
        """The weights change now: no copy of them is right any more."""
        self.leave()
        self._copies.clear()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around a backward pass."""
        roots = list(self._versions)
        self.leave()
        undo = [self._swap(root, self._copies) for root in roots] if self._copies else []
        try:
            yield
        finally:
            for each in reversed(undo):
                each()
            self._copies.clear()

    # ---- in half ---------------------------------------------------------------------------------------------------

    def _call_in_half(self, original: Call, module: torch.nn.Module, args: Any, kwargs: Any, half: torch.dtype) -> Any:
        args, kwargs = cast(args, half, ask_objects=True), cast(kwargs, half, ask_objects=True)
        undo: Callable[[], None] = lambda: None  # noqa: E731
        if self.level.masters:
            if torch.is_grad_enabled():
                self._versions[module] = 0  # each weight's own version is looked at instead
            undo = self._swap(module, self._copies if torch.is_grad_enabled() else {})
        try:
            output = original(module, *args, **kwargs)
        except RuntimeError as error:
            if isinstance(error, PrecisionError) or not _MIXED_TYPES.search(str(error)):
                raise
            raise PrecisionError(
                f"{self.level.name} runs the whole of {type(module).__name__} in half, but its forward pass makes float32 tensors of its own, which do not go "
                f"with half weights (PyTorch: {str(error).splitlines()[0]}). Use O1, which casts at each operation, or make such tensors in the weights' type, "
                "with .to(next(self.parameters()).dtype)."
            ) from error
        finally:
            undo()
        return cast(output, self._output)

    def _swap(self, module: torch.nn.Module, copies: Copies) -> Callable[[], None]:
        half = self.half_on(_device_type_of(module) or "cpu")
        return swap_in_half(module, half, self.level.float32_norms, copies)


def _device_type_of(module: torch.nn.Module) -> str | None:
    """Of its first weight; None for a module without any."""
    first = next(module.parameters(), None)
    return first.device.type if first is not None else None
