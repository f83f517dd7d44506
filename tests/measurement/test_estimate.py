"""What an operation will allocate, asked before it runs, beside what it then allocates."""

from __future__ import annotations

import pytest
import torch

from memfit.measurement.backends import CpuBackend
from memfit.measurement.estimate import bytes_needed, convolution_bytes_needed

convolution = torch.ops.aten.convolution.default


def arguments(num_samples: int, channels: int, out_channels: int, size: int) -> tuple:
    x, weight = torch.randn(num_samples, channels, size, size), torch.randn(out_channels, channels, 3, 3)
    return (x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)


@pytest.mark.parametrize("channels", [3, 16, 32])
def test_a_convolutions_workspace_is_drawn_out_from_parts_of_the_batch(channels: int) -> None:
    backend = CpuBackend()
    args = arguments(192, channels, 32, 16)
    told = convolution_bytes_needed(convolution, args, {}, backend.probe)
    taken = backend.probe(lambda: convolution(*args))
    assert taken is not None
    assert told == pytest.approx(taken, rel=0.001)


def test_a_batch_too_small_for_parts_gets_an_upper_bound() -> None:
    backend = CpuBackend()
    args = arguments(8, 24, 24, 32)
    told = convolution_bytes_needed(convolution, args, {}, backend.probe)
    taken = backend.probe(lambda: convolution(*args))
    assert taken is not None
    assert taken <= told <= 3 * taken


def test_the_results_of_an_operation_are_counted_and_its_views_are_not() -> None:
    x = torch.zeros(256, 256)
    assert bytes_needed(torch.ops.aten.add.Tensor, (x, x), {}) == x.nbytes
    assert bytes_needed(torch.ops.aten.t.default, (x,), {}) == 0
    assert bytes_needed(torch.ops.aten.add_.Tensor, (x, x), {}) == 0
