"""Training runs compared bit for bit: the plain, unmodified run is the oracle for the same run on a tape that evicts.

A program is a function without arguments that makes a Run. `evicted` runs it on a tape that lets saved tensors go:
'now' (at once), 'late' (all, when backward is called), 'half' (a random half at once; half of what calls make is transient),
'mid' (at random moments, also inside calls, as the guard does). Everything is compared: loss, parameters, every gradient, buffers, optimizer state,
random state.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.engine import functions
from memfit.engine.cell import Call, Handle
from memfit.engine.tape import Tape

HOWS = ("now", "late", "half", "mid")


@dataclass
class Run:
    """step(number) does forward, backward and optimizer step, and returns the loss."""

    step: Callable[[int], torch.Tensor]
    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    extra: Callable[[], dict[str, Any]] = field(default=dict)


Program = Callable[[], Run]


class EvictingTape(Tape):
    """Evicts what autograd saves. `evict` is called for every handle that may go."""

    def __init__(self, how: str, seed: int = 0) -> None:
        super().__init__()
        self.record_all = self.pin_sources = self.verify = True
        self.chance = random.Random(seed)
        self._how = how
        self._kept: list[weakref.ref[Handle]] = []

    def settle_handle(self, handle: Handle, call: Call | None) -> None:
        super().settle_handle(handle, call)
        if self._how == "half":
            self._make_some_transient(handle, call)
        if self._how == "now" or (self._how == "half" and self.chance.random() < 0.5):
            self.evict_handle(handle)
        else:
            self._kept.append(weakref.ref(handle))

    def _make_some_transient(self, handle: Handle, call: Call | None) -> None:
        for cell in [handle.cell, *(ref() for ref in (call.outputs.values() if call is not None else ()))]:
            if cell is not None:
                cell.transient = self.chance.random() < 0.5

    def evict_some(self, share: float) -> None:
        kept, self._kept = self._kept, []
        for ref in kept:
            handle = ref()
            if handle is not None and self.chance.random() < share:
                self.evict_handle(handle)
            elif handle is not None:
                self._kept.append(ref)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._how == "late" and functions.name_of(func) in ("backward", "grad"):
            self.evict_some(2.0)
        return super().__torch_function__(func, types, args, kwargs)


class _EvictInsideCalls(TorchDispatchMode):
    def __init__(self, tape: EvictingTape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._tape.is_restoring and self._tape.chance.random() < 0.3:
            self._tape.evict_some(0.3)
        return func(*args, **(kwargs or {}))


def plain(program: Program, num_steps: int = 3) -> list[dict[str, str]]:
    """What every step leaves behind in plain eager."""
    return list(_train(make(program), num_steps))


def evicted(program: Program, how: str, num_steps: int = 3, seed: int = 0) -> tuple[list[dict[str, str]], Tape]:
    """The same on an evicting tape, and the tape."""
    run = make(program)
    tape = EvictingTape(how, seed)
    tape.enter()
    try:
        with _EvictInsideCalls(tape) if how == "mid" else contextlib.nullcontext():
            return list(_train(run, num_steps, tape.end_step)), tape
    finally:
        tape.exit()


def differences(ours: list[dict[str, str]], theirs: list[dict[str, str]]) -> list[str]:
    """'step 0: gradient/weight' for each part that differs or that only one side has."""
    assert len(ours) == len(theirs)
    return [
        f"step {number}: {part}"
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True))
        for part in sorted(one.keys() | other.keys())
        if one.get(part) != other.get(part)
    ]


def make(program: Program) -> Run:
    """The program's Run, from the same random state each time."""
    torch.manual_seed(0)
    random.seed(0)
    return program()


def _train(run: Run, num_steps: int, after_step: Callable[[], None] = lambda: None) -> Iterator[dict[str, str]]:
    for number in range(num_steps):
        loss = run.step(number)
        yield snapshot(run, loss)
        del loss
        after_step()


def snapshot(run: Run, loss: torch.Tensor) -> dict[str, str]:
    """A digest of every bit the step leaves behind, by name; what is missing reads 'none'."""
    with torch.no_grad(), torch._C.DisableTorchFunction():
        parts: dict[str, Any] = {"loss": loss, "random state": torch.get_rng_state()}
        for name, parameter in run.model.named_parameters():
            parts |= {f"parameter/{name}": parameter, f"gradient/{name}": parameter.grad}
        parts |= {f"buffer/{name}": buffer for name, buffer in run.model.named_buffers()}
        for number, optimizer in enumerate(run.optimizers):
            for index, state in enumerate(optimizer.state.values()):
                parts |= {f"optimizer/{number}/{index}/{key}": value for key, value in state.items()}
        parts |= {f"extra/{name}": value for name, value in run.extra().items()}
        return {name: _digest(value) for name, value in parts.items()}


def _digest(value: Any) -> str:
    if value is None:
        return "none"
    if not isinstance(value, torch.Tensor):
        return repr(value)
    dense = value.detach().coalesce().to_dense() if value.layout is torch.sparse_coo else value.detach()
    dense = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
    bits = dense.contiguous().reshape(-1).view(torch.uint8)
    return f"{value.dtype}{tuple(value.shape)}" + hashlib.sha256(bits.numpy().tobytes()).hexdigest()
