"""Programs that once broke the recorder or a plan: each must go through, or be refused in words."""

from __future__ import annotations

import contextlib
import copy

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memfit
from memfit.core.replay import replay


def setup() -> tuple[nn.Sequential, torch.optim.SGD]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6)))
    return model, torch.optim.SGD(model.parameters(), 0.1)


def test_a_caught_failure_in_the_last_call_of_a_step_leaves_a_trace_that_can_be_planned() -> None:
    model, optimizer = setup()

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(64, 32)).mean().backward()
        with contextlib.suppress(RuntimeError):
            model[0](torch.randn(64, 32)) @ torch.randn(3, 3)
        optimizer.step()

    trace = memfit.trace(step, 2)
    assert memfit.plan(trace, 1 << 30).eager_peak_bytes == replay(trace).peak_bytes


def test_reentrant_checkpoint_can_be_traced() -> None:
    model, optimizer = setup()

    def step() -> None:
        optimizer.zero_grad()
        x = torch.randn(64, 32, requires_grad=True)
        for part in model:
            x = checkpoint(lambda x, part=part: part(x).exp(), x, use_reentrant=True)
        (x * 2).exp().mean().backward()
        optimizer.step()

    trace = memfit.trace(step, 2)
    assert abs(replay(trace).peak_bytes - trace.meta["measured_peak_bytes"]) <= 0.02 * trace.meta["measured_peak_bytes"]


def test_optimizers_that_step_inside_backward_can_be_traced() -> None:
    model, _ = setup()
    last = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)
    optimizers = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}

    def update(parameter: nn.Parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)

    def step() -> None:
        h = model[0](torch.randn(64, 32))
        (model[1](h.exp()) * model[2](h.detach()).exp()).mean().backward()
        last.step()

    assert replay(memfit.trace(step, 2)).peak_bytes > 0


def test_vmap_in_every_step_can_be_traced() -> None:
    model, optimizer = setup()

    def step() -> None:
        optimizer.zero_grad()
        torch.func.vmap(lambda each: model(each).exp())(torch.randn(64, 32)).mean().backward()
        optimizer.step()

    assert replay(memfit.trace(step, 3)).peak_bytes > 0


def test_a_module_is_copied_between_forward_and_backward_of_a_planned_step() -> None:
    model, optimizer = setup()
    copies = []

    def step() -> None:
        optimizer.zero_grad()
        h = model(torch.randn(640, 32))
        copies.append(copy.deepcopy(model[0]))
        h.mean().backward()
        optimizer.step()

    trace = memfit.trace(step, 2)
    peak = trace.meta["measured_peak_bytes"]
    with memfit.fit(model, optimizer, budget=peak, plan=memfit.plan(trace, int(0.9 * peak))):
        for _ in range(3):
            step()
    assert len(copies) == 5


def test_a_plan_of_two_networks_that_train_in_turn_is_for_either() -> None:
    maker, first = setup()
    judge, second = setup()

    def step() -> None:
        made = maker(torch.randn(640, 32))
        second.zero_grad()
        judge(made.detach()).mean().backward()
        second.step()
        first.zero_grad()
        judge(made).mean().backward()
        first.step()

    trace = memfit.trace(step, 2)
    peak = trace.meta["measured_peak_bytes"]
    with memfit.fit(judge, second, budget=peak, plan=memfit.plan(trace, int(0.99 * peak))) as session:
        for _ in range(3):
            step()
    assert session.result().num_steps == 3
