"""How many bytes an operation is going to allocate, asked before it runs.

Results: the same operator on the meta device, which has no data. What a convolution needs beside them (it brings arguments and
results into a layout of its own) depends on kernels nobody can ask: the same operator is run on small parts of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

_SMALLEST_PROBE = 16  # below that many samples other kernels are chosen
_BLOCK = 16  # oneDNN's layouts pad channels to multiples of this
_COPIES_FIRST = ("native_batch_norm_backward",)
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
_LARGEST_PACKING = (
    3 << 19
)  # bytes; oneDNN packs blocks of a half-precision product's arguments: 1.33 MiB the most seen, torch 2.13

Probe = Callable[[Callable[[], Any]], "int | None"]
"""Runs something and tells the highest bytes it allocated at a time; None where that cannot be seen."""


def convolution_bytes_needed(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    probe: Probe,
    make_room: Callable[[int], None] = lambda num_bytes: None,
) -> int:
    """Bytes a convolution (or its backward) takes at its worst moment: measured on a 12th and a 6th of the batch and drawn out to the
    whole, which is exact as long as the same kernel serves all three. A batch too small for that gets an upper bound.

    make_room: told how many bytes the measuring itself may take.
    """
    batched = [index for index in range(2 if "backward" in str(func) else 1) if args[index].dim() > 2]
    num_samples = args[batched[0]].shape[0] if batched else 0
    few = num_samples // 12
    results = bytes_needed(func, args, kwargs)
    if few < _SMALLEST_PROBE:
        inputs = [_padded_bytes(args[index]) for index in batched]
        return 2 * results + sum(inputs) + max(inputs, default=0) // 3
    make_room((2 * results + sum(_padded_bytes(args[index]) for index in batched)) // 4)
    needed = []
    for count in (few, 2 * few):
        part = tuple(_part(arg, count) if index in batched else arg for index, arg in enumerate(args))
        with _disable_current_modes(), torch.no_grad():
            found = probe(lambda part=part: func(*part, **kwargs))  # type: ignore[misc]
        if found is None:
            return 2 * results + sum(_padded_bytes(args[index]) for index in batched)
        needed.append(found)
    return max(needed[0] + (needed[1] - needed[0]) * (num_samples - few) // few, results)


def _part(tensor: torch.Tensor, num_samples: int) -> torch.Tensor:
    """Zeros like the first samples, in the same memory format."""
    return torch.zeros_like(tensor[:num_samples])


def _padded_bytes(tensor: torch.Tensor) -> int:
    channels = -(-tensor.shape[1] // _BLOCK) * _BLOCK
    return channels * prod(tensor.shape) // max(tensor.shape[1], 1) * tensor.element_size()


def copied_bytes(func: Callable[..., Any], args: tuple[Any, ...]) -> int:
    """What an operator takes at most for arguments that it brings into another's layout: a batch norm's backward its gradient."""
    return args[0].nbytes if str(func).split(".")[1] in _COPIES_FIRST else 0


def packing_bytes(func: Callable[..., Any], args: tuple[Any, ...]) -> int:
    """What a product in half precision may take beside its result on a CPU, at most; 0 for any other operator."""
    tensors = [each for each in args if isinstance(each, torch.Tensor)]
    is_half = bool(tensors) and all(each.dtype in (torch.bfloat16, torch.float16) for each in tensors)
    if not is_half or tensors[0].device.type != "cpu" or str(func).split(".")[1] not in _PRODUCTS:
        return 0
    return min(sum(each.nbytes for each in tensors), _LARGEST_PACKING)


def bytes_needed(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Bytes of the operator's results, views and in-place results not counted; the largest input where meta cannot tell."""
    storages: dict[int, torch.Tensor] = {}
    largest = 0

    def to_meta(value: Any) -> Any:
        nonlocal largest
        if isinstance(value, torch.Tensor):
            largest = max(largest, value.untyped_storage().nbytes() if value.layout is torch.strided else 0)
            storage = value.untyped_storage()
            base = storages.get(storage._cdata)
            if base is None:
                base = storages[storage._cdata] = torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta")
            shell = torch.empty(0, dtype=value.dtype, device="meta")
            return shell.set_(base.untyped_storage(), value.storage_offset(), value.size(), value.stride())
        if isinstance(value, (list, tuple)):
            return type(value)(to_meta(each) for each in value) if type(value) in (list, tuple) else value
        if isinstance(value, torch.device):
            return torch.device("meta")
        return value

    with _disable_current_modes(), torch.no_grad():
        try:
            meta_args = to_meta(args)
            meta_kwargs = {key: to_meta(value) for key, value in kwargs.items() if key != "generator"}
            result = func(*meta_args, **meta_kwargs)
        except Exception:  # an operator without a meta kernel, or one whose shape depends on data: there is no answer
            return largest
    known = {base.untyped_storage()._cdata for base in storages.values()}
    total = 0
    for tensor in result if isinstance(result, (list, tuple)) else (result,):
        if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in known:
            known.add(tensor.untyped_storage()._cdata)
            total += tensor.untyped_storage().nbytes()
    return total
