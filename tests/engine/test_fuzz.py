"""Random small programs with random evictions: whatever is let go and whenever, the program equals its plain self bit for bit.

A program is a list of instructions on a pool of square tensors, many of them views of one another. An instruction that eager
refuses (an overlapping copy, say) has no effect, in both runs; a backward pass that eager refuses ("modified by an inplace
operation") must be refused on the tape too. The shortest failing program is printed, to be pasted into a test of its own.
Thousands instead of CI's few: MEMFIT_FUZZ_EXAMPLES=5000 pytest tests/engine/test_fuzz.py
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from equality import HOWS, Program, Run, differences, evicted, plain

N = 4  # every tensor of the pool is N x N, so that any instruction takes any of them
_EXAMPLES = os.environ.get("MEMFIT_FUZZ_EXAMPLES")


class Model(nn.Module):
    """What instructions may use. `loss` is what has been backpropagated so far."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(N, N), nn.Linear(N, N)
        self.tied = nn.Linear(N, N)
        self.tied.weight = self.first.weight
        self.block = nn.Sequential(nn.Linear(N, N), nn.Tanh(), nn.Dropout(0.3), nn.LayerNorm(N))
        self.norm = nn.BatchNorm1d(N)
        self.loss = torch.zeros(())
        self.outside = torch.zeros(N, N)


Tensor = torch.Tensor
Instruction = Callable[[Model, Tensor, Tensor], Tensor | None]


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx, gradient):
        x, y = ctx.saved_tensors
        return gradient * y, gradient * x


def _void(_: Tensor) -> None:
    """An instruction in place puts nothing into the pool."""


def _backward(m: Model, a: Tensor, b: Tensor) -> None:
    loss = (a * 2).tanh().mean() + b.mean()
    loss.backward(retain_graph=True)
    m.loss = m.loss + loss.detach()


def _without_gradient(m: Model, a: Tensor, b: Tensor) -> Tensor:
    with torch.no_grad():
        return m.second(a).add_(b).sin_()


def _write_without_gradient(m: Model, a: Tensor, b: Tensor) -> None:
    with torch.no_grad():
        a.mul_(0.5).add_(b[0, 0])


def _assign_rows(m: Model, a: Tensor, b: Tensor) -> None:
    a[: N // 2] = b[N // 2 :] * 0.5


def _assign_masked(m: Model, a: Tensor, b: Tensor) -> None:
    a[b > 0] = 0.25


def _swap(m: Model, a: Tensor, b: Tensor) -> Tensor:
    left, right = a.chunk(2, 1)
    return torch.cat([right, left.sin()], 1)


def _split_in_place(m: Model, a: Tensor, b: Tensor) -> Tensor:
    _, right = (a * 1).split(N // 2, 1)
    return torch.cat([right.mul_(1.5), b[:, : N // 2].tanh()], 1)


def _autocast(m: Model, a: Tensor, b: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.gelu(m.second(a)).float()


def _draw_outside(m: Model, a: Tensor, b: Tensor) -> None:
    m.outside = torch.rand(N, N)


def _attend(m: Model, a: Tensor, b: Tensor) -> Tensor:
    q, k, v = (each.reshape(1, 2, 2, N) for each in (a, b, m.first(a)))
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.3).view(N, N)


def _fail(m: Model, a: Tensor, b: Tensor) -> None:
    raise RuntimeError(f"the program's own, after {a.sigmoid().mul_(b).shape}")


INSTRUCTIONS: dict[str, Instruction] = {
    "first": lambda m, a, b: m.first(a),
    "tied": lambda m, a, b: m.tied(a),
    "block": lambda m, a, b: m.block(a),
    "norm": lambda m, a, b: m.norm(a),
    "weight view": lambda m, a, b: F.linear(a, m.first.weight.t()) * m.second.weight[0],
    "tanh": lambda m, a, b: a.tanh(),
    "sigmoid": lambda m, a, b: a.sigmoid(),
    "relu": lambda m, a, b: a.relu(),
    "softmax": lambda m, a, b: a.softmax(-1),
    "dropout": lambda m, a, b: F.dropout(a, 0.4),
    "random": lambda m, a, b: a + torch.randn_like(b) * b,
    "add": lambda m, a, b: a + b,
    "multiply": lambda m, a, b: a.tanh() * b.tanh(),
    "matmul": lambda m, a, b: (a @ b.t()).tanh(),
    "where": lambda m, a, b: torch.where(a > b, a.sin(), b),
    "clone": lambda m, a, b: a.clone(),
    "transpose": lambda m, a, b: a.t(),
    "view": lambda m, a, b: a.view(N * N).view(N, N),
    "reshape": lambda m, a, b: a.t().reshape(2, 8).reshape(N, N),
    "select": lambda m, a, b: a[1].expand(N, N),
    "index": lambda m, a, b: a[torch.tensor([2, 0, 1, 2])],
    "swap": _swap,
    "split in place": _split_in_place,
    "attend": _attend,
    "autocast": _autocast,
    "scale": lambda m, a, b: _Scale.apply(a.tanh(), b.tanh()),
    "checkpoint": lambda m, a, b: checkpoint(lambda t: F.dropout(m.first(t).tanh(), 0.2).sin(), a, use_reentrant=False),
    "detach": lambda m, a, b: a.detach(),
    "no_grad": _without_gradient,
    "outside": lambda m, a, b: (a + m.outside).sin() * m.outside,
    "draw outside": _draw_outside,
    "write outside": lambda m, a, b: _void(m.outside.add_(0.5)),
    "relu_": lambda m, a, b: _void(a.relu_()),
    "mul_": lambda m, a, b: _void(a.mul_(0.5)),
    "add_": lambda m, a, b: _void(a.add_(b)),
    "tanh_": lambda m, a, b: _void(a.tanh_()),
    "copy_": lambda m, a, b: _void(a.copy_(b)),
    "dropout_": lambda m, a, b: _void(F.dropout(a, 0.3, inplace=True)),
    "fill row": lambda m, a, b: _void(a[1].fill_(0.5)),
    "column in place": lambda m, a, b: _void(a[:, 1:3].mul_(2.0)),
    "assign rows": _assign_rows,
    "assign masked": _assign_masked,
    "write detached": lambda m, a, b: _void(a.detach().mul_(0.5)),
    "write outside data": lambda m, a, b: _void(m.outside.data.add_(0.1)),
    "write without gradient": _write_without_gradient,
    "backward": _backward,
    "fail": _fail,
}

Line = tuple[str, int, int]  # instruction, and which two tensors of the pool, counted from its end


def program(lines: list[Line]) -> Program:
    """Two inputs, the lines in order, one backward pass over all that came out, one step of the optimizer."""

    def make() -> Run:
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        refused: list[str] = []

        def step(_: int) -> Tensor:
            optimizer.zero_grad()
            refused.clear()
            model.loss, model.outside = torch.zeros(()), torch.rand(N, N)
            pool = [torch.randn(N, N), model.first(torch.randn(N, N))]
            for name, one, other in lines:
                try:
                    made = INSTRUCTIONS[name](model, pool[-1 - one % len(pool)], pool[-1 - other % len(pool)])
                except RuntimeError:
                    refused.append(name)
                    continue
                if made is not None:
                    pool.append(made)
            loss = torch.stack([each.tanh().mean() for each in pool]).sum()
            try:
                loss.backward()
            except RuntimeError:
                refused.append("backward")
            optimizer.step()
            return model.loss + loss.detach()

        return Run(step, model, [optimizer], lambda: {"refused": list(refused)})

    return make


LINES = st.lists(
    st.tuples(st.sampled_from(sorted(INSTRUCTIONS)), st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=14
)


@pytest.mark.filterwarnings("ignore:Use of .* on expanded tensors:UserWarning")  # PyTorch's own word on such a program
@settings(
    max_examples=int(_EXAMPLES or 150),
    derandomize=_EXAMPLES is None,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(lines=LINES, how=st.sampled_from(HOWS), seed=st.integers(0, 1000))
def test_any_program_under_any_eviction_equals_its_plain_self(lines: list[Line], how: str, seed: int) -> None:
    expected = plain(program(lines), num_steps=2)
    found, _ = evicted(program(lines), how, num_steps=2, seed=seed)
    assert differences(expected, found) == []
