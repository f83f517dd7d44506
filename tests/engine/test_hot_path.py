"""What runs past the tape, so that it costs nothing: an optimizer nobody waits for, and the tape's own replays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memfit.core.plan import Move
from memfit.engine.tape import Tape
from memfit.techniques import recompute

pytestmark = pytest.mark.usefixtures("one_thread")

MUL, EXP = "0|Scaled#0/0:mul", "0|Scaled#0/1:exp"
EVICT_EXP = Move(recompute.name, "Scaled", evict=(f"{EXP}|out0",), calls=(MUL, EXP))


class Scaled(nn.Module):
    """Its only saved tensor is the exponential, computed from the parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 64))

    def forward(self) -> torch.Tensor:
        return self.weight.mul(2).exp()


class CountingTape(Tape):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs)

    def take(self) -> list[str]:
        names, self.names = self.names, []
        return names


@pytest.fixture
def tape() -> Iterator[CountingTape]:
    tape = CountingTape()
    recompute.apply(tape, [EVICT_EXP])
    hooks = [
        register_optimizer_step_pre_hook(tape.before_optimizer),
        register_optimizer_step_post_hook(tape.after_optimizer),
    ]
    tape.enter()
    yield tape
    tape.exit()
    for hook in hooks:
        hook.remove()
    assert torch._C._len_torch_function_stack() == 0


def train(num_steps: int, tape: Tape | None) -> tuple[list[float], torch.Tensor]:
    model = Scaled()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    losses = []
    for _ in range(num_steps):
        loss = model().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if tape is not None:
            tape.end_step()
    return losses, model.weight.detach()


def test_parameters_an_unseen_optimizer_wrote_are_sources_again_in_the_next_step(tape: CountingTape) -> None:
    losses, weight = train(4, tape)
    assert tape.counts.num_restored == 4
    assert "addcdiv_" not in tape.names
    tape.exit()
    plain_losses, plain_weight = train(4, None)
    assert losses == plain_losses
    assert torch.equal(weight, plain_weight)


def test_the_calls_of_a_replay_are_not_looked_at(tape: CountingTape) -> None:
    loss = Scaled()().sum()
    tape.take()
    loss.backward()
    assert tape.counts.num_replayed_calls == 2
    assert not {"mul", "exp", "empty", "set_"} & set(tape.take())


def test_an_optimizer_is_watched_while_something_evicted_waits_for_what_it_overwrites(tape: CountingTape) -> None:
    model = Scaled()
    model.weight.grad = torch.ones(64)
    expected = 2 * model.weight.detach().mul(2).exp()
    loss = model().sum()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    tape.take()
    optimizer.step()
    assert "add_" in tape.take()
    optimizer.zero_grad()
    loss.backward()
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, expected)  # of the weight as it was: eager saved its exponential, not the weight


def test_a_closure_is_watched_from_its_first_call(tape: CountingTape) -> None:
    model = Scaled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> float:
        model.weight.neg()
        loss = model().sum()
        loss.backward()
        return loss.item()

    optimizer.step(closure)
    assert "neg" in tape.names
    assert tape.counts.num_restored == 1


def test_after_an_optimizer_that_raised_the_next_forward_pass_is_recorded(tape: CountingTape) -> None:
    class Broken(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise ValueError("broken")

    model = Scaled()
    with pytest.raises(ValueError, match="broken"):
        Broken(model.parameters(), lr=0.1).step()
    assert torch._C._len_torch_function_stack() == 0
    model().sum().backward()
    assert tape.counts.num_restored == 1


def test_a_tape_that_stands_aside_leaves_alone_what_lies_where_it_lay(tape: CountingTape) -> None:
    class Other(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    other = Other()

    class Entering(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            other.__enter__()

    model = Scaled()
    Entering(model.parameters(), lr=0.1).step()
    model()
    assert torch._C._get_function_stack_at(0) is other
    other.__exit__(None, None, None)
    model().sum().backward()
    assert tape.counts.num_restored == 1
