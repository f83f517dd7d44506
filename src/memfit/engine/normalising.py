"""Normalising: what a batch norm does to its input once the statistics of the batch are known, bit for bit.

Taking mean and variance is most of a batch norm's time on a CPU, and autograd saves both: C numbers each. With them the output is
one multiplication and addition an element. Measured for 192 x 32 x 32 x 32 float32 on one thread (torch 2.13 CPU): batch norm
9.6 ms, normalising 1.2 ms, a ReLU 0.9 ms; for 192 x 128 x 8 x 8 2.2, 0.2 and 0.1 ms.

The kernel multiplies by `invstd * weight` and adds `bias - mean * (invstd * weight)`, in training and in evaluation alike
(ATen/native/cpu/batch_norm_kernel.cpp), so a batch norm in evaluation mode with that product as weight and a variance of one
does the same. It has another formula for inputs that are neither contiguous nor channels-last: those are left out.
"""

from __future__ import annotations

import torch

SHARE_OF_CALL = 0.12  # seconds of normalising in those of the whole call
_WORKSPACES = 4  # as many numbers a channel: the variance, the product, and the kernel's two terms


def can_normalise(
    tensor: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, mean: torch.Tensor, invstd: torch.Tensor
) -> bool:
    """Whether `normalise` gives the bits of the call that had these arguments and saved these statistics."""
    parameters = [each for each in (weight, bias) if each is not None]
    is_dense = (
        tensor.is_contiguous()
        or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))
        or (tensor.dim() == 5 and tensor.is_contiguous(memory_format=torch.channels_last_3d))
    )
    return (
        tensor.device.type == "cpu"
        and is_dense
        and mean.dtype in (torch.float32, torch.float64)
        and mean.shape == invstd.shape == tensor.shape[1:2]
        and all(each.dtype == mean.dtype and each.is_contiguous() for each in [*parameters, mean, invstd])
    )


def normalise(
    tensor: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, mean: torch.Tensor, invstd: torch.Tensor
) -> torch.Tensor:
    """The result of batch norm in training: tensor (N, C, ...), weight, bias, mean and invstd (C)."""
    scale = invstd if weight is None else invstd * weight
    return torch.batch_norm(tensor, scale, bias, mean, torch.ones_like(mean), False, 0.0, 0.0, False)


def workspace_bytes(invstd_bytes: int) -> int:
    """What `normalise` takes beside arguments and result."""
    return _WORKSPACES * invstd_bytes
