"""What a training step holds whatever is evicted: parameters, buffers, gradients, optimizer state. And what of it can be refused beforehand.

Optimizer state is counted before it exists, by the class of the optimizer; a class not in the table counts as stateless, and what it makes
shows in the first measured step.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from memfit.core.errors import BudgetError, PlanError, UnsupportedError
from memfit.core.sizes import format_size
from memfit.runtime.optimizers import Optimizers

_STATE_SLOTS = {"Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "Adadelta": 2, "Adagrad": 1, "RMSprop": 1}


class Holdings:
    """Of one program. model: None where it is not known; then everything is had from the optimizers."""

    def __init__(self, model: torch.nn.Module | None, optimizers: Optimizers) -> None:
        self._model = model
        self._optimizers = optimizers

    def parameters(self) -> Iterable[torch.Tensor]:
        """Each once: the model's, and what the optimizers update."""
        seen: dict[int, torch.Tensor] = {}
        if self._model is not None:
            seen.update((id(p), p) for p in self._model.parameters())
        for optimizer in self._optimizers:
            seen.update((id(p), p) for p in _held(optimizer))
        return seen.values()

    def gradients(self) -> list[torch.Tensor]:
        """Those that exist."""
        return [p.grad for p in self.parameters() if p.grad is not None]

    def buffers(self) -> Iterable[torch.Tensor]:
        """Those of the model; where it is not known, of every module there is."""
        if self._model is not None:
            return self._model.buffers()
        modules = [each for each in gc.get_objects() if issubclass(type(each), torch.nn.Module)]
        return [b for m in modules for b in vars(m).get("_buffers", {}).values() if isinstance(b, torch.Tensor)]

    def state(self) -> Iterator[torch.Tensor]:
        """The optimizer state that exists."""
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                for value in state.values() if isinstance(state, dict) else ():
                    if isinstance(value, torch.Tensor):
                        yield value

    def missing_state_bytes(self) -> int:
        """What the optimizers' state will take on top of what exists; 0 where all of it is there."""
        return max(sum(map(_expected_state_bytes, self._optimizers)) - sum(t.nbytes for t in self.state()), 0)

    def fixed_bytes(self, only: Optimizer | None = None) -> int:
        """Parameters, buffers, gradients and optimizer state, the last counted before it exists; of one optimizer, or of all."""
        if only is not None and self._model is None:
            return sum(p.nbytes + (p.nbytes if p.requires_grad else 0) for p in _held(only)) + _expected_state_bytes(only)
        parameters = list(self.parameters())
        own = sum(p.nbytes for p in parameters) + sum(p.nbytes for p in parameters if p.requires_grad)
        buffers = sum(b.nbytes for b in self._model.buffers()) if self._model is not None else 0
        return own + buffers + self.missing_state_bytes() + sum(t.nbytes for t in self.state())

    def check_fixed_bytes(self, budget_bytes: int | None, only: Optimizer | None = None) -> None:
        """Raise BudgetError where what is held alone is more than the budget (None: there is none)."""
        fixed = self.fixed_bytes(only)
        if budget_bytes is not None and fixed > budget_bytes:
            parameters = sum(p.nbytes for p in (_held(only) if only is not None else self.parameters()))
            raise BudgetError(
                f"{format_size(budget_bytes)} is too small: parameters ({format_size(parameters)}), their gradients and "
                f"the optimizer's state hold {format_size(fixed)} for the whole step, before any activation. A smaller model, "
                "SGD without momentum, or fewer trainable parameters would help; recomputing activations cannot.",
                needed_bytes=fixed,
            )


def signature_of(optimizers: Iterable[Optimizer]) -> str:
    """Which program this is, as far as the shapes of what its optimizers train tell; the same for `run`, `trace` and `fit`."""

    def digest(optimizer: Optimizer) -> str:
        trained = {id(p): p for p in _held(optimizer) if p.requires_grad}
        shapes = sorted(f"{tuple(p.shape)}{p.dtype}" for p in trained.values())
        return hashlib.sha256(";".join(shapes).encode()).hexdigest()[:16]

    return "+".join(sorted({digest(each) for each in optimizers}))


def check_signature(wanted: str, optimizer: Optimizer) -> None:
    """Raise PlanError if a plan with this signature is for other parameters than the optimizer's; '' fits all."""
    if wanted and signature_of([optimizer]) not in wanted.split("+"):
        raise PlanError(
            f"The plan was made for another model: the parameters in this {type(optimizer).__name__} ({sum(p.numel() for p in _held(optimizer)):,} "
            "numbers) have other shapes than those it was made for. No parameter was changed. Leave out the plan, or make one with "
            "`memfit trace` and `memfit plan` for this script and these arguments."
        )


def device_of(model: torch.nn.Module | None, optimizer: Optimizer | None) -> torch.device:
    """The device of the parameters. Raises UnsupportedError where there are several."""
    parameters = [*(model.parameters() if model is not None else ()), *(_held(optimizer) if optimizer is not None else ())]
    devices = {p.device for p in parameters}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise UnsupportedError(
            f"The model lies on several devices ({names}); memfit plans for one device and would have to guess the others' "
            "budgets. Put the whole model on one device, or wrap the part that needs the memory."
        )
    return devices.pop() if devices else torch.device("cuda" if torch.cuda.is_available() else "cpu")


def check_parallel(model: torch.nn.Module | None) -> None:
    """Raise UnsupportedError for DataParallel on several devices."""
    for module in model.modules() if model is not None else ():
        if isinstance(module, torch.nn.DataParallel) and len(module.device_ids) > 1:
            raise UnsupportedError(
                "The model uses DataParallel, which runs forward in threads of its own where memfit cannot see it. "
                "Use DistributedDataParallel, or a single device."
            )


def _held(optimizer: Optimizer) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _expected_state_bytes(optimizer: Optimizer) -> int:
    """What the optimizer's state will hold once it has stepped."""
    slots = _STATE_SLOTS.get(type(optimizer).__name__, 0)
    total = 0
    for group in optimizer.param_groups:
        extra = slots + (1 if group.get("amsgrad") else 0) + (1 if slots == 0 and group.get("momentum") else 0)
        total += sum(extra * p.nbytes for p in group["params"] if p.requires_grad)
    return total
