"""How many bytes an operation is going to allocate, asked before it runs: the same operator on the meta device, which has no data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes


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
