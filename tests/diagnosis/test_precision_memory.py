"""What amp adds to a step's memory and what it saves, in exact bytes from measured traces."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memfit.core.copies import find_copies
from memfit.core.precision import choose
from memfit.diagnosis.precision import compare, describe
from memfit.runtime.precision import Precision
from memfit.runtime.session import Session

WIDTH = 64
WEIGHT_BYTES = WIDTH * WIDTH * 4


pytestmark = pytest.mark.usefixtures("one_thread")


def measure(level, build, batch):
    torch.manual_seed(0)
    with Precision(choose(level, "bf16")), Session(None, None) as session:
        model = build()
        x = torch.randn(batch, WIDTH)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return session.traces[-1]


def linears():
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6)])


class Pointwise(nn.Module):
    """A small product at the start, and a long chain that stays in float32."""

    def __init__(self):
        super().__init__()
        self.first, self.scale = nn.Linear(WIDTH, 1), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        waves = torch.cat([(x * self.scale * 2**k).exp().log1p() for k in range(4)], -1)
        return waves.sum(-1, keepdim=True) * self.first(x)


def test_o1_costs_memory_with_a_small_batch_and_saves_it_with_a_large_one():
    """Six linears without an input gradient: the first keeps no copy of its weight for backward."""
    small = compare(measure("O0", linears, 2), measure("O1", linears, 2))
    large = compare(measure("O0", linears, 512), measure("O1", linears, 512))
    assert small.copies.weight_bytes == large.copies.weight_bytes == 5 * WEIGHT_BYTES // 2
    assert small.peak_bytes[1] > small.peak_bytes[0]
    assert large.peak_bytes[1] < large.peak_bytes[0]
    assert small.break_even > 1 > large.break_even
    assert small.break_even * 2 == pytest.approx(large.break_even * 512, rel=0.02)  # one batch, told from two
    assert "so it costs memory at this batch" in " ".join(describe(small, "O1"))
    assert "so it pays at this batch" in " ".join(describe(large, "O1"))


def test_a_half_copy_beside_a_float32_input_is_counted():
    """The batch is float32 and the program keeps it; the first linear's copy of it is half as large."""
    copies = find_copies(measure("O1", linears, 512))
    assert copies.input_bytes == 512 * WIDTH * 2
    assert copies.twice_bytes == 0  # the float32 batch is the program's own, not kept by autograd


def test_a_norm_that_keeps_its_float32_input_is_counted_twice():
    """The norm's float32 output is read by the linear as a half copy and kept by the pointwise call in float32."""

    def build():
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

            def forward(self, x):
                x = self.norm(x)
                return self.linear(x) + x.square()

        return Net()

    copies = find_copies(measure("O1", build, 32))
    assert copies.input_bytes == 32 * WIDTH * 2
    assert copies.twice_bytes == 32 * WIDTH * 4


def test_float32_leaves_no_copies():
    copies = find_copies(measure("O0", linears, 32))
    assert (copies.weight_bytes, copies.input_bytes, copies.twice_bytes) == (0, 0, 0)


@pytest.mark.usefixtures("one_thread")
def test_o1_shrinks_no_parameter_gradient_or_optimizer_state():
    found = compare(measure("O0", linears, 2), measure("O1", linears, 2))
    assert found.kinds["parameter"][0] == found.kinds["parameter"][1] == 6 * WEIGHT_BYTES
    assert found.kinds["gradient"][0] == found.kinds["gradient"][1] == 6 * WEIGHT_BYTES
    told = describe(found, "O1")[1]
    assert told.startswith("At the two peaks, float32 -> O1: ")
    assert "parameter 96.00 KiB -> 96.00 KiB" in told


def test_a_model_of_pointwise_operations_is_told_that_amp_makes_it_larger():
    """The chain stays float32; the product keeps a half copy of the batch (32 KiB) and halves a sum of one number a row."""
    found = compare(measure("O0", Pointwise, 256), measure("O1", Pointwise, 256))
    assert found.shrunk_bytes == -256 * WIDTH * 2 + 256 * 2
    assert "Activations grow by 9.8%: most are made by operations" in " ".join(describe(found, "O1"))
    assert "stay in float32 (norms, exp, softmax, losses)" in " ".join(describe(found, "O1"))


def test_where_less_is_kept_and_the_peak_is_elsewhere_it_is_not_said_to_pay():
    """The float32 chain peaks before the two products begin; they keep two half copies of (32, 64), and one weight."""

    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.last = nn.Parameter(torch.ones(WIDTH)), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))

        def forward(self, x):
            wide = torch.cat([x * self.scale] * 16).exp()
            return self.last(wide.view(16, -1, WIDTH).sum(0))

    found = compare(measure("O0", Late, 128), measure("O1", Late, 128))
    assert found.break_even < 1
    assert found.peak_bytes[1] >= found.peak_bytes[0]
    assert "so less is kept for backward; the peak, which is elsewhere, does not shrink." in " ".join(describe(found, "O1"))
