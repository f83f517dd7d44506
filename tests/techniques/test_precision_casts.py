"""autocast's half copies of weights are cast again in backward instead of kept, where a budget asks for it: no product runs twice."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import memfit
from memfit.core.copies import find_copies
from memfit.core.replay import replay

WIDTH, DEPTH, BATCH = 256, 6, 8
COPY_BYTES = WIDTH * WIDTH * 2


pytestmark = pytest.mark.usefixtures("one_thread")


class Counting(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Adapted:
    """Frozen layers above a trained one: backward needs every weight, and no gradient of them takes the copies' room."""

    def __init__(self):
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(1 + DEPTH)]
        self.model = nn.Sequential(*layers)
        for layer in layers[1:]:
            layer.requires_grad_(requires_grad=False)
        self.optimizer = torch.optim.SGD(layers[0].parameters(), lr=0.1)
        self.losses: list[float] = []

    def step(self, autocast=False):
        x = torch.ones(BATCH, WIDTH)
        if autocast:
            with torch.autocast("cpu", torch.bfloat16):
                loss = self.model(x).float().square().mean()
        else:
            loss = self.model(x).float().square().mean()
        loss.backward()
        self.losses.append(loss.item())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def count(self, **options):
        with Counting() as counting:
            self.step(**options)
        return counting.counts["aten.mm.default"], counting.counts["aten._to_copy.default"]


def test_copies_of_weights_are_cast_twice_and_no_product_runs_twice_bit_for_bit():
    by_hand = Adapted()
    for _ in range(5):
        by_hand.step(autocast=True)
    num_products, num_casts = by_hand.count(autocast=True)
    assert num_products == 1 + DEPTH + DEPTH + 1  # forward; back through the frozen ones; the trained weight's gradient

    fitted = Adapted()
    trace = memfit.trace(fitted.step, precision="O1", half="bf16")
    copies, peak_bytes = find_copies(trace), replay(trace).peak_bytes
    assert copies.weight_bytes == DEPTH * COPY_BYTES
    plan = memfit.plan(trace, peak_bytes - 4 * COPY_BYTES + 10_000)
    evicted = [key for move in plan.moves for key in move.evict]
    assert [key.partition(":")[2] for key in evicted] == ["linear|in0"] * len(evicted)  # the weight is all a frozen layer saves
    assert len(evicted) == 5  # the copy that is back and the gradient that goes through it take part of the room

    fitted = Adapted()
    with memfit.fit(fitted.model, fitted.optimizer, budget="1GiB", plan=plan, precision="O1", half="bf16", verify=2) as session:
        for _ in range(5):
            fitted.step()
        assert fitted.count() == (num_products, num_casts + 5)
    assert fitted.losses == by_hand.losses
    assert torch.equal(fitted.model[0].weight, by_hand.model[0].weight)
    assert session.result().certificate.verdict == "equal"
