"""`apex.optimizers`: PyTorch's own, where they compute the same; a sentence where there is none.

apex's are one fused kernel each; PyTorch's have `fused=True` for that, which is left to the program since its last bits differ.
"""

from __future__ import annotations

from typing import Any

import torch

from memfit.core.errors import PrecisionError

__all__ = ["FusedAdagrad", "FusedAdam", "FusedLAMB", "FusedNovoGrad", "FusedSGD"]


def FusedAdam(  # noqa: N802
    params: Any,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    adam_w_mode: bool = True,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    set_grad_none: bool = True,
) -> torch.optim.Optimizer:
    """torch.optim.AdamW, or Adam with adam_w_mode=False."""
    if not bias_correction or amsgrad:
        raise PrecisionError(
            "FusedAdam without bias correction, or with amsgrad, is in no optimizer of PyTorch's under that name. Use torch.optim.AdamW."
        )
    kind = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    return kind(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


def FusedSGD(  # noqa: N802
    params: Any, lr: float, momentum: float = 0.0, dampening: float = 0.0, weight_decay: float = 0.0, nesterov: bool = False
) -> torch.optim.Optimizer:
    """torch.optim.SGD."""
    return torch.optim.SGD(params, lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov)


def FusedAdagrad(params: Any, lr: float = 1e-2, eps: float = 1e-10, weight_decay: float = 0.0) -> torch.optim.Optimizer:  # noqa: N802
    """torch.optim.Adagrad."""
    return torch.optim.Adagrad(params, lr=lr, eps=eps, weight_decay=weight_decay)


def FusedLAMB(*_: Any, **__: Any) -> None:  # noqa: N802
    """Refused."""
    raise PrecisionError(
        "PyTorch has no LAMB, so memfit cannot stand in for apex.optimizers.FusedLAMB. Install apex, or use torch.optim.AdamW."
    )


def FusedNovoGrad(*_: Any, **__: Any) -> None:  # noqa: N802
    """Refused."""
    raise PrecisionError(
        "PyTorch has no NovoGrad, so memfit cannot stand in for apex.optimizers.FusedNovoGrad. Install apex, or use torch.optim.AdamW."
    )
