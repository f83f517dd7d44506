"""The common examination of techniques. There is one so far, recompute, applied to a tape by a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memfit
import oracle
from equality import Run, differences, make, snapshot
from memfit.core.plan import Plan
from memfit.core.trace import Trace
from memfit.engine.tape import Tape
from memfit.techniques import recompute

B, D, DEPTH = 512, 64, 6


pytestmark = pytest.mark.usefixtures("one_thread")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(D, D), nn.LayerNorm(D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.gelu(self.linear(self.norm(x)).tanh())


def program() -> Run:
    model = nn.Sequential(*(Block() for _ in range(DEPTH)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(_: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.randn(B, D)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Run(step, model, [optimizer])


def trace_of(run: Run) -> Trace:
    return memfit.trace(lambda: run.step(0), 2)


def plan_for(trace: Trace, share: float = 0.7) -> Plan:
    return memfit.plan(trace, int(share * trace.meta["measured_peak_bytes"]))


@pytest.mark.parametrize("share", [0.6, 0.75, 0.9])
def test_the_predicted_peak_is_the_measured_one(share: float) -> None:
    run = make(program)
    plan = plan_for(trace_of(run), share)
    tape = Tape()
    tape.enter()
    undo = recompute.apply(tape, plan.moves)
    try:
        for number in range(2):
            _, memory = oracle.measure_step(lambda number=number: run.step(number), oracle.record_shared)
            tape.end_step()
    finally:
        undo()
        tape.exit()
    assert tape.counts.num_evicted > 0
    assert tape.counts.num_restored == tape.counts.num_evicted
    assert memory.peak_bytes == pytest.approx(plan.predicted_peak_bytes, rel=0.001)
    assert memory.peak_bytes <= plan.budget_bytes


def test_undo_puts_back_functions_hooks_and_the_next_step_bit_for_bit() -> None:
    plan = plan_for(trace_of(make(program)))

    def world(run: Run) -> list[object]:
        hooks = torch.nn.modules.module
        return [
            torch.nn.functional.linear, torch.Tensor.backward, torch.autograd.backward, type(run.model).__call__,
            dict(hooks._global_forward_pre_hooks), dict(hooks._global_forward_hooks),
            [dict(module._forward_pre_hooks) for module in run.model.modules()],
            torch._C._len_torch_function_stack(), torch._C._autograd._top_saved_tensors_default_hooks(True),
        ]  # fmt: skip

    expected = []
    run = make(program)
    for number in range(3):
        expected.append(snapshot(run, run.step(number)))

    run, found = make(program), []
    before = world(run)
    tape = Tape()
    policy = tape.policy
    tape.enter()
    undo = recompute.apply(tape, plan.moves)
    found.append(snapshot(run, run.step(0)))
    tape.end_step()
    num_evicted = tape.counts.num_evicted
    assert num_evicted > 0
    undo()
    assert tape.policy is policy
    found.append(snapshot(run, run.step(1)))  # on the tape, without the plan
    tape.end_step()
    assert tape.counts.num_evicted == num_evicted
    tape.exit()
    assert world(run) == before
    found.append(snapshot(run, run.step(2)))
    assert differences(expected, found) == []


def test_where_everything_fits_there_is_nothing_to_do() -> None:
    trace = trace_of(make(program))
    assert memfit.plan(trace, int(1.1 * trace.meta["measured_peak_bytes"])).moves == ()
    tape = Tape()
    recompute.apply(tape, ())
    assert tape.policy is None


def test_a_stale_plan_raises_before_anything_changes() -> None:
    plan = plan_for(trace_of(make(program)))
    other = nn.Sequential(Block(), nn.Linear(D, D))
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    before = other[1].weight.detach().clone()
    with memfit.fit(other, optimizer, budget=plan.budget_bytes, plan=plan):
        other(torch.randn(B, D)).mean().backward()
        with pytest.raises(memfit.PlanError, match=r"was made for another model.*No parameter was changed"):
            optimizer.step()
    assert torch.equal(other[1].weight, before)


def test_a_plan_that_names_nothing_of_the_program_is_dropped_and_told() -> None:
    run = make(program)
    plan = plan_for(trace_of(run))
    elsewhere = [
        replace(move, **{name: tuple(f"0|Elsewhere{key[key.index('#') :]}" for key in getattr(move, name)) for name in KEYS})
        for move in plan.moves
    ]
    with memfit.fit(run.model, run.optimizers[0], budget=1 << 30, plan=replace(plan, moves=tuple(elsewhere))) as session:
        run.step(0)
    assert any("made for another program" in message for message in session.messages)


KEYS = ("evict", "pin", "calls", "keep")
