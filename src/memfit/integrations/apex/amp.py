"""`apex.amp`: initialize, scale_loss, master_params, state_dict, load_state_dict, and the decorators, on torch.autocast and GradScaler.

Source: apex's public documentation (nvidia.github.io/apex/amp.html, advanced.html). Differences that show, and why, are in docs/precision.md;
the main one: with master weights the model's own parameters are the float32 masters, and the half weights are made from them in each forward pass.
So whatever holds the parameters (an optimizer, a flat buffer, a clip) goes on working.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from memfit.core.errors import PrecisionError
from memfit.core.precision import Level, find_level
from memfit.integrations.apex import functions
from memfit.integrations.apex.functions import (
    disable_casts,
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from memfit.integrations.apex.options import check, listed, override
from memfit.runtime.patching import patch
from memfit.runtime.precision import stand_aside
from memfit.runtime.stepping import Step, Stepping
from memfit.techniques.precision.casting import cast
from memfit.techniques.precision.forward import Forwards
from memfit.techniques.precision.inspection import Inspection
from memfit.techniques.precision.leaves import check_connected, leaves_of
from memfit.techniques.precision.scaling import Scaling
from memfit.techniques.precision.weights import turn_half

__all__ = [
    "disable_casts",
    "float_function",
    "half_function",
    "init",
    "initialize",
    "load_state_dict",
    "master_params",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "state_dict",
]


@dataclass
class _Amp:
    """What `initialize` set up. One a process, as with apex.

    scalings: one a loss. models: whose forward passes are cast (all modules, where operations are chosen by lists).
    """

    level: Level
    half: torch.dtype
    forwards: Forwards
    scalings: list[Scaling]
    verbosity: int
    models: weakref.WeakSet[torch.nn.Module] = field(default_factory=weakref.WeakSet)
    stepping: Stepping = field(init=False)
    inspection: Inspection = field(default_factory=Inspection)
    undo: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.stepping = Stepping(self._step)

    def call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """In the place of torch.nn.Module.__call__."""

        def run(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            output = self.forwards.call(original, module, args, kwargs)
            if self.inspection.is_armed:
                self.inspection.look(module, (args, kwargs), output)
            return output

        return run

    def _step(self, optimizer: Optimizer, step: Step, args: Any, kwargs: Any) -> Any:
        """In the place of an optimizer's step."""
        if self.level.masters and (args or kwargs.get("closure") is not None):
            raise PrecisionError(
                "amp does not support a closure where it keeps master weights. Call backward first, and step() without one."
            )
        self.forwards.forget()
        overflowed = [number for number, scaling in enumerate(self.scalings) if scaling.must_hold_back(optimizer)]
        if not overflowed:
            self.inspection.is_armed = False
            return step(optimizer, *args, **kwargs)
        self.stepping.hold_back(optimizer)
        if self.verbosity:
            for number in overflowed:
                print(
                    f"Gradient overflow.  Skipping step, loss scaler {number} reducing loss scale to {self.scalings[number].reduced_scale}"
                )
        worst = max((self.scalings[number] for number in overflowed), key=lambda scaling: scaling.num_in_a_row)
        self.inspection.note_overflow(worst.num_in_a_row + 1, worst.scale)
        return None


_amp: _Amp | None = None
_is_disabled = False  # initialize(enabled=False)


def initialize(
    models: torch.nn.Module | list[torch.nn.Module],
    optimizers: Optimizer | list[Optimizer] | None = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float | None = 2.0**24,
) -> Any:
    """Prepare models and optimizers for an opt level; gives them back as they came, one or in a list.

    Every property that is not None overrides the level's. Half is float16, or `cast_model_type`. Raises PrecisionError for an unknown level, a property
    the level has no use for, models that are half or wrapped for parallel training already, and anything but a model, an optimizer or lists of them.
    """
    global _amp, _is_disabled
    all_models, all_optimizers = listed(models, torch.nn.Module, "models"), listed(optimizers, Optimizer, "optimizers")
    level = find_level(opt_level)
    _is_disabled = not enabled
    if enabled:
        options = {
            "cast_model_type": cast_model_type,
            "patch_torch_functions": patch_torch_functions,
            "keep_batchnorm_fp32": keep_batchnorm_fp32,
            "master_weights": master_weights,
            "loss_scale": loss_scale,
        }
        level = override(level, options)
        check(all_models, all_optimizers, level)
        stand_aside("calls apex's amp.initialize")
        if _amp is not None and _amp.level != level:
            reset()
        if _amp is None:
            half = cast_model_type if cast_model_type not in (None, torch.float32) else torch.float16
            _amp = _Amp(level, half, Forwards(level, half, cast_model_outputs or torch.float32), [], verbosity)
            _install(_amp)
        scale = level.loss_scale
        _amp.scalings = [Scaling(scale, min_loss_scale, max_loss_scale) for _ in range(num_losses)]
        _amp.verbosity = verbosity
        for model in all_models:
            _prepare(_amp, model, cast_model_outputs)
        for optimizer in all_optimizers:
            _amp.stepping.watch(optimizer)
            if optimizer.state and level.half_weights and not level.masters:
                optimizer.load_state_dict(optimizer.state_dict())  # casts its state to what the weights have become
        if verbosity:
            print(f"Selected optimization level {opt_level}: {level.title}; loss scale {scale}")
    return models if optimizers is None else (models, optimizers)


def _install(amp: _Amp) -> None:
    if amp.level.by_lists or amp.level.half_weights:
        amp.forwards.admits = lambda module, device_type: amp.level.by_lists or module in amp.models
        amp.undo.append(patch(torch.nn.Module, "__call__", amp.call))
    if amp.level.by_lists:
        amp.undo.append(functions.activate(amp.half))


def _prepare(amp: _Amp, model: torch.nn.Module, outputs: torch.dtype | None) -> None:
    amp.models.add(model)
    amp.inspection.begin(model)
    if amp.level.half_weights and not amp.level.masters:
        turn_half(model, amp.half, amp.level)
        handle = model.register_state_dict_post_hook(_save_in_float32)
        amp.undo.append(handle.remove)
    if outputs is not None and not amp.level.half_weights:  # else `Forwards` casts them
        handle = model.register_forward_hook(lambda module, args, output: cast(output, outputs))
        amp.undo.append(handle.remove)


def _save_in_float32(module: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """A checkpoint of half weights is float32, as apex's is, so that it can be loaded at any level."""
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16):
            state[name] = value.float()


def reset() -> None:
    """Take off all that `initialize` put on. What was cast stays cast."""
    global _amp, _is_disabled
    amp, _amp, _is_disabled = _amp, None, False
    if amp is not None:
        amp.forwards.forget()
        amp.stepping.exit()
        while amp.undo:
            amp.undo.pop()()


# ---- training --------------------------------------------------------------------------------------------------------


@contextmanager
def scale_loss(
    loss: torch.Tensor,
    optimizers: Optimizer | list[Optimizer],
    loss_id: int = 0,
    model: torch.nn.Module | None = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[torch.Tensor]:
    """Yields the loss in float32 times the loss scale; call backward of it inside. On leaving, gradients are unscaled and examined.

    loss_id: which of the `num_losses` scales. delay_unscale: leave gradients scaled; another `scale_loss` must follow before the step. model and
    delay_overflow_check have no effect. Raises PrecisionError before `initialize`, for an unknown loss_id, and where the optimizer cannot reach what the loss
    was computed from.
    """
    if _amp is None:
        if _is_disabled:
            yield loss
            return
        raise PrecisionError(
            "amp.scale_loss was called before amp.initialize, so there is no loss scale yet. Call "
            "`model, optimizer = amp.initialize(model, optimizer, opt_level='O1')` after both are made."
        )
    if not 0 <= loss_id < len(_amp.scalings):
        raise PrecisionError(
            f"There is no loss scale {loss_id}: amp.initialize was told of num_losses={len(_amp.scalings)}. Give it the number of losses."
        )
    scaling = _amp.scalings[loss_id]
    with _amp.forwards.backward():
        leaves = leaves_of([loss])
        if scaling.is_dynamic or _amp.level.loss_scale != 1.0:
            with scaling.scaled([loss.float()], unscale=not delay_unscale) as scaled:
                yield scaled[0]
        else:
            yield loss.float()
    known = _amp.stepping.optimizers()
    for optimizer in listed(optimizers, Optimizer, "optimizers"):
        check_connected(optimizer, leaves, known)


def master_params(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """The parameters the optimizer updates: what to clip."""
    return (p for group in optimizer.param_groups for p in group["params"])


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """The loss scales, and how many steps each has had since it last changed: {'loss_scaler0': {'loss_scale', 'unskipped'}, ...}."""
    destination = {} if destination is None else destination
    for number, scaling in enumerate(_amp.scalings if _amp is not None else ()):
        destination[f"loss_scaler{number}"] = scaling.state_dict()
    return destination


def load_state_dict(state_dict: dict[str, Any]) -> None:
    """Go on with the loss scales of a `state_dict`, after `initialize`. Warns where their number differs; raises PrecisionError for unknown keys."""
    unknown = [name for name in state_dict if not name.startswith("loss_scaler")]
    if unknown:
        raise PrecisionError(
            f"{unknown[0]!r} is no entry of an amp state_dict, which has loss_scaler0, loss_scaler1 and so on. Give what amp.state_dict gave."
        )
    scalings = _amp.scalings if _amp is not None else []
    if len(state_dict) != len(scalings):
        warnings.warn(f"the state has {len(state_dict)} loss scales and amp was initialized with {len(scalings)}", stacklevel=2)
    for scaling, state in zip(scalings, state_dict.values(), strict=False):
        scaling.load_state_dict(state)


def init(*_: Any, **__: Any) -> None:
    """apex's first interface, which apex itself gave up in 2019."""
    raise PrecisionError(
        "amp.init is apex's old interface, and apex refused it too. Call model, optimizer = amp.initialize(model, optimizer, opt_level='O1')."
    )
