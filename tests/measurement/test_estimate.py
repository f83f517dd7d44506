"""What an operation will allocate, asked before it runs, beside what it then allocates."""

from __future__ import annotations

import time

import pytest
import torch

from memfit.measurement.backends import CpuBackend
from memfit.measurement.estimate import bytes_needed, convolution_bytes_needed, copied_bytes, packing_bytes

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


@pytest.mark.parametrize(("rows", "inner", "columns"), [(4096, 64, 64), (2048, 256, 1024), (64, 2048, 256), (256, 2048, 1024)])
def test_a_product_in_bfloat16_takes_no_more_than_its_result_and_the_room_asked_for_packing(rows, inner, columns):
    """What oneDNN packs is seen by no operator; the first such product of a step must find room for it all the same."""
    left, right = torch.ones(rows, inner, dtype=torch.bfloat16), torch.ones(columns, inner, dtype=torch.bfloat16).t()
    product = torch.ops.aten.mm.default
    taken = CpuBackend().probe(lambda: product(left, right))
    result = bytes_needed(product, (left, right), {})
    assert result == rows * columns * 2
    assert result <= taken <= result + packing_bytes(product, (left, right))
    assert packing_bytes(product, (left.float(), right.float())) == 0
    assert packing_bytes(torch.ops.aten.add.Tensor, (left, left)) == 0


def test_waiting_for_the_processor_is_no_time_of_an_operation() -> None:
    _, seconds, _ = CpuBackend().run(("sleep",), 0, lambda: time.sleep(0.2))
    assert seconds < 0.05


def test_a_batch_norms_backward_may_copy_its_gradient() -> None:
    x, gradient = torch.randn(4, 8, 6, 6), torch.randn(4, 8, 6, 6)
    mean, invstd = torch.zeros(8), torch.ones(8)
    args = (gradient, x, torch.ones(8), mean, invstd, mean, invstd, True, 1e-5, [True, True, True])
    assert copied_bytes(torch.ops.aten.native_batch_norm_backward.default, args) == gradient.nbytes
    assert copied_bytes(torch.ops.aten.relu.default, (x,)) == 0
