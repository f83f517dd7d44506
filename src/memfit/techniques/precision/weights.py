"""Weights a level can take, and those it cannot, in whole sentences."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from memfit.core.errors import PrecisionError
from memfit.core.precision import Level
from memfit.techniques.precision.casting import convert
from memfit.techniques.precision.leaves import find_flat

_HALVES = {torch.float16, torch.bfloat16}


def name_halves(tensors: Iterable[torch.Tensor]) -> str:
    """Which half precision all floating-point tensors have, like 'bfloat16'; '' if one of them has another, or there is none."""
    dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    return " and ".join(sorted(str(each).removeprefix("torch.") for each in dtypes)) if dtypes and dtypes <= _HALVES else ""


def check_optimizer(optimizer: torch.optim.Optimizer, level: Level) -> None:
    """Raise PrecisionError if the level makes float32 masters and the optimizer was built on half parameters."""
    halves = name_halves(p for group in optimizer.param_groups for p in group["params"])
    if level.half_weights and level.masters and halves:
        raise PrecisionError(
            f"{level.name} keeps float32 master weights, but this {type(optimizer).__name__} was built on parameters that are {halves} already: the digits that "
            "master weights are for are gone. Leave out .half() or .bfloat16() and build the model in float32; O3 trains half weights as they are."
        )


def check_weights(module: torch.nn.Module, level: Level) -> None:
    """Raise PrecisionError for weights a level cannot take: complex ones, and for half weights integers."""
    for name, weight in module.named_parameters():
        if weight.is_complex():
            raise PrecisionError(
                f"{level.name} cannot train {type(module).__name__}: its parameter {name} is complex ({weight.dtype}), and there is no half "
                "precision of complex numbers for autocast or loss scaling. Use O0, or keep real and imaginary parts apart (torch.view_as_real)."
            )
        if level.half_weights and not weight.is_floating_point():
            raise PrecisionError(
                f"{level.name} casts weights to half, but the parameter {name} of {type(module).__name__} holds integers ({weight.dtype}), which "
                "half precision would round. Make it a buffer if it is not trained, or use O1, which leaves weights as they are."
            )


def turn_half(module: torch.nn.Module, half: torch.dtype, level: Level) -> None:
    """Cast the weights themselves, for a level without masters. Raises PrecisionError where they lie in a flat buffer."""
    flat = find_flat(module)
    if flat is not None:
        raise PrecisionError(
            f"{level.name} without master weights would give the parameter {flat} storage of its own in {half}, but it lies in a larger buffer, as flat "
            "parameter buffers (contiguous_params) make them: an optimizer that holds the buffer would update what the model no longer reads. "
            "Use O1 or O2, which leave the weights where they are, or leave the flat buffer out."
        )
    convert(module, half, level.float32_norms)
