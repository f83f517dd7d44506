"""Many steps: neither bytes nor Python objects grow, under a plan (200 steps), and under the guard in every one (45)."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memfit
import oracle
from memfit.runtime.session import Session
from runtime.conftest import MOMENT_BYTES

B, D = 256, 32


pytestmark = pytest.mark.usefixtures("one_thread")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(6))
        self.norm = nn.BatchNorm1d(D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.dropout(self.norm(layer(x)).relu_(), 0.1)
        return x


def census() -> tuple[int, int]:
    """Bytes of the live storages, and how many objects Python's collector knows."""
    gc.collect()
    return oracle.count_live_bytes(), len(gc.get_objects())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> list[tuple[int, int]]:
    """Census after a third of the steps, and at the end."""
    found = []
    for number in range(num_steps):
        loss = model(torch.randn(B, D)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del loss
        if number in (num_steps // 3, num_steps - 1):
            found.append(census())
    return found


def make(share: float) -> tuple[nn.Module, torch.optim.Optimizer, int]:
    """Model, optimizer, and this share of the step's peak in bytes."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step() -> None:
        model(torch.randn(B, D)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, int(share * memfit.trace(step).meta["measured_peak_bytes"])


def test_under_a_plan_two_hundred_steps_hold_as_much_as_seventy() -> None:
    model, optimizer, budget = make(0.7)
    with memfit.fit(model, optimizer, budget=budget, verify="always") as session:
        (bytes_early, objects_early), (bytes_late, objects_late) = train(model, optimizer, 200)
        result = session.result()
    assert result.num_planned_steps >= 198
    assert result.certificate.num_restored == result.certificate.num_evicted > 200
    assert bytes_late == bytes_early
    assert abs(objects_late - objects_early) < 50


def test_under_the_guard_forty_five_steps_hold_as_much_as_fifteen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a program whose steps never come to a plan: each is guarded and measured anew."""
    model, optimizer, budget = make(0.7)
    monkeypatch.setattr(Session, "_decide", lambda self: (self.traces.clear(), self._begin_measured_step()))
    with memfit.fit(model, optimizer, budget=budget) as session:
        (bytes_early, objects_early), (bytes_late, objects_late) = train(model, optimizer, 45)
        num_evicted = session._tape.counts.num_evicted
    assert num_evicted > 45
    assert bytes_late == bytes_early
    assert abs(objects_late - objects_early) < 30


def test_bits_of_noise_made_while_the_guard_makes_room_are_counted() -> None:
    """40 dropouts of 1 MiB: their bits, 32 KiB each, come to more than all that memfit holds besides and does not count."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(40) for layer in (nn.Linear(64, 64), nn.Dropout(0.1))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4096, 64)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    _, eager = oracle.measure_step(step)
    with memfit.fit(model, optimizer, budget=int(0.4 * eager.peak_bytes)) as session:
        _, guarded = oracle.measure_step(step)
    assert any("the guard let go" in message for message in session.messages)
    assert guarded.peak_bytes <= session.traces[0].meta["measured_peak_bytes"] + MOMENT_BYTES
