"""The session's decisions: what is refused and when, and what is kept free of the budget."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import memfit
import oracle
from memfit import planner
from memfit.core.replay import replay
from memfit.measurement.backends import CpuBackend
from runtime.conftest import MOMENT_BYTES


def make(width: int = 64, batch_size: int = 2048) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.1)) for _ in range(12)))
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(batch_size, width)).square().mean().backward()
        optimizer.step()

    return model, optimizer, step


def test_a_budget_that_only_the_steps_after_the_first_would_break_is_refused_before_a_parameter_changes() -> None:
    model, optimizer, step = make(256, 512)
    frontier = planner.find_frontier(memfit.trace(step, 2))
    state_bytes = sum(v.nbytes for s in optimizer.state.values() for v in s.values())
    model, optimizer, step = make(256, 512)
    before = copy.deepcopy(model.state_dict())
    budget = frontier.floor_bytes - state_bytes // 3  # step 1, without state, would fit
    with pytest.raises(memfit.BudgetError, match="is too small"), memfit.fit(model, optimizer, budget=budget):
        step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not optimizer.state


def test_the_first_optimizer_step_under_the_guard_copies_no_parameter() -> None:
    """Of 12 weights of 256 KiB each; what the guard held of them, so that anything could be evicted, goes when backward is through."""
    model, optimizer, step = make(256, 16)
    plain_bytes = replay(memfit.trace(step, 1)).peak_bytes
    model, optimizer, step = make(256, 16)
    with memfit.fit(model, optimizer, budget="1 GiB") as session:
        step()
    assert session.result().peak_phase == "optimizer step"
    assert session.result().peak_bytes <= plain_bytes


def test_the_smallest_budget_named_is_one_that_runs() -> None:
    model, optimizer, step = make()
    trace = memfit.trace(step, 2)
    with pytest.raises(memfit.BudgetError) as error:
        memfit.plan(trace, 1000)
    budget = error.value.needed_bytes
    assert budget is not None
    model, optimizer, step = make()
    kept = []  # a little that grows from step to step, as programs do
    with memfit.fit(model, optimizer, budget=2 * budget, plan=memfit.plan(trace, budget)) as session:
        for _ in range(5):
            step()
            kept.append(torch.zeros(4))
    assert session.result().peak_bytes <= budget


def test_what_a_card_gives_beyond_what_is_allocated_is_kept_free(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, step = make()
    peak = replay(memfit.trace(step, 2)).peak_bytes
    budget, beyond = int(0.8 * peak), int(0.1 * peak)
    taken = iter([budget + beyond])
    given_back = []
    monkeypatch.setattr(CpuBackend, "process_bytes", lambda self: next(taken, 0))
    monkeypatch.setattr(CpuBackend, "give_back", lambda self: given_back.append(True))
    model, optimizer, step = make()
    with memfit.fit(model, optimizer, budget=budget) as session:
        for _ in range(4):
            step()
    assert session.plan is not None
    assert session.plan.predicted_peak_bytes <= budget - beyond
    assert given_back == [True]
    assert any("from the card" in message for message in session.messages)


def test_seconds_of_eager_are_those_of_planned_steps_less_restoring() -> None:
    model, optimizer, step = make()
    peak = replay(memfit.trace(step, 2)).peak_bytes
    model, optimizer, step = make()
    with memfit.fit(model, optimizer, budget=int(0.6 * peak), verify="off") as session:
        for _ in range(7):
            step()
    result = session.result()
    assert result.installed
    assert result.step_seconds is not None
    assert result.eager_step_seconds is not None
    assert 0 < result.eager_step_seconds < result.step_seconds


def test_plans_and_traces_may_be_given_as_files_and_the_plan_brings_its_budget(tmp_path: Path) -> None:
    _, _, step = make()
    trace = memfit.trace(step)
    trace.save(tmp_path / "trace.json")
    wanted = memfit.plan(trace, replay(trace).peak_bytes * 7 // 10)
    assert memfit.plan(tmp_path / "trace.json", wanted.budget_bytes).moves == wanted.moves
    wanted.save(tmp_path / "plan.json")
    model, optimizer, step = make()
    with memfit.fit(model, optimizer, plan=str(tmp_path / "plan.json")) as session:
        assert session.plan is not None
        assert session.plan.moves == wanted.moves
        step()
    result = session.result()
    assert (result.budget_bytes, result.budget_source) == (wanted.budget_bytes, "the plan's")
    with memfit.fit(model, optimizer, budget=2 * wanted.budget_bytes, plan=wanted) as session:
        pass
    assert session.messages[0].startswith("the plan was made for ")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: memfit.plan(3, "1 GiB"), "3 is no Trace. Give the Trace itself, or the path of its file."),  # type: ignore[arg-type]
        (lambda: memfit.fit(budget="1 GiB", plan={}), r"\{\} is no Plan"),  # type: ignore[arg-type]
        (lambda: memfit.trace(lambda: None, 0), "num_steps=0 is no number of steps to run"),
    ],
)
def test_what_is_no_plan_trace_or_number_of_steps_is_refused_in_a_sentence(call: Callable[[], object], words: str) -> None:
    with pytest.raises(memfit.MemfitError, match=words):
        call()


def peaks_of(step: Callable[[int], object], num_steps: int) -> list[int]:
    """The allocator's, of each step."""
    return [
        oracle.measure_step(lambda number=number: step(number), oracle.record_shared)[1].peak_bytes
        for number in range(num_steps)
    ]


def make_uneven(sizes: tuple[int, ...], raises_in: int = -1) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[int], None]]:
    """A step of a batch of each size, the last one's for all later; in one of them the forward pass fails first, and is tried again."""
    torch.manual_seed(0)
    width = 32
    layers = [nn.Sequential(nn.Linear(width, width), nn.LeakyReLU(), nn.Dropout(0.3), nn.LayerNorm(width)) for _ in range(6)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters())
    fails = False

    def fail_once(*_: object) -> None:
        nonlocal fails
        if fails:
            fails = False
            raise ValueError

    model[4].register_forward_pre_hook(fail_once)

    def step(number: int) -> None:
        nonlocal fails
        optimizer.zero_grad()
        fails = number == raises_in
        x = torch.randn(sizes[min(number, len(sizes) - 1)], width)
        with contextlib.suppress(ValueError):
            loss = model(x)
        if number == raises_in:
            loss = model(x)
        loss.square().mean().backward()
        optimizer.step()

    return model, optimizer, step


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("sizes", [(2048,), (2048, 1024, 2048)])
@pytest.mark.parametrize("share", [0.75, 0.6])
def test_a_second_step_that_is_not_like_the_others_does_not_loosen_the_plan(sizes: tuple[int, ...], share: float) -> None:
    """One that fails first and one that is smaller. What the valve held to the budget is no sign that the plan holds."""
    raises_in = 1 if len(sizes) == 1 else -1
    _, _, step = make_uneven(sizes, raises_in)
    eager = peaks_of(step, 3)
    model, optimizer, step = make_uneven(sizes, raises_in)
    budget = int(share * max(eager))
    with memfit.fit(model, optimizer, budget=budget):
        found = peaks_of(step, 6)
    assert max(found) <= budget + MOMENT_BYTES


@pytest.mark.usefixtures("one_thread")
def test_a_program_that_changes_when_nothing_is_measured_any_more_is_measured_and_planned_anew() -> None:
    """From evaluation mode into training after its third step: dropouts save more than was planned for."""
    model, optimizer, step = make_uneven((2048,))
    eager = max(peaks_of(step, 3))

    def step_of_its_mode(number: int) -> None:
        model.train(number > 3)
        step(number)

    model, optimizer, step = make_uneven((2048,))
    budget = int(0.6 * eager)
    with memfit.fit(model, optimizer, budget=budget) as session:
        found = peaks_of(step_of_its_mode, 9)
    assert found[4] > budget  # the step that nobody could foresee
    assert max(found[:4] + found[5:]) <= budget + MOMENT_BYTES
    assert any(" tensors, " in message and "measured and planned anew" in message for message in session.messages)


@pytest.mark.usefixtures("one_thread")
def test_a_step_of_fewer_micro_batches_is_none_of_another_program() -> None:
    def train(number: int) -> None:
        optimizer.zero_grad()
        for _ in range(1 if number == 4 else 3):
            model(torch.randn(2048, 32)).square().mean().backward()
        optimizer.step()

    model, optimizer, _ = make_uneven((2048,))
    eager = max(peaks_of(train, 3))
    model, optimizer, _ = make_uneven((2048,))
    budget = int(0.6 * eager)
    with memfit.fit(model, optimizer, budget=budget) as session:
        found = peaks_of(train, 7)
    assert session.plan is not None
    assert session.plan.moves
    assert max(found) <= budget + MOMENT_BYTES
    assert not any("anew" in message for message in session.messages)
