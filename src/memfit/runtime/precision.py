"""An opt level on an unmodified float32 program: everything inside `with Precision(choice)` trains in it.

Where it stands: every module call goes through `Forwards`; `backward` scales the loss and unscales before it returns; an optimizer's
step runs outside autocast and is held back after an overflow; schedulers wait with it. Nothing of the program is changed, and everything is taken
off at the end, in any order. A program that uses amp itself, or half weights, is left alone and told so.

Where this differs from hand-written `torch.autocast` and `torch.amp.GradScaler` is listed in docs/precision.md.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from memfit.core.errors import PrecisionError
from memfit.core.finding import Finding
from memfit.core.precision import Choice
from memfit.engine.private import in_backward
from memfit.runtime.autocast_cache import CacheWatch
from memfit.runtime.patching import patch
from memfit.runtime.stepping import Step, Stepping
from memfit.techniques.precision.forward import Forwards
from memfit.techniques.precision.inspection import Inspection
from memfit.techniques.precision.leaves import check_connected, leaves_of
from memfit.techniques.precision.scaling import Scaling
from memfit.techniques.precision.weights import check_optimizer, check_weights, name_halves

_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_CHECKED_STEPS = 3  # of each optimizer: is it connected to what the model reads?

_active: list[Precision] = []


class Precision:
    """A context manager. One at a time, of the thread that enters it.

    on_held_back: called when an optimizer's step was left out because gradients overflowed. model, optimizer: what is trained, where it is known
    beforehand; what the level cannot take is then refused on entering, and not in the first step.
    """

    def __init__(
        self,
        choice: Choice,
        on_held_back: Callable[[], None] | None = None,
        *,
        model: torch.nn.Module | None = None,
        optimizer: Optimizer | None = None,
    ) -> None:
        self.choice = choice
        self._given = (model, optimizer)
        self._on_held_back = on_held_back or (lambda: None)
        half = _HALVES[choice.half] if choice.half is not None else None
        self._forwards = Forwards(choice.level, half)
        self._forwards.admits = self._admit
        self._stepping = Stepping(self._step, self._on_new_optimizer)
        self._scaling: Scaling | None = None  # made when the half precision is known to be float16
        self._inspection = Inspection()
        self._cache_watch = CacheWatch()  # of the program's own autocast
        self._device_type = ""
        self._aside = ""  # why the program is left alone
        self._notes: list[str] = []
        self._admitted: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._is_backward = False
        self._leaves: list[torch.Tensor] = []  # reached since the last step; kept only while steps are checked
        self._has_stepped = False
        self._num_checked: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._thread = 0
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> Precision:
        if _active:
            raise PrecisionError("A precision is in force in this process already. Leave its `with` block before the second.")
        self._thread = threading.get_ident()
        (model, optimizer), self._given = self._given, (None, None)
        if self.choice.level.does_nothing:
            return self
        if model is not None:
            check_weights(model, self.choice.level)
        if optimizer is not None:
            check_optimizer(optimizer, self.choice.level)
        _active.append(self)
        self._stepping.enter()
        self._undo = [
            patch(torch.nn.Module, "__call__", self._wrap_call),
            patch(torch.Tensor, "backward", self._wrap_backward),
            patch(torch.autograd, "backward", self._wrap_backward),
            patch(torch.autograd, "grad", self._wrap_grad),
            patch(torch.amp.GradScaler, "__init__", self._wrap_scaler),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        self._forwards.forget()
        self._leaves.clear()  # this object may outlive the model: a session is asked for its result later
        while self._undo:
            self._undo.pop()()
        self._stepping.exit()
        if self in _active:
            _active.remove(self)

    def stand_aside(self, reason: str) -> None:
        """Leave the program alone from here on. reason: what it does itself, as the end of a sentence."""
        if not self._aside:
            self._aside = reason
            self._forwards.forget()

    @property
    def label(self) -> str:
        """What the program trained in, like 'O1 bfloat16'; '' where nothing was changed."""
        if self._aside or not self._device_type:
            return ""
        return f"{self.choice.level.name} {self._half_name}"

    @property
    def findings(self) -> list[Finding]:
        """What was seen of the program's own use of autocast."""
        return self._cache_watch.findings

    @property
    def _half_name(self) -> str:
        return str(self._forwards.half_on(self._device_type)).removeprefix("torch.")

    def messages(self) -> list[str]:
        """What there is to say about the run, in whole sentences."""
        level = self.choice.level
        if self._aside:
            told = [f"{found.path}:{found.line}: {found.code} {found.message} {found.remedy}" for found in self.findings]
            return [f"precision {level.name} was not applied: the program {self._aside}, so it is left alone.", *told]
        if level.does_nothing:
            return [f"precision {level.name}: {level.title}, as the program is written; nothing was changed."]
        if not self._device_type:
            return [f"precision {level.name} had nothing to act on: no torch.nn.Module was called in training."]
        text = f"precision {level.name} ({level.title}) in {self._half_name}; results differ from float32's."
        if self._scaling is not None:
            text += (
                f" The loss scale ended at {self._scaling.scale:g}; {self._stepping.num_held_back} optimizer steps were held back for gradients that "
                f"overflowed, {self._stepping.num_steps} were made."
            )
        return [text, *self._notes]

    # ---- the program's calls ---------------------------------------------------------------------------------------

    def _is_ours(self) -> bool:
        return not self._aside and threading.get_ident() == self._thread

    def _wrap_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def watched(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self._cache_watch.call(original, module, args, kwargs)

        def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return original(module, *args, **kwargs)
            if self._aside:
                return watched(module, *args, **kwargs)
            output = self._forwards.call(watched, module, args, kwargs)
            if self._inspection.is_armed:
                self._inspection.look(module, (args, kwargs), output)
            return output

        return call

    def _admit(self, module: torch.nn.Module, device_type: str) -> bool:
        """A root module is called: is its program one that has no precision of its own?"""
        if not self._forwards.is_open and torch.is_autocast_enabled(device_type):
            self.stand_aside("uses torch.autocast itself")
        elif module not in self._admitted:
            halves = name_halves(module.parameters())
            if halves:
                self.stand_aside(f"made the weights of its {type(module).__name__} {halves} itself")
            else:
                self._welcome(module, device_type)
        return not self._aside

    def _welcome(self, module: torch.nn.Module, device_type: str) -> None:
        self._admitted.add(module)
        self._inspection.begin(module)
        self._device_type = device_type
        if self._scaling is None and self._needs_scale(device_type):
            self._scaling = Scaling(self.choice.level.loss_scale)
        if self.choice.level.by_lists and any(not (w.is_floating_point() or w.is_complex()) for w in module.parameters()):
            self._notes.append(f"The integer parameters of {type(module).__name__} are left as they are.")

    def _needs_scale(self, device_type: str) -> bool:
        """Whether gradients on this type of device need the loss scaled: not in bfloat16, which has float32's range."""
        return self.choice.level.loss_scale != 1.0 and self._forwards.half_on(device_type) is torch.float16

    def _wrap_grad(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def grad(*args: Any, **kwargs: Any) -> Any:
            if not self._is_ours() or not self._forwards.is_open:
                return original(*args, **kwargs)
            with torch.autocast(self._device_type, enabled=False):  # a backward pass, whose scale is the program's own affair
                return original(*args, **kwargs)

        return grad

    def _wrap_scaler(self, original: Callable[..., None]) -> Callable[..., None]:
        def init(scaler: torch.amp.GradScaler, *args: Any, **kwargs: Any) -> None:
            original(scaler, *args, **kwargs)
            if scaler.is_enabled() and not type(scaler).__module__.startswith("memfit."):
                self.stand_aside("makes a GradScaler itself")

        return init

    # ---- backward --------------------------------------------------------------------------------------------------

    def _wrap_backward(self, original: Callable[..., None]) -> Callable[..., None]:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            outputs = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
            if self._is_backward:
                if self._scaling is not None and in_backward():  # a reentrant checkpoint's, maybe in a thread of autograd's
                    self._scaling.reach(outputs)
                return original(tensors, *args, **kwargs)
            if not self._is_ours() or not outputs:
                return original(tensors, *args, **kwargs)
            self._is_backward = True
            try:
                with self._forwards.backward():
                    self._note_leaves(outputs)
                    creates_graph = args[2] if len(args) > 2 else kwargs.get("create_graph", False)
                    if self._scaling is None or creates_graph:  # what is derived again must not contain the scale
                        return original(tensors, *args, **kwargs)
                    with self._scaling.scaled(outputs) as scaled:
                        return original(scaled[0] if isinstance(tensors, torch.Tensor) else scaled, *args, **kwargs)
            finally:
                self._is_backward = False

        return backward

    def _note_leaves(self, outputs: tuple[torch.Tensor, ...]) -> None:
        """Remember what is reached, for the check of the optimizers' first steps."""
        if self._has_stepped:
            self._leaves.clear()
            self._has_stepped = False
        if any(self._num_checked.get(each, 0) < _CHECKED_STEPS for each in self._stepping.optimizers()):
            self._leaves += leaves_of(outputs)

    # ---- the optimizer's step --------------------------------------------------------------------------------------

    def _on_new_optimizer(self, optimizer: Optimizer) -> None:
        if self._is_ours():
            check_optimizer(optimizer, self.choice.level)

    def _step(self, optimizer: Optimizer, step: Step, args: Any, kwargs: Any) -> Any:
        if not self._is_ours():
            return step(optimizer, *args, **kwargs)
        first = next((p for group in optimizer.param_groups for p in group["params"]), None)
        if first is None or not self._needs_scale(first.device.type):
            self._forwards.forget()
            self._check(optimizer)
            return step(optimizer, *args, **kwargs)
        if in_backward():
            raise PrecisionError(
                f"The {type(optimizer).__name__} steps inside the backward pass, where float16 gradients are still multiplied by the loss scale. "
                "Use bfloat16 (--half bf16, half='bf16'), which needs no scale, or step after backward."
            )
        closure, args, kwargs = _take_closure(args, kwargs)
        result = self._run_closure(optimizer, closure) if closure is not None else None
        self._forwards.forget()
        if self._scaling is not None and self._scaling.must_hold_back(optimizer):
            self._hold_back(optimizer)
            return result
        self._check(optimizer)
        returned = step(optimizer, *args, **kwargs)
        return returned if closure is None else result

    def _run_closure(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
        """Run it before the step, so that the step can be held back; PyTorch's optimizers would run it first thing."""
        if not type(optimizer).__module__.startswith("torch.optim") or isinstance(optimizer, torch.optim.LBFGS):
            raise PrecisionError(
                f"{type(optimizer).__name__} runs forward and backward inside its step, and a step that has begun cannot be held back when float16 "
                "gradients overflow. Use bfloat16 (--half bf16, half='bf16'), which needs no loss scale, or another optimizer."
            )
        with torch.enable_grad():
            return closure()

    def _hold_back(self, optimizer: Optimizer) -> None:
        assert self._scaling is not None
        self._stepping.hold_back(optimizer)
        self._has_stepped = True
        self._on_held_back()
        self._inspection.note_overflow(self._scaling.num_in_a_row + 1, self._scaling.scale)

    def _check(self, optimizer: Optimizer) -> None:
        self._inspection.is_armed = False
        self._has_stepped = True
        if self._num_checked.setdefault(optimizer, 0) < _CHECKED_STEPS:
            self._num_checked[optimizer] += 1
            check_connected(optimizer, self._leaves, self._stepping.optimizers())


def stand_aside(reason: str) -> None:
    """The precision in force, if there is one, leaves its program alone."""
    for each in list(_active):
        each.stand_aside(reason)


def _take_closure(args: Any, kwargs: Any) -> tuple[Callable[[], Any] | None, Any, Any]:
    """The closure among a step's arguments, and the arguments without it."""
    if args:
        return args[0], (None, *args[1:]), kwargs
    return kwargs.get("closure"), args, {name: value for name, value in kwargs.items() if name != "closure"}
