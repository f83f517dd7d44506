"""Dropout's noise in bits; the beginning of a matrix product. Both through the operations that run, counted."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.engine.packing import draw, pack, packed_bytes, unpack
from memfit.engine.tape import Tape

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Operations(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func).split(".")[1]] += 1
        return func(*args, **(kwargs or {}))


class EvictingTape(Tape):
    """Evicts everything as soon as it was saved."""

    def settle_handle(self, handle: Any, call: Any) -> None:
        super().settle_handle(handle, call)
        self.evict_handle(handle)


def noise_of(num_elements: int, p: float, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(num_elements, dtype=dtype).bernoulli_(1 - p).div_(1 - p)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("num_elements", [1, 7, 8, 9, 1000, (1 << 18) + 3])
def test_noise_comes_back_from_its_bits_bit_for_bit(num_elements: int, p: float, dtype: torch.dtype) -> None:
    noise = noise_of(num_elements, p, dtype)
    packed = pack(noise)
    assert packed.nbytes == packed_bytes(num_elements) == -(-num_elements // 8)
    again = unpack(packed, num_elements, dtype, p)
    assert torch.equal(again, noise)
    assert again.untyped_storage().nbytes() == noise.nbytes  # a storage comes back in its own size


def test_the_lowest_bit_is_the_first_element() -> None:
    assert pack(torch.tensor([0.0, 2.0, 2.0, 0.0, 0.0, 0.0, 0.0, 2.0, 2.0])).tolist() == [0b10000110, 1]


@pytest.mark.parametrize("shape", [(4, 6), (3, 5, 7)])
def test_drawing_again_gives_the_noise_dropout_drew(shape: tuple[int, ...]) -> None:
    x = torch.ones(shape).transpose(0, 1)  # noise has the argument's strides
    torch.manual_seed(3)
    dropped = F.dropout(x, 0.4, True)
    torch.manual_seed(3)
    packed = draw(x.size(), x.stride(), x.dtype, 0.4)
    assert torch.equal(unpack(packed, x.numel(), x.dtype, 0.4).as_strided(x.size(), x.stride()), dropped)


def run_evicted(forward: Any, *tensors: torch.Tensor) -> Counter[str]:
    """The operations of a forward and a backward pass in which everything was evicted and restored."""
    tape = EvictingTape()
    tape.record_all = tape.pin_sources = tape.verify = True
    tape.enter()
    try:
        with Operations() as operations:
            forward(*tensors).sum().backward()
    finally:
        tape.exit()
    assert tape.counts.num_evicted > 0
    assert tape.counts.num_verified == tape.counts.num_restored > 0
    return operations.counts


def test_evicted_noise_is_drawn_once() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    assert run_evicted(lambda x: F.dropout(x.exp(), 0.5).exp(), x)["bernoulli_"] == 1


def test_the_copies_a_matrix_product_makes_come_back_without_the_product() -> None:
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    counts = run_evicted(lambda x: x.transpose(1, 2).matmul(x.transpose(1, 2).transpose(-1, -2)), x)
    assert counts["bmm"] == 1 + 2  # forward, and the two of backward


def test_dropout_on_a_tensor_that_shares_its_elements_equals_plain_eager() -> None:
    row = torch.randn(1, 64, requires_grad=True)

    def forward(row: torch.Tensor) -> torch.Tensor:
        return F.dropout(row.expand(32, 64), 0.5).exp()

    torch.manual_seed(0)
    forward(row).sum().backward()
    expected, row.grad = row.grad, None
    torch.manual_seed(0)
    run_evicted(forward, row)
    assert torch.equal(row.grad, expected)
