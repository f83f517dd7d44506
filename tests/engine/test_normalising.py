"""A batch norm's output from its input and the statistics it saved: the same bits, without taking statistics again."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.engine.normalising import can_normalise, normalise
from memfit.engine.tape import Tape

SHAPES = [(64, 33), (7, 5, 3), (16, 32, 8, 8), (1, 3, 1, 7), (3, 2, 4, 5, 6)]
LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}


def statistics_of(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, ...]:
    """Output, mean and inverse deviation, as PyTorch computes and saves them."""
    return torch.native_batch_norm(x, weight, bias, None, None, True, 0.1, eps)


@pytest.mark.parametrize("eps", [1e-5, 0.1])
@pytest.mark.parametrize("has_weight", [True, False])
@pytest.mark.parametrize("is_channels_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_normalising_gives_the_bits_of_batch_norm(
    shape: tuple[int, ...], dtype: torch.dtype, is_channels_last: bool, has_weight: bool, eps: float
) -> None:
    torch.manual_seed(0)
    x = (3 * torch.randn(shape) + 5).to(dtype)
    if is_channels_last and x.dim() in LAYOUTS:
        x = x.to(memory_format=LAYOUTS[x.dim()])
    of_parameters = torch.float64 if dtype == torch.float64 else torch.float32
    weight, bias = (torch.randn(shape[1], dtype=of_parameters) if has_weight else None for _ in range(2))
    expected, mean, invstd = statistics_of(x, weight, bias, eps)
    if mean.dtype in (torch.bfloat16, torch.float16):  # statistics are rounded where there are no parameters to give their type
        assert not has_weight
        assert not can_normalise(x, weight, bias, mean, invstd)
        return
    assert can_normalise(x, weight, bias, mean, invstd)
    found = normalise(x, weight, bias, mean, invstd)
    assert torch.equal(found, expected)
    assert (found.dtype, found.stride()) == (expected.dtype, expected.stride())


def test_what_the_kernel_computes_by_another_formula_is_left_out() -> None:
    x = torch.randn(16, 32, 8, 16)[..., ::2]
    weight, bias = torch.randn(32), torch.randn(32)
    expected, mean, invstd = statistics_of(x, weight, bias, 1e-5)
    assert not torch.equal(
        normalise(x, weight, bias, mean, invstd), expected
    )  # if this fails, it need not be left out any more
    assert not can_normalise(x, weight, bias, mean, invstd)
    x = x.contiguous()
    assert can_normalise(x, weight, bias, mean, invstd)
    assert not can_normalise(x, weight.bfloat16(), bias, mean, invstd)  # their product would be rounded
    assert not can_normalise(x, weight, bias, mean.bfloat16(), invstd)


class BatchNorms(TorchDispatchMode):
    """Counts batch norms by whether they were in training."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[bool] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.native_batch_norm.default, torch.ops.aten._native_batch_norm_legit.default):
            self.counts[args[5]] += 1
        return func(*args, **(kwargs or {}))


class OutputsEvictingTape(Tape):
    """Evicts as soon as it was saved whatever is larger than a row of statistics."""

    def settle_handle(self, handle: Any, call: Any) -> None:
        super().settle_handle(handle, call)
        if handle.cell.nbytes > 1024:
            self.evict_handle(handle)


CALLS = {
    "module": lambda norm, x: norm(x),
    "function": lambda norm, x: F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, True),
    "keywords": lambda norm, x: F.batch_norm(
        training=True, weight=norm.weight, bias=norm.bias, running_var=norm.running_var, running_mean=norm.running_mean, input=x
    ),
    "torch": lambda norm, x: torch.batch_norm(
        x, norm.weight, norm.bias, norm.running_mean, norm.running_var, True, 0.1, 1e-5, False
    ),
    "no parameters": lambda norm, x: F.batch_norm(x, norm.running_mean, norm.running_var, None, None, True),
    "no statistics": lambda norm, x: F.batch_norm(x, None, None, norm.weight, norm.bias, True),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_evicted_output_comes_back_without_statistics_and_without_writing_any(name: str) -> None:
    def run(tape: Tape | None) -> tuple[list[torch.Tensor], Counter[bool]]:
        torch.manual_seed(0)
        norm, x = nn.BatchNorm2d(8), torch.randn(16, 8, 8, 8, requires_grad=True)
        with torch.no_grad():
            norm.weight.uniform_()
            norm.bias.uniform_()
        if tape is not None:
            tape.enter()
        try:
            with BatchNorms() as norms:
                CALLS[name](norm, x.exp()).relu().square().sum().backward()
        finally:
            if tape is not None:
                tape.exit()
        grads = [each.grad for each in (x, norm.weight, norm.bias) if each.grad is not None]
        return [*grads, norm.running_mean, norm.running_var, norm.num_batches_tracked], norms.counts

    expected, counts = run(None)
    assert counts == {True: 1}
    tape = OutputsEvictingTape()
    tape.record_all = tape.pin_sources = tape.verify = True
    found, counts = run(tape)
    assert tape.counts.num_evicted >= 2  # the input of batch norm and the output of ReLU
    assert tape.counts.num_verified == tape.counts.num_restored > 0
    assert counts == {True: 1, False: 1}
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
