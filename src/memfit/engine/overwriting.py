"""Overwriting: which calls may write their result over their input, and whether this one may, now.

Whether a function's in-place form gives the same bits was measured over the whole family (tests/techniques/test_inplace.py; the
reasons stand in PyTorch's tools/autograd/derivatives.yaml). Three kinds:

* same bits. Backward reads the result (relu, sigmoid, exp) or nothing of the input (add, dropout, a product with what needs no
  gradient). leaky_relu with a positive slope as well: out of place it saves its input, in place its result, whose signs are the same.
* equal to rounding: elu, selu and celu in place compute the gradient from the result, in other operations. Never done.
* copied: hardtanh, relu6, silu, mish, hardswish, hardsigmoid and threshold in place save a *copy* of their input. Nothing is won.

On a card nothing is overwritten so far: work on other streams may still read what no reference leads to any more, and dropout draws
other numbers in place there.

Cost of the whole check: 10-20 us a call, for calls that a plan names only.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from memfit.core.inplace import COPIED, ROUNDED, SAFE
from memfit.engine import functions
from memfit.engine.cell import Cell
from memfit.engine.filing import is_plain
from memfit.engine.frames import find_reader
from memfit.engine.private import base_of, is_hooked, num_holders, use_count

Form = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]  # a function and its arguments

_ALONE = frozenset(["relu", "sigmoid", "tanh", "exp", "exp2", "expm1", "sqrt", "rsqrt", "reciprocal", "neg", "leaky_relu"])
_WITH_OTHER = frozenset(["add", "sub", "mul", "div", "true_divide", "masked_fill"])
_FLOAT32_UNDER_AUTOCAST = frozenset(["exp", "exp2", "expm1", "sqrt", "rsqrt", "reciprocal"])  # on some device; in place never
_RANDOM = frozenset(["dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d"])
_ROUNDED = frozenset(["elu", "selu", "celu"])
_COPIED = frozenset(["relu6", "hardtanh", "silu", "mish", "hardswish", "hardsigmoid", "threshold", "_threshold", "clamp"])
_KNOWN = _ALONE | _WITH_OTHER | _RANDOM | _ROUNDED | _COPIED


def in_place_form(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Form | None:
    """The same call, its result written over its first argument. None where there is none, or where it is that already."""
    name = functions.name_of(func)
    if name not in _KNOWN or not args or type(args[0]) is not torch.Tensor or functions.may_write(func, args, kwargs):
        return None
    position = functions.inplace_position(func)
    if position is not None:
        return (func, args, {**kwargs, "inplace": True}) if position >= len(args) else None
    form = getattr(torch.Tensor, f"{name}_", None) or getattr(torch, f"{name}_", None)
    return (form, args, kwargs) if form is not None else None


def why_not(form: Form, cell: Cell | None, caller: FrameType | None) -> str:
    """SAFE where this call, which has an in-place form and is about to run, may take it now; else why not, in words.

    form: the call as it is written. cell: of the argument's storage, if the tape knows it. caller: the frame that called
    the function mode.
    """
    func, args, kwargs = form
    name = functions.name_of(func)
    if name in _ROUNDED:
        return ROUNDED
    if name in _COPIED:
        return COPIED
    return (
        _about_arguments(name, args, kwargs)
        or _about_tensor(args[0])
        or _about_holders(args[0], cell)
        or ((reader := find_reader(args, caller, func)) and f"{reader} may read it again")
        or SAFE
    )


def _about_arguments(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Whether result and gradient are what they are out of place, as far as the other arguments decide it."""
    x = args[0]
    rest = (*args[1:], *kwargs.values())
    if name == "leaky_relu":
        slope = args[1] if len(args) > 1 else kwargs.get("negative_slope", 0.01)
        return "" if slope > 0 else "its slope is not positive, so its gradient cannot be had from the result"
    if name in _FLOAT32_UNDER_AUTOCAST and torch.is_autocast_enabled(x.device.type):
        return "autocast may give its result another type"
    if kwargs.get("rounding_mode") is not None:
        return "its result has no gradient"
    for other in rest:
        if isinstance(other, complex) or (isinstance(other, torch.Tensor) and not is_plain(other)):
            return "its other argument is of a kind of its own"
        if not isinstance(other, torch.Tensor):
            continue
        if other.requires_grad and name not in ("add", "sub"):
            return "the gradient of its other argument reads the input"
        if other.untyped_storage()._cdata == x.untyped_storage()._cdata:
            return "its other argument lies on the same storage"
        if torch.result_type(x, other) != x.dtype:
            return f"its result is of another type than {x.dtype}"
        if torch.broadcast_shapes(x.shape, other.shape) != x.shape:
            return "its result is larger than its input"
        if not (other.stride() == x.stride() and other.shape == x.shape) and not (x.is_contiguous() and other.is_contiguous()):
            return "its result would be laid out in another way"
    return ""


def _about_tensor(x: torch.Tensor) -> str:
    """Whether the tensor may be overwritten at all."""
    if not is_plain(x):
        return "its input is a tensor of a kind of its own"
    if x.device.type != "cpu":
        return "on a device another stream may still read its input"
    if x.grad_fn is None:
        return "its input is a leaf" if x.requires_grad else "its input has no gradient"
    if base_of(x) is not None:
        return "its input is a view"
    if x.numel() * x.itemsize != x.untyped_storage().nbytes():
        return "its input is not the whole of its storage"
    if not x.untyped_storage().resizable():  # a result of the program's own autograd.Function
        return "the memory of its input is not PyTorch's own (NumPy's, or shared)"
    if is_hooked(x) or vars(x) or weakref.getweakrefcount(x):
        return "somebody watches its input (a hook on it, an attribute, a weak reference)"
    return ""


def _about_holders(x: torch.Tensor, cell: Cell | None) -> str:
    """Whether a view, a saved tensor or a recipe needs the content. References to the tensor itself are `find_reader`'s matter."""
    if cell is not None and any(ref() is not None for ref in (*cell.handles, *cell.pending)):
        return "autograd saved its input for backward"
    storage = x.untyped_storage()
    if num_holders(storage) != 1 or use_count(x) != 1:
        return "a view of its input lives, or autograd saved it for backward"
    if sys.getrefcount(storage) != _STORAGE_ALONE:
        return "the program holds the storage of its input"
    if cell is not None and (cell.storage is not None or cell.need or cell.exposed):
        return "a recipe reads its input"
    return ""


def _count_storage_alone() -> int:
    tensor = torch.empty(1)
    storage = tensor.untyped_storage()
    return sys.getrefcount(storage)


_STORAGE_ALONE = _count_storage_alone()
