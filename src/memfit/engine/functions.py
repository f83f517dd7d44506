"""What the tape needs to know about a tensor function before it runs: does it only look, write in place, draw at random?

Everything is derived from the function's name and the operator registry's own tags; an unknown function is treated as the
worst case (it may write, it may draw).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

# Calls that make no new content and save no tensor for backward: attribute reads, shape queries, pure views.
_LOOKING = frozenset(
    [
        "size",
        "dim",
        "ndimension",
        "stride",
        "storage_offset",
        "numel",
        "nelement",
        "element_size",
        "is_contiguous",
        "is_floating_point",
        "is_complex",
        "is_signed",
        "is_inference",
        "is_shared",
        "is_pinned",
        "data_ptr",
        "untyped_storage",
        "storage",
        "get_device",
        "type_as_tuple",
        "item",
        "tolist",
        "numpy",
        "__len__",
        "__hash__",
        "__repr__",
        "__str__",
        "__format__",
        "__bool__",
        "__int__",
        "__float__",
        "__index__",
        "__contains__",
        "__iter__",
        "__deepcopy__",
        "__reduce_ex__",
        "__setstate__",
        "__dir__",
        "__dlpack__",
        "__dlpack_device__",
        "__array__",
        "__cuda_array_interface__",
        "backward",
        "grad",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "retain_grad",
        "requires_grad_",
        "is_same_size",
        "is_nonzero",
        "has_names",
        "share_memory_",
        "pin_memory",
        "record_stream",
        "module_load",
        "equal",
        "is_tensor",
        "is_storage",
        "is_floating_point",
        "view",
        "transpose",
        "permute",
        "expand",
        "expand_as",
        "view_as",
        "unsqueeze",
        "squeeze",
        "select",
        "narrow",
        "split",
        "split_with_sizes",
        "chunk",
        "unbind",
        "t",
        "as_strided",
        "movedim",
        "moveaxis",
        "swapaxes",
        "swapdims",
        "diagonal",
        "unfold",
        "detach",
        "alias",
        "unflatten",
        "tensor_split",
        "hsplit",
        "vsplit",
        "dsplit",
        "result_type",
        "can_cast",
        "promote_types",
        "broadcast_shapes",
        "is_grad_enabled",
        "get_default_dtype",
    ]
)
_FOREIGN = frozenset(  # random draws from a generator of the caller's, or effects outside the tensors
    ["set_", "resize_", "resize_as_", "apply_", "map_", "map2_", "put_", "swap_tensors"]
)
# Not reproducible bit for bit on CUDA (torch.use_deterministic_algorithms documents the list): never replayed there.
_NONDETERMINISTIC_ON_CUDA = frozenset(
    [
        "scatter_add",
        "scatter_add_",
        "index_add",
        "index_add_",
        "index_put",
        "index_put_",
        "scatter_reduce",
        "scatter_reduce_",
        "put_",
        "bincount",
        "histc",
        "kthvalue",
        "median",
        "cumsum",
        "index_copy",
        "index_copy_",
        "scatter",
        "scatter_",
        "grid_sample",
        "ctc_loss",
        "embedding_bag",
    ]
)
# Names of torch.nn.functional that are no operator names, cleared of randomness by reading their source (torch 2.13).
_NOT_RANDOM = frozenset(
    [
        "cross_entropy",
        "nll_loss",
        "binary_cross_entropy",
        "smooth_l1_loss",
        "l1_loss",
        "mse_loss",
        "kl_div",
        "normalize",
        "interpolate",
        "upsample",
        "one_hot",
        "pad",
        "adaptive_avg_pool2d",
        "adaptive_max_pool2d",
        "max_pool1d",
        "max_pool2d",
        "max_pool3d",
        "avg_pool1d",
        "batch_norm",
        "layer_norm",
        "group_norm",
        "instance_norm",
        "rms_norm",
        "softmax",
        "log_softmax",
        "softmin",
        "relu",
        "relu6",
        "elu",
        "selu",
        "celu",
        "leaky_relu",
        "silu",
        "mish",
        "gelu",
        "glu",
        "hardtanh",
        "hardswish",
        "hardsigmoid",
        "softplus",
        "softsign",
        "tanhshrink",
        "tanh",
        "sigmoid",
        "logsigmoid",
        "threshold",
        "prelu",
        "embedding",
        "linear",
        "__add__",
        "__radd__",
        "__iadd__",
        "__sub__",
        "__rsub__",
        "__isub__",
        "__mul__",
        "__rmul__",
        "__imul__",
        "__truediv__",
        "__rtruediv__",
        "__itruediv__",
        "__rdiv__",
        "__div__",
        "__pow__",
        "__rpow__",
        "__neg__",
        "__matmul__",
        "__rmatmul__",
        "__getitem__",
        "__setitem__",
        "__abs__",
        "__and__",
        "__or__",
        "__xor__",
        "__invert__",
        "__eq__",
        "__ne__",
        "__lt__",
        "__le__",
        "__gt__",
        "__ge__",
        "__mod__",
        "__floordiv__",
        "einsum",
        "stack",
        "cat",
        "concat",
        "split",
        "norm",
        "meshgrid",
        "tensordot",
        "cosine_similarity",
        "pairwise_distance",
    ]
)
# Functions that write running statistics without moving the tensors' versions (torch 2.13: `_version` stays 0): where the two
# statistics stand among the arguments, and where the flag that says whether they are written or read.
_STATISTICS: dict[Callable[..., Any], tuple[tuple[int, str], tuple[int, str], tuple[int, str]]] = {
    torch.nn.functional.batch_norm: ((1, "running_mean"), (2, "running_var"), (5, "training")),
    torch.nn.functional.instance_norm: ((1, "running_mean"), (2, "running_var"), (5, "use_input_stats")),
    torch.batch_norm: ((3, "running_mean"), (4, "running_var"), (5, "training")),
    torch.native_batch_norm: ((3, "running_mean"), (4, "running_var"), (5, "training")),
    torch.instance_norm: ((3, "running_mean"), (4, "running_var"), (5, "use_input_stats")),
}
READS_ATTENTION_FLAGS = frozenset({"scaled_dot_product_attention", "multi_head_attention_forward"})


@cache
def name_of(func: Callable[..., Any]) -> str:
    """The function's own name: 'linear', '__mul__', 'relu_'."""
    return getattr(func, "__name__", None) or type(func).__name__


@cache
def is_looking(func: Callable[..., Any]) -> bool:
    """Whether the call makes no new content and saves nothing for backward."""
    name = name_of(func)
    return name in ("__get__", "__set__", "__delete__") or name in _LOOKING


@cache
def is_writing(func: Callable[..., Any]) -> bool:
    """Whether the name says that the call overwrites its first argument (or, for fused and foreach, its lists)."""
    name = name_of(func)
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__invert__", "__index__", "__int__"))
    return name.endswith("_")


LOOKING, WRITING, MAY_WRITE, LETTING_OUT, PLAIN = "looking", "writing", "may write", "letting out", "plain"

# These hand the tensor's memory to others, who may write there without a trace.
_LETTING_OUT = frozenset(["numpy", "__array__", "__dlpack__", "share_memory_"])


@cache
def kind_of(func: Callable[..., Any]) -> str:
    """LOOKING, LETTING_OUT, WRITING (by its name), MAY_WRITE (it has a flag `inplace`, or is no function of a tensor's content), or PLAIN."""
    if func is torch.Tensor.backward or func is torch.autograd.backward:  # hooks in it may write
        return MAY_WRITE
    if name_of(func) in _LETTING_OUT:
        return LETTING_OUT
    if is_looking(func):
        return LOOKING
    if is_writing(func):
        return WRITING
    return MAY_WRITE if inplace_position(func) is not None or func in _STATISTICS else PLAIN


@cache
def inplace_position(func: Callable[..., Any]) -> int | None:
    """Where the flag `inplace` stands among the arguments of a function of torch.nn.functional."""
    try:
        names = list(inspect.signature(func).parameters)
    except (TypeError, ValueError):  # a builtin: what it does is in its name
        return None
    return names.index("inplace") if "inplace" in names else None


def may_write(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call may overwrite one of its arguments, statistics aside."""
    if kind_of(func) is WRITING or "out" in kwargs or kwargs.get("inplace"):
        return True
    position = inplace_position(func)
    return position is not None and position < len(args) and bool(args[position])


@cache
def writes_first_only(func: Callable[..., Any]) -> bool:
    """Whether a call that writes in place overwrites no argument but its first: so every method of a tensor, and its namesakes."""
    return hasattr(torch.Tensor, name_of(func)) or inplace_position(func) is not None


@cache
def is_foreign(func: Callable[..., Any]) -> bool:
    """Whether the call does what no replay can do again: it changes a storage's size or runs a Python callback."""
    return name_of(func) in _FOREIGN


@cache
def may_draw(func: Callable[..., Any]) -> bool:
    """Whether the call may move a random generator. Unknown functions may."""
    name = name_of(func)
    if name in _NOT_RANDOM:
        return False
    packet = getattr(torch.ops.aten, name, None)
    if packet is None and name.startswith("__") and name.endswith("__"):
        packet = getattr(torch.ops.aten, name.strip("_"), None)
    overloads = getattr(packet, "overloads", None)
    if overloads is None:  # none of this name, or an attribute that every object has
        return True
    tag = torch.Tag.nondeterministic_seeded
    return any(tag in getattr(packet, overload).tags for overload in overloads())


@cache
def is_reproducible_on_cuda(func: Callable[..., Any]) -> bool:
    """Whether the CUDA kernels of this name give the same bits each time."""
    return name_of(func) not in _NONDETERMINISTIC_ON_CUDA


def has_statistics(func: Callable[..., Any]) -> bool:
    """Whether the call may overwrite running statistics."""
    return func in _STATISTICS


def written_statistics(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """The running statistics this call overwrites and does not read: batch and instance norm in training."""
    positions = _STATISTICS.get(func)
    if positions is None:
        return ()
    mean, variance, flag = (args[index] if index < len(args) else kwargs.get(name) for index, name in positions)
    if flag is None:
        flag = func is torch.nn.functional.instance_norm  # the only one whose default is to use the batch's own
    return tuple(each for each in (mean, variance) if each is not None) if flag else ()


@cache
def writes_lists(func: Callable[..., Any]) -> bool:
    """Whether the call overwrites lists of tensors: in-place foreach and fused functions."""
    name = name_of(func)
    return name.startswith(("_foreach_", "_fused_")) and name.endswith("_")


def written_lists(func: Callable[..., Any], args: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    """What an in-place foreach or fused call overwrites: under a dispatch mode these do not move the tensors' versions."""
    if not writes_lists(func):
        return ()
    lists = args if name_of(func).startswith("_fused_") else args[:1]
    return tuple(t for each in lists if isinstance(each, (list, tuple)) for t in each if isinstance(t, torch.Tensor))


# What these save inside are their arguments brought into form, before any multiplication. (`rrelu` saves noise before it draws it.)
SAVES_BEFORE_WORK = frozenset(
    ["matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm", "linear", "bilinear", "einsum", "tensordot"]
)


def is_dropout(func: Callable[..., Any]) -> bool:
    """Whether the call multiplies its argument by noise of the same shape, zeros and 1 / (1 - p), where it runs on a CPU."""
    return func is torch.nn.functional.dropout or func is torch.dropout


def is_batch_norm(func: Callable[..., Any]) -> bool:
    """Whether the call may be a batch norm whose output follows from its input, weight, bias and what it saves of the statistics."""
    return func is torch.nn.functional.batch_norm or func is torch.batch_norm


def batch_norm_arguments(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Input, weight and bias of a call of such a function; None for what it has not."""
    first = 3 if func is torch.nn.functional.batch_norm else 1
    named = ((0, "input"), (first, "weight"), (first + 1, "bias"))
    tensor, weight, bias = (args[index] if index < len(args) else kwargs.get(name) for index, name in named)
    return tensor, weight, bias


def dropout_probability(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float:
    """The p of a call of such a function."""
    return float(args[1] if len(args) > 1 else kwargs.get("p", 0.5))


def saves_statistics(func: Callable[..., Any]) -> bool:
    """Whether the call also saves copies of the statistics it overwrites (instance norm), so that it cannot be had again."""
    return "instance_norm" in name_of(func)
