"""`apex.parallel`: PyTorch's DistributedDataParallel and SyncBatchNorm, which apex's became."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import SyncBatchNorm

__all__ = ["DistributedDataParallel", "SyncBatchNorm", "convert_syncbn_model"]


def DistributedDataParallel(module: torch.nn.Module, *_: Any, **__: Any) -> torch.nn.Module:  # noqa: N802
    """torch.nn.parallel.DistributedDataParallel. apex's other arguments say when gradients travel, not what they are, and are ignored."""
    return torch.nn.parallel.DistributedDataParallel(module)


def convert_syncbn_model(module: torch.nn.Module, process_group: Any = None, channel_last: bool = False) -> torch.nn.Module:
    """torch.nn.SyncBatchNorm.convert_sync_batchnorm."""
    return SyncBatchNorm.convert_sync_batchnorm(module, process_group)
