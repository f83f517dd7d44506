"""Casting: floating-point tensors inside nested values, and a module's weights and buffers for the time of a forward pass.

The weights' copies are made by differentiable casts, so gradients arrive in float32 at the parameters themselves: the program's
optimizer, clipping, checkpoints and flat buffers go on working on the objects they know. Costs one cast of the weights a step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch

Copies = dict[torch.Tensor, tuple[torch.Tensor, int]]  # weight -> its half copy, and the weight's version when it was made
Undo = Callable[[], None]

_NORMS = torch.nn.modules.batchnorm._BatchNorm


def cast(value: Any, dtype: torch.dtype, *, ask_objects: bool = False) -> Any:
    """The value with every floating-point tensor in it cast; tensors of other kinds and unknown objects are handed on.

    ask_objects: call `to(dtype)` of other objects that have it, apex's rule for a program's own batch classes.
    """
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, (list, tuple)):
        items = [cast(each, dtype, ask_objects=ask_objects) for each in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, Mapping):
        result = copy.copy(value)  # keeps a subclass, such as the output classes of transformers
        for key, each in value.items():
            result[key] = cast(each, dtype, ask_objects=ask_objects)  # type: ignore[index]
        return result
    if ask_objects and hasattr(value, "to") and not isinstance(value, (type, torch.nn.Module)):
        return value.to(dtype)
    return value


def swap_in_half(module: torch.nn.Module, dtype: torch.dtype, float32_norms: bool, copies: Copies) -> Undo:
    """Put half copies in the place of the float32 weights and buffers of the module and all below it; hand back what undoes it.

    copies: those made before in this step, used again where the weight has not changed, and added to. A buffer that the forward
    pass writes is written back to the float32 one.
    """
    undo: list[Undo] = []
    for each in module.modules():
        if float32_norms and isinstance(each, _NORMS):
            continue
        for name, weight in each._parameters.items():
            if weight is not None and weight.dtype is torch.float32:
                undo.append(_swap_weight(each, name, weight, _copy_of(weight, dtype, copies)))
        for name, buffer in each._buffers.items():
            if buffer is not None and buffer.dtype is torch.float32:
                undo.append(_swap_buffer(each, name, buffer, buffer.to(dtype)))

    def put_back() -> None:
        while undo:
            undo.pop()()

    return put_back


def _copy_of(weight: torch.Tensor, dtype: torch.dtype, copies: Copies) -> torch.Tensor:
    known = copies.get(weight)
    if (
        known is None
        or known[1] != weight._version
        or known[0].requires_grad != (weight.requires_grad and torch.is_grad_enabled())
    ):
        known = copies[weight] = (weight.to(dtype), weight._version)
    return known[0]


def _swap_weight(module: torch.nn.Module, name: str, weight: torch.nn.Parameter, half: torch.Tensor) -> Undo:
    _place(module, name, half)
    return lambda: _place(module, name, weight)


def _place(module: torch.nn.Module, name: str, weight: Any) -> None:
    module._parameters[name] = weight
    if isinstance(module, torch.nn.RNNBase) and name in module._flat_weights_names:  # it keeps a list of them
        module._flat_weights[module._flat_weights_names.index(name)] = weight


def _swap_buffer(module: torch.nn.Module, name: str, buffer: torch.Tensor, half: torch.Tensor) -> Undo:
    module._buffers[name] = half
    version = half._version

    def put_back() -> None:
        now = module._buffers.get(name)
        if now is half:
            module._buffers[name] = buffer
            if half._version != version:
                with torch.no_grad():
                    buffer.copy_(half)
        elif now is not None and now.dtype is half.dtype:  # the forward pass put another tensor there
            module._buffers[name] = now.to(buffer.dtype)

    return put_back


def convert(module: torch.nn.Module, dtype: torch.dtype, float32_norms: bool) -> int:
    """Turn the float32 weights and buffers themselves into half, as `module.half()` does: the Parameter objects stay. How many were.

    Raises nothing; look at `memfit.techniques.precision.leaves.find_flat` before, for weights that live in a flat buffer.
    """
    num_converted = 0
    for each in module.modules():
        if float32_norms and isinstance(each, _NORMS):
            continue
        for weight in each._parameters.values():
            if weight is not None and weight.dtype is torch.float32:
                weight.data = weight.data.to(dtype)
                weight.grad = None
                num_converted += 1
        for name, buffer in each._buffers.items():
            if buffer is not None and buffer.dtype is torch.float32:
                each._buffers[name] = buffer.to(dtype)
                num_converted += 1
        if isinstance(each, torch.nn.RNNBase):
            each.flatten_parameters()
    return num_converted
