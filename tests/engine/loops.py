"""Trap programs that are whole training steps, by name: backward passes, hooks and loops that make recomputation hard."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from engine.programs import B, D, Model
from equality import Program, Run

LOOPS: dict[str, Program] = {}
UNSEEN: dict[str, Program] = {}  # those that write where neither the tape nor a version counter can tell
Tensor = torch.Tensor
Step = Callable[[Model, torch.optim.Optimizer], Tensor]


def adam(function: Step) -> Program:
    """The program of a function that gets the model and Adam with cleared gradients, and does not step."""

    def make() -> Run:
        model = Model()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

        def step(_: int) -> Tensor:
            optimizer.zero_grad()
            loss = function(model, optimizer)
            optimizer.step()
            return loss.detach()

        return Run(step, model, [optimizer])

    return make


def loop(function: Step) -> Step:
    """File a function as a program of its name, see `adam`."""
    LOOPS[function.__name__] = adam(function)
    return function


def whole(make: Program) -> Program:
    """File a function that makes its own Run as a program of its name."""
    LOOPS[make.__name__] = make
    return make


def batch(model: Model) -> Tensor:
    """Random input, through the model's head."""
    return model.head(torch.randn(B, D))


# ---- content from outside, overwritten between forward and backward -------------------------------------------------------


def _zero(mask: Tensor):  # no -> None: TorchScript would want to return it
    mask.zero_()


def _copy_without_gradient(mask: Tensor) -> None:
    with torch.no_grad():
        mask.copy_(torch.ones(B, D))


def _through_numpy(mask: Tensor) -> None:
    mask.numpy()[:] = 7.0


def _under_a_mode(mask: Tensor) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        mask.add_(1)


def _scripted(mask: Tensor) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".*torch\.jit\.script.* is deprecated", category=DeprecationWarning)
        zero = torch.jit.script(_zero)
    zero(mask)


_WRITES: dict[str, Callable[[Tensor], Any]] = {
    "in_place": _zero,
    "without_gradient": _copy_without_gradient,
    "to_out": lambda mask: torch.add(mask, 1, out=mask),
    "by_foreach": lambda mask: torch._foreach_add_([mask], 1.0),
    "through_data": lambda mask: mask.data.add_(1),
    "under_a_mode": _under_a_mode,
    "through_numpy": _through_numpy,
}


def _overwrite(write: Callable[[Tensor], Any]) -> Step:
    def step(model: Model, _: torch.optim.Optimizer) -> Tensor:
        mask = torch.rand(B, D)
        hidden = (model.layers[0](batch(model)) + mask).square()
        loss = (model.layers[1](hidden) + mask).exp().mean()
        write(mask)
        loss.backward()
        return loss

    return step


for _name, _write in _WRITES.items():
    _step = _overwrite(_write)
    _step.__name__ = f"outside_content_overwritten_{_name}"
    loop(_step)
for _name, _write in {"by_script": _scripted}.items():
    UNSEEN[_name] = adam(_overwrite(_write))


@loop
def numpy_memory_overwritten(model: Model, _: torch.optim.Optimizer) -> Tensor:
    memory = torch.randn(B, D).numpy().copy()
    hidden = (model.layers[0](batch(model)) + torch.from_numpy(memory)).exp()
    loss = model.layers[1](hidden).tanh().mean()
    memory[:] = 3.0
    loss.backward()
    return loss


class _WritesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mask):
        ctx.mask = mask
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        ctx.mask.zero_()
        return gradient, None


@loop
def outside_content_overwritten_inside_backward(model: Model, _: torch.optim.Optimizer) -> Tensor:
    one, other = torch.rand(B, D), torch.rand(B, D)
    hidden = ((model.layers[0](batch(model)) + one).exp() + other).tanh()
    last = _WritesInBackward.apply((model.layers[1](hidden) + 1).exp(), one)
    last.register_hook(lambda gradient: (other.zero_(), None)[1])
    loss = last.mean()
    loss.backward()
    return loss


@loop
def one_buffer_filled_again_for_every_micro_batch(model: Model, _: torch.optim.Optimizer) -> Tensor:
    buffer, loss = torch.zeros(B, D), torch.zeros(())
    for number in range(3):
        buffer.copy_(torch.full((B, D), float(number)))
        loss = loss + (model.layers[0](buffer + 1).tanh() + buffer).square().mean()
    loss.backward()
    return loss


@loop
def a_weight_changed_between_two_backwards(model: Model, _: torch.optim.Optimizer) -> Tensor:
    hidden = model.layers[0](batch(model))
    one, other = hidden.exp().mean(), model.layers[1](hidden.detach()).exp().mean()
    one.backward()
    with torch.no_grad():
        model.layers[0].weight.sub_(0.05 * model.layers[0].weight.grad)
    other.backward()
    return one + other


@loop
def activations_kept_and_changed_after_backward(model: Model, _: torch.optim.Optimizer) -> Tensor:
    hidden = model.layers[0](batch(model))
    outer = hidden.exp()
    loss = model.layers[1](outer).tanh().mean()
    loss.backward()
    with torch.no_grad():
        outer.zero_()
        hidden.zero_()
    return loss.detach() + outer.sum()


# ---- graphs and backward passes --------------------------------------------------------------------------------------------


@whole
def a_chain_of_two_thousand_calls() -> Run:
    model = nn.Linear(D, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(_: int) -> Tensor:
        optimizer.zero_grad()
        x = model.weight * 1
        for number in range(1000):
            x = (x * 1.0001).sin_() if number % 2 else (x + 0.1).tanh()
        loss = x.sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Run(step, model, [optimizer])


@whole
def a_hidden_state_carried_over_steps() -> Run:
    cell = nn.GRUCell(D, D)
    optimizer = torch.optim.Adam(cell.parameters())
    carried = {"hidden": torch.zeros(B, D)}

    def step(_: int) -> Tensor:
        optimizer.zero_grad()
        hidden, loss = carried["hidden"].detach(), torch.zeros(())
        for _ in range(4):
            hidden = cell(torch.randn(B, D), hidden)
            loss = loss + hidden.square().mean()
        carried["hidden"] = hidden
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Run(step, cell, [optimizer], lambda: carried)


@whole
def a_graph_of_the_step_before() -> Run:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    carried: dict[str, Tensor] = {}

    def step(_: int) -> Tensor:
        optimizer.zero_grad()
        loss = model.layers[0](batch(model)).exp().square().mean()
        if carried:
            loss = loss + (carried["before"] * 1.5).tanh().mean()
        carried["before"] = (torch.randn(B, D, requires_grad=True) * 2).exp()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Run(step, model, [optimizer], lambda: dict(carried))


@loop
def retained_graphs_and_several_backwards(model: Model, _: torch.optim.Optimizer) -> Tensor:
    y = model(torch.randn(B, D))
    one, other = y.square().mean(), y.tanh().mean()
    one.backward(retain_graph=True)
    one.backward(retain_graph=True)
    other.backward()
    with pytest.raises(RuntimeError, match="second time"):
        one.backward()
    return one


@loop
def graphs_run_backward_out_of_order(model: Model, _: torch.optim.Optimizer) -> Tensor:
    one, other = model(torch.randn(B, D)).mean(), model(torch.randn(B, D)).tanh().mean()
    one.backward()
    last = model(torch.randn(B, D)).mean()
    other.backward()
    last.backward()
    return one + other + last


@loop
def a_graph_that_no_backward_visits(model: Model, _: torch.optim.Optimizer) -> Tensor:
    abandoned = model(torch.randn(B, D))
    del abandoned
    y = model(torch.randn(B, D))
    model(y).sum()
    loss = y.square().mean()
    loss.backward()
    return loss


@loop
def gradients_asked_for_by_name(model: Model, _: torch.optim.Optimizer) -> Tensor:
    loss = model(torch.randn(B, D)).square().mean()
    parameters = list(model.layers[0].parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters, retain_graph=True), strict=True):
        parameter.grad = gradient
    loss.backward(inputs=list(model.layers[1].parameters()))
    return loss


@loop
def double_backward(model: Model, _: torch.optim.Optimizer) -> Tensor:
    x = torch.randn(B, D, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    loss = gradient.square().mean()
    loss.backward()
    return loss


@loop
def a_step_inside_the_step(model: Model, _: torch.optim.Optimizer) -> Tensor:
    x, weight = batch(model), model.layers[0].weight
    (gradient,) = torch.autograd.grad((x @ weight).tanh().square().mean(), weight, create_graph=True)
    loss = (x @ (weight - 0.1 * gradient)).tanh().exp().mean()
    loss.backward()
    return loss


@loop
def exceptions_in_forward_and_backward(model: Model, optimizer: torch.optim.Optimizer) -> Tensor:
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        model(torch.randn(B, D)) @ torch.randn(3, 3)

    def fail(_: Tensor) -> None:
        raise ValueError("from a hook")

    hidden = model.layers[0](batch(model)).exp()
    hidden.register_hook(fail)
    with pytest.raises(ValueError, match="from a hook"):
        model(hidden).mean().backward()
    del hidden
    optimizer.zero_grad()
    loss = model(torch.randn(B, D)).mean()
    loss.backward()
    return loss


def _checkpoint(use_reentrant: bool) -> Step:
    def step(model: Model, _: torch.optim.Optimizer) -> Tensor:
        x = torch.randn(B, D, requires_grad=True)
        for layer in model.layers:
            x = checkpoint(lambda x, layer=layer: F.dropout(layer(x).tanh(), 0.2).exp(), x, use_reentrant=use_reentrant)
        loss = model(x).mean()
        loss.backward()
        return loss

    step.__name__ = f"checkpoints_of_the_programs_own{'_reentrant' if use_reentrant else ''}"
    return step


loop(_checkpoint(use_reentrant=False))
loop(_checkpoint(use_reentrant=True))


@loop
def hooks_on_gradients_and_modules(model: Model, _: torch.optim.Optimizer) -> Tensor:
    hidden = model.layers[0](batch(model)).tanh()
    hidden.register_hook(lambda gradient: gradient * 2)
    removers = [
        model.layers[1].weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1)),
        model.layers[2].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,)),
        model.layers[1].register_forward_hook(lambda module, inputs, output: output.exp()),
    ]
    y = model.layers[2](model.layers[1](hidden).sin())
    y.retain_grad()
    loss = y.square().mean()
    loss.backward()
    assert y.grad is not None
    for remover in removers:
        remover.remove()
    return loss


@loop
def a_forward_pass_inside_a_backward_hook(model: Model, _: torch.optim.Optimizer) -> Tensor:
    hidden = model.layers[0](batch(model)).tanh()

    def hook(gradient: Tensor) -> Tensor:
        with torch.enable_grad():
            x = gradient.detach().requires_grad_()
            (more,) = torch.autograd.grad((model.layers[1](x).exp().sin() * x).sum(), x)
        return gradient + more * 0.01

    hidden.register_hook(hook)
    loss = model.layers[2](hidden.exp()).square().mean()
    loss.backward()
    return loss


@loop
def backward_in_another_thread(model: Model, _: torch.optim.Optimizer) -> Tensor:
    loss = model(torch.randn(B, D)).mean()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    return loss


# ---- loops ---------------------------------------------------------------------------------------------------------------


@loop
def gradients_accumulated_and_clipped(model: Model, _: torch.optim.Optimizer) -> Tensor:
    for _ in range(3):
        loss = model(torch.randn(B, D)).square().mean() / 3
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    return loss


@loop
def no_grad_islands_that_write(model: Model, _: torch.optim.Optimizer) -> Tensor:
    hidden = model.layers[0](batch(model)).tanh()
    with torch.no_grad():
        target = model.layers[1](hidden).softmax(-1)
        target.mul_(2)
        model.layers[2].weight.mul_(0.99).add_(hidden[:D] * 0.01)
    with torch.inference_mode():
        hidden.mean()
    loss = (model.layers[1](hidden).log_softmax(-1) * target).mean() + (hidden + target).square().mean()
    loss.backward()
    return loss


@loop
def an_evaluation_with_gradients_after_the_step(model: Model, _: torch.optim.Optimizer) -> Tensor:
    loss = model(torch.randn(B, D)).square().mean()
    loss.backward()
    return loss.detach() + model(torch.randn(B, D)).mean().item()


@whole
def two_networks_in_turn() -> Run:
    generator, critic = Model(), Model()
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (critic, generator)]

    def step(_: int) -> Tensor:
        fake = generator(torch.randn(B, D))
        optimizers[0].zero_grad()
        loss = critic(fake.detach()).square().mean() - critic(torch.randn(B, D)).mean()
        loss.backward()
        optimizers[0].step()
        optimizers[1].zero_grad()
        (-critic(fake).mean()).backward()
        optimizers[1].step()
        return loss.detach()

    return Run(step, nn.ModuleList([generator, critic]), optimizers)


@whole
def an_optimizer_with_a_closure() -> Run:
    model = Model()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def step(_: int) -> Tensor:
        x = torch.randn(B, D)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        return optimizer.step(closure).detach()

    return Run(step, model, [optimizer])


@whole
def optimizers_that_step_inside_backward() -> Run:
    model = Model()
    optimizers = {p: torch.optim.SGD([p], lr=0.01) for p in model.parameters()}
    last = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)

    def step_at_once(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_at_once)

    def step(_: int) -> Tensor:
        hidden = model.layers[0](batch(model))
        loss = (model.layers[2](hidden.exp()).tanh() * model.layers[1](hidden.detach()).exp()).mean()
        loss.backward()
        last.step()
        return loss.detach()

    return Run(step, model, [last])


@whole
def embeddings_sparse_and_renormalized() -> Run:
    model = nn.ModuleDict(
        {
            "sparse": nn.Embedding(20, D, sparse=True),
            "bag": nn.EmbeddingBag(20, D, mode="sum"),
            "normed": nn.Embedding(20, D, max_norm=0.5, padding_idx=0),
            "linear": nn.Linear(D, D),
        }
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(_: int) -> Tensor:
        optimizer.zero_grad()
        tokens = torch.randint(0, 20, (128, 5))
        bagged = model["bag"](tokens, per_sample_weights=torch.rand(128, 5))
        hidden = (model["sparse"](tokens) + model["normed"](tokens)).mean(1)
        loss = (model["linear"](hidden).exp() * bagged).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Run(step, model, [optimizer])
