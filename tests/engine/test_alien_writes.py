"""Content that autograd saved, overwritten behind the back of the version counter it checks: `.data`, unsafe_chunk, numpy arrays.

Plain eager computes the gradient from what is there when backward reads it, so that is what an evicted tensor must come back as.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from equality import HOWS, Program, Run, differences, evicted, plain


def write_into_array(y: torch.Tensor) -> None:
    y.detach().numpy()[0] = 0.25


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "data": lambda y: y.data.add_(0.1),
    "unsafe_chunk": lambda y: torch.unsafe_chunk(y, 2, 1)[0].mul_(2.0),
    "numpy": write_into_array,
}


def program(write: Callable[[torch.Tensor], object]) -> Program:
    def make() -> Run:
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(_: int) -> torch.Tensor:
            optimizer.zero_grad()
            y = model(torch.randn(4, 8)).sigmoid()
            write(y)
            loss = y.mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Run(step, model, [optimizer])

    return make


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("write", WRITES)
def test_backward_reads_what_was_written_as_plain_eager_does(write: str, how: str) -> None:
    found, _ = evicted(program(WRITES[write]), how, 2)
    assert differences(plain(program(WRITES[write]), 2), found) == []
