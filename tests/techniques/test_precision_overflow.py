"""float16 that overflows for ever is stopped, with the module that made the first infinity."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memfit.core.errors import PrecisionError
from memfit.core.precision import choose
from memfit.runtime.precision import Precision


class Widening(nn.Module):
    def forward(self, x):
        return x * 1e4 * 1e4


class Steep(nn.Module):
    """Finite forward, infinite gradient at its input."""

    def forward(self, x):
        y = x * 1
        y.register_hook(lambda gradient: gradient * float("inf"))
        return y * 1


def train(inner: nn.Module, num_steps: int = 60, good_steps: tuple[int, ...] = ()) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Sequential(nn.Linear(32, 32), inner), nn.Linear(32, 4))
    with Precision(choose("O1", "fp16")):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(num_steps):
            x = torch.randn(8, 8) * (0 if step in good_steps else 1)
            F.cross_entropy(model(x), torch.zeros(8, dtype=torch.long)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return list(model.parameters())


def test_the_module_whose_output_is_the_first_infinity_is_named_and_no_parameter_was_changed():
    torch.manual_seed(0)
    with pytest.raises(
        PrecisionError, match=r"25 steps in a row were held back and the loss scale went down to 0.00390625"
    ) as caught:
        train(Widening())
    assert "The first module whose output is not finite, although its inputs are, is 2.1 (Widening)." in str(caught.value)
    assert "Use bfloat16 (--half bf16, half='bf16')" in str(caught.value)


def test_an_infinity_that_arises_in_backward_is_traced_to_where_it_arrives():
    with pytest.raises(PrecisionError, match=r"the first gradient that is not arrives at the output of 2.0 \(Linear\)\."):
        train(Steep())


def test_an_infinity_outside_of_modules_is_said_to_be_there():
    model = nn.Linear(2, 1)
    with Precision(choose("O1", "fp16")):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step():
            (model(torch.ones(1, 2)).sum() / 64 + model.weight.sum() * float("inf")).backward()
            optimizer.step()

        for _ in range(24):
            step()
        with pytest.raises(PrecisionError, match="No module's output is infinite; it arises outside of modules"):
            step()


def test_an_overflow_now_and_then_does_not_stop_training():
    """Injected in every fourth step, far more often than in any real run."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    with Precision(choose("O1", "fp16")) as applied:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(60):
            x = torch.randn(16, 4)
            loss = (model(x).squeeze(1) - x.sum(1)).square().mean()
            (loss * (float("inf") if step % 4 == 1 else 1.0)).backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[-1] < 0.05 * losses[0]
    assert "16 optimizer steps were held back for gradients that overflowed, 44 were made." in applied.messages()[0]
