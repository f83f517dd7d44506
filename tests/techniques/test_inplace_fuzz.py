"""Random functions with every call in place that the tape takes to be safe: they equal their plain selves bit for bit.

A function is a list of statements on four names: calls of every kind, in modules and out, and every way to hold on to a tensor that
came to mind. If one reference were counted too few, something would be overwritten that is read later, and some number would differ.
Thousands instead of CI's few: MEMFIT_FUZZ_EXAMPLES=5000 pytest tests/techniques/test_inplace_fuzz.py
"""

from __future__ import annotations

import functools
import itertools
import os
import weakref
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from equality import Program, Run, differences, plain
from techniques.in_place import everywhere, on_a_python_understood

N = 4
_EXAMPLES = os.environ.get("MEMFIT_FUZZ_EXAMPLES")

STATEMENTS = r"""
a = torch.relu(b)
a = b.sigmoid()
a = F.relu(b)
a = F.leaky_relu(b, 0.1)
a = F.dropout(b, 0.3)
a = b + c
a = c + b * 0.5
a = b / (c.detach().abs() + 1)
a = b.masked_fill(c > 0, 0.5)
a = 1 + -b
a = m.act(b)
a = m.deep(b)
a = m.chain(b)
a = m.leaky(m.linear(b))
a = m.linear(b).relu() + c
a = m.linear(b)
a = m.pair(b, c)[0]
a = m.act(input=b)
a = m.act(*(b,))
a = m.again(b)
a = m.hooked(b)
a = b
a = b.view(N, N)
a = b.t()
a = b.detach() + c
a = b * c
a = [m.act(b), b][0]
a, b = torch.relu(a), c
a = (lambda: torch.relu(b))()
a = (lambda t: torch.relu(t))(b)
a = next(torch.relu(t) for t in [b])
a = [torch.relu(t) for t in (b, c)][1]
a = list(map(torch.relu, [b]))[0]
a = list(map(m.act, (b, c)))[0]
a = sorted([b, c], key=lambda t: torch.relu(t).sum().item())[0]
a = sorted([b, c], key=SortKey(m.act))[0]
a = list(itertools.starmap(torch.relu, [(b,)]))[0]
a = list(itertools.starmap(m.act, [(b,)]))[0]
a = functools.partial(m.act)(b)
a = functools.reduce(lambda p, q: torch.relu(p) + q, [b, c])
a = checkpoint(lambda t: torch.relu(m.linear(t)), b, use_reentrant=False)
keep.append(b)
keep.clear()
a = keep.pop() if keep else c
a = torch.relu(keep[-1]) if keep else c
a = F.relu(keep[0] if keep else b)
a = keep[-1] + b if keep else b + c
table = {'key': b}; a = torch.relu(table['key']); del table
table = {'key': torch.relu(b)}; a = F.relu(table.pop('key'))
watched = weakref.ref(b); a = torch.relu(b)
a = torch.relu(b); seen.append(b.sum().item())
a = torch.relu(b); seen.append(c.sum().item())
box = Box(b); a = box.run()
array = in_array(b); a = (array * 0.5)[0]; seen.append(array[0].sum().item())
array = in_array(b); a = np.add(array, 1)[0]; seen.append(array[0].sum().item())
array = in_array(b); a = np.exp(array)[0]; keep.append(array[0])
b.tag = 1; a = torch.relu(b)
if b.sum().item() > 0: a = torch.relu(b)
if b.sum().item() > 0: a = b + 1; c = a * b
for _ in range(2): a = torch.relu(a) + b
for b in (m.linear(c) for _ in range(2)): a = torch.relu(b)
while True: a = torch.relu(b); break
try: a = torch.relu(b); fail(a); \nexcept ValueError: a = a + 1
try: a = torch.relu(b); fail(a); \nexcept ValueError: a = b + 1
try: a = torch.relu(b)\nfinally: seen.append(b.sum().item())
with torch.autocast('cpu', torch.bfloat16): a = torch.relu(b) + b
with torch.no_grad(): a = torch.relu(b)
b.retain_grad() if b.requires_grad else None; a = torch.relu(b)
b.register_hook(lambda gradient: gradient * 2) if b.requires_grad else None; a = torch.relu(b)
storage = b.untyped_storage(); a = torch.relu(b); seen.append(sum(list(storage)))
""".strip().splitlines()


class SortKey:
    """A key whose comparison is by sum."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, tensor: torch.Tensor) -> float:
        return self.function(tensor).sum().item()


def in_array(tensor: torch.Tensor) -> Any:
    """NumPy's array of objects, which applies operators to what it only borrowed."""
    array = np.empty(1, dtype=object)
    array[0] = tensor
    return array


class Box:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def run(self) -> torch.Tensor:
        return torch.relu(self.tensor)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(N, N), nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.act(x)
        z = self.linear(y)
        z = self.act(z)
        return z + y


class Again(nn.Module):
    """Reads its argument after it has been activated."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x) + x


class Pair(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.relu(x), y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act, self.leaky, self.deep, self.again, self.pair = (
            nn.Linear(N, N),
            nn.ReLU(),
            nn.LeakyReLU(),
            Deep(),
            Again(),
            Pair(),
        )
        self.chain = nn.Sequential(nn.Linear(N, N), nn.ReLU(), nn.Dropout(0.2), nn.Sequential(nn.LeakyReLU(), nn.Sigmoid()))
        self.hooked = nn.ReLU()
        self.seen: list[torch.Tensor] = []
        self.hooked.register_forward_hook(lambda module, args, output: self.seen.append(args[0].detach().sum()))


def fail(tensor: torch.Tensor) -> None:
    raise ValueError("the program's own")


def write(lines: list[tuple[str, str]]) -> str:
    """The function's source: each statement with its names exchanged."""
    body = []
    for line, names in lines:
        line = "".join(
            names[("abc".index(each))] if each in "abc" and alone(line, at) else each for at, each in enumerate(line)
        )
        for part in line.split("\\n"):
            body.append(f"    {part}")
    return "\n".join(["def run(m, a, b, c, d, keep, seen):", *body, "    return a, b"])


def alone(line: str, at: int) -> bool:
    """Whether the letter is a name of its own."""
    before, after = line[at - 1 : at], line[at + 1 : at + 2]
    return not (before.isalnum() or (before in "_.'" and before) or after.isalnum() or after == "_" or after == "'")


def program(lines: list[tuple[str, str]]) -> Program:
    names: dict[str, Any] = {
        "torch": torch, "F": F, "N": N, "checkpoint": checkpoint, "functools": functools, "itertools": itertools,
        "weakref": weakref, "Box": Box, "SortKey": SortKey, "fail": fail, "np": np,
        "in_array": in_array,
    }  # fmt: skip
    exec(compile(write(lines), "<fuzz>", "exec"), names)

    def make() -> Run:
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen: list[float] = []

        def step(_: int) -> torch.Tensor:
            optimizer.zero_grad()
            seen.clear()
            model.seen.clear()
            keep: list[torch.Tensor] = []
            tensors = [model.linear(torch.randn(N, N)) for _ in range(4)]
            found = names["run"](model, tensors.pop(), tensors.pop(), tensors.pop(), tensors.pop(), keep, seen)
            loss = torch.stack([each.float().tanh().mean() for each in (*found, *keep)]).sum() + model.linear.weight.sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Run(step, model, [optimizer], lambda: {"seen": list(seen), "hooked": [float(each) for each in model.seen]})

    return make


LINES = st.lists(st.tuples(st.sampled_from(STATEMENTS), st.permutations("abcd").map("".join)), min_size=2, max_size=12)


@on_a_python_understood
def test_any_function_in_place_wherever_that_is_taken_to_be_safe_equals_its_plain_self() -> None:
    num_overwritten = 0

    @settings(
        max_examples=int(_EXAMPLES or 120),
        derandomize=_EXAMPLES is None,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(lines=LINES)
    def check(lines: list[tuple[str, str]]) -> None:
        nonlocal num_overwritten
        expected = plain(program(lines), 2)
        found, tape = everywhere(program(lines), num_steps=2)
        assert differences(expected, found) == [], write(lines)
        num_overwritten += tape.counts.num_overwritten

    check()
    assert num_overwritten > 100
