"""Emptying the cache in stages in a run: at the places that a simulation names, while it gives something back, and never on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memfit
from memfit.core.replay import replay
from memfit.core.trace import Trace
from memfit.measurement.backends import CpuBackend
from memfit.measurement.simulated import OPTIMIZER_STEP, SimulatedAllocator, simulate, stations
from memfit.runtime.emptying import Emptying, plan_emptying

MIB = 1 << 20
SIZES = (12, 16, 24, 30)  # MiB: each has a segment of its own on a card, and none fits into an earlier one's


class Stage(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.gain * x.mean()
        wide = x.detach().repeat(self.size * MIB // x.nbytes)  # (n,) -> (size MiB / 4,)
        return scale * wide.mean()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(1024, 1)
        self.stages = nn.ModuleList(Stage(size) for size in SIZES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale(x) * sum(stage(x) for stage in self.stages)


def make() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(model: Net, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


class Card:
    """A card with PyTorch's rules (`measurement.simulated`, whose own tests hold it to them) on which the stages' tensors lie.

    peaks: the most it had reserved in each step.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: Net) -> None:
        self.allocator = SimulatedAllocator()
        self.allocator.allocate(MIB)  # the model
        self.num_emptied = 0
        self.peaks: list[int] = []
        monkeypatch.setattr(CpuBackend, "process_bytes", lambda _: self.allocator.reserved_bytes)
        monkeypatch.setattr(CpuBackend, "allocated_bytes", lambda _: self.allocator.allocated_bytes)
        monkeypatch.setattr(CpuBackend, "give_back", lambda _: self.give_back())
        for stage in model.stages:
            stage.register_forward_pre_hook(lambda module, _: self.run(module.size * MIB))

    def run(self, num_bytes: int) -> None:
        self.allocator.free(self.allocator.allocate(num_bytes))
        self.peaks[-1] = max(self.peaks[-1], self.allocator.reserved_bytes)

    def give_back(self) -> None:
        self.allocator.empty_cache()
        self.num_emptied += 1


def run(
    budget: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[Card, memfit.runtime.session.Session, list[float], list[torch.Tensor]]:
    model, optimizer = make()
    card = Card(monkeypatch, model)
    losses = []
    with memfit.fit(model, optimizer, budget=budget) as session:
        for step in range(6):
            card.peaks.append(0)
            losses.append(train(model, optimizer, torch.full((1024,), 0.001 * (step + 1))))
    return card, session, losses, [parameter.detach() for parameter in model.parameters()]


def test_stages_of_a_planned_run_stay_within_the_budget_and_results_are_the_same(monkeypatch) -> None:
    card, session, losses, parameters = run(45 * MIB, monkeypatch)
    assert card.peaks[0] == (2 + sum(SIZES)) * MIB  # the first step shows it
    assert card.peaks[1] == (2 + 12 + 16 + 24) * MIB  # from an empty card, and not from what a step with one call leaves
    assert max(card.peaks[2:]) == (2 + 30) * MIB
    assert session.plan is not None
    assert session.plan.moves == ()  # nothing was recomputed for it
    *_, about, last = session.messages
    assert about.startswith(
        "step 1: the process took 84.00 MiB from the card where 3"
    )  # 30 MiB, and what other tests have left
    assert about.endswith("from here on its cache is emptied at 1 of the step's places.")
    assert last.startswith(f"the card's cache was emptied {card.num_emptied - 1} times, which gave back ")
    model, optimizer = make()
    assert [train(model, optimizer, torch.full((1024,), 0.001 * (step + 1))) for step in range(6)] == losses
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), parameters, strict=True))


def test_a_budget_that_the_card_holds_anyway_empties_nothing(monkeypatch) -> None:
    card, session, _, _ = run(100 * MIB, monkeypatch)
    assert (card.num_emptied, session.messages) == (0, [])


def test_on_a_cpu_nothing_is_emptied(monkeypatch) -> None:
    monkeypatch.setattr(CpuBackend, "give_back", lambda _: pytest.fail("emptied"))
    model, optimizer = make()
    with memfit.fit(model, optimizer, budget=45 * MIB) as session:
        for _ in range(3):
            train(model, optimizer, torch.ones(1024))
    assert not any("emptied" in message or "card" in message for message in session.messages)


def trace_of_stages() -> Trace:
    model, optimizer = make()
    return memfit.trace(lambda: train(model, optimizer, torch.ones(1024)))


def test_the_places_are_those_whose_simulation_stays_within_the_budget() -> None:
    trace = trace_of_stages()
    known = stations(trace)
    assert OPTIMIZER_STEP in known.values()
    assert {place[1] for place in known.values() if place != OPTIMIZER_STEP} == {
        "Net.scale", *(f"Net.stages.{index}" for index in range(len(SIZES))),
    }  # fmt: skip
    plain = simulate(trace, is_warm=True)
    for budget in (45, 60, 80):
        places = plan_emptying(trace, None, budget * MIB)
        assert places
        events = [event for event, place in known.items() if place in places]
        assert simulate(trace, events, is_warm=True).peak_reserved_bytes <= budget * MIB < plain.peak_reserved_bytes
    assert plan_emptying(trace, None, plain.peak_reserved_bytes) == frozenset()
    assert plan_emptying(trace, None, 20 * MIB) == frozenset()  # the largest stage alone is more


def test_the_simulated_step_under_a_plan_is_the_planned_step() -> None:
    from memfit.core.keys import cells_of_plan
    from memfit.core.replay import Replayer

    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.1))])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(512, 64)).square().mean().backward()
        optimizer.step()

    trace = memfit.trace(step)
    plan = memfit.plan(trace, int(0.7 * replay(trace).peak_bytes))
    cells = cells_of_plan(trace, plan)
    assert cells[0]
    for moved in ((), cells):
        requests = Replayer(trace).requests(*moved)
        live = peak = 0
        sizes: dict[int, int] = {}
        for request in requests:
            peak = max(peak, live + request.moment_bytes)
            live -= sum(sizes.pop(each) for each in request.freed)
            sizes.update(request.made)
            live += sum(num_bytes for _, num_bytes in request.made)
            peak = max(peak, live, live + request.moment_bytes)
        assert peak >= replay(trace, *moved).peak_bytes
        assert peak <= 1.01 * replay(trace, *moved).peak_bytes


class Scripted:
    """A backend whose reserved bytes are told; the cache gives back `given` each time."""

    given_now = 0

    def __init__(self, reserved: int, allocated: int, given: int) -> None:
        self.reserved, self.allocated, self.given, self.num_calls = reserved, allocated, given, 0

    def process_bytes(self) -> int:
        given, self.given_now = self.given_now, 0
        return self.reserved - given

    def allocated_bytes(self) -> int:
        return self.allocated

    def give_back(self) -> None:
        self.num_calls += 1
        self.given_now = self.given


@pytest.mark.parametrize(
    ("reserved", "allocated", "given", "num_calls", "is_kept"),
    [
        (100, 60, 30, 5, True),
        (100, 60, 0, 3, False),  # far above, yet nothing comes back: given up after three times
        (100, 90, 10, 0, False),  # reserved is not far above allocated: not even tried
    ],
)
def test_a_place_is_used_while_it_gives_something_back(reserved, allocated, given, num_calls, is_kept) -> None:
    backend = Scripted(reserved, allocated, given)
    emptying = Emptying(backend, [OPTIMIZER_STEP])
    for _ in range(5):
        emptying.pass_by((0, "net", 0))  # not one of the places
        emptying.pass_by(OPTIMIZER_STEP)
    assert (backend.num_calls, emptying.num_calls, emptying.given_bytes) == (num_calls, num_calls, num_calls * given)
    assert (OPTIMIZER_STEP in emptying.places) == is_kept
