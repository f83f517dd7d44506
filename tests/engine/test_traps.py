"""DESIGN.md section 2, trap by trap: whatever is evicted, and whenever, training equals plain eager bit for bit."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from equality import HOWS, EvictingTape, Program, Run, differences, evicted, plain

B, D = 16, 8  # batch, width
evictions = pytest.mark.parametrize("how", HOWS)


class Model(nn.Module):
    """Three linear layers and whatever else a program needs; `forward` is the program."""

    def __init__(self, forward: Callable[[Model, torch.Tensor], torch.Tensor], **modules: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(3))
        self.program = forward
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.program(self, x)


def training(forward: Callable[[Model, torch.Tensor], torch.Tensor], **modules: Callable[[], nn.Module]) -> Program:
    """The forward trained with SGD and momentum on random input."""

    def make() -> Run:
        model = Model(forward, **{name: make_module() for name, make_module in modules.items()})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

        def step(_: int) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.randn(B, D)).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Run(step, model, [optimizer])

    return make


def steps(step: Callable[[Model, torch.optim.Optimizer], torch.Tensor]) -> Program:
    """A whole step of the program's own, with Adam."""

    def make() -> Run:
        model = Model(lambda model, x: model.layers[1](F.dropout(model.layers[0](x).tanh(), 0.2)).exp())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

        def run(_: int) -> torch.Tensor:
            optimizer.zero_grad()
            loss = step(model, optimizer)
            optimizer.step()
            return loss.detach()

        return Run(run, model, [optimizer])

    return make


def assert_equal_to_plain(program: Program, how: str, num_steps: int = 3) -> None:
    expected = plain(program, num_steps)
    num_evicted = 0
    for seed in range(3 if how in ("half", "mid") else 1):
        found, tape = evicted(program, how, num_steps, seed)
        assert differences(expected, found) == []
        assert tape.counts.num_kept_instead == 0
        num_evicted += tape.counts.num_evicted
    assert num_evicted > 0


@evictions
def test_outputs_saved_by_their_own_node_come_back(how: str) -> None:
    def forward(model: Model, x: torch.Tensor) -> torch.Tensor:
        for layer in model.layers:
            x = layer(x).relu().softmax(-1)
        return x

    assert_equal_to_plain(training(forward), how)


@evictions
def test_dropout_of_every_kind_is_drawn_again_from_its_own_state(how: str) -> None:
    def forward(model: Model, x: torch.Tensor) -> torch.Tensor:
        x = F.alpha_dropout(F.dropout(model.layers[0](x), 0.3), 0.3, training=True)
        x = F.rrelu(model.layers[1](x), training=True)
        x = F.feature_alpha_dropout(x, 0.3, training=True) + torch.randn_like(x)
        return F.dropout1d(F.gumbel_softmax(x).view(4, 4, D), 0.5) * torch.bernoulli(x.sigmoid()).view(4, 4, D)

    assert_equal_to_plain(training(forward), how)


@evictions
def test_attention_with_dropout_comes_back(how: str) -> None:
    def forward(model: Model, x: torch.Tensor) -> torch.Tensor:
        x = model.encoder(x.view(2, 8, D), src_key_padding_mask=torch.zeros(2, 8, dtype=torch.bool))
        x, weights = model.attention(x, x, x)
        q, k, v = (layer(x).view(2, 8, 2, 4).transpose(1, 2) for layer in model.layers)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.2, is_causal=True) * weights.mean()

    program = training(
        forward,
        encoder=lambda: nn.TransformerEncoderLayer(D, 2, 16, 0.1, batch_first=True),
        attention=lambda: nn.MultiheadAttention(D, 2, dropout=0.1, batch_first=True),
    )
    assert_equal_to_plain(program, how)


@evictions
def test_views_of_one_storage_come_back_with_their_geometry(how: str) -> None:
    def forward(model: Model, x: torch.Tensor) -> torch.Tensor:
        x = model.layers[0](x) * 2
        a, b = x.chunk(2, 1)
        row = x.unbind(0)[0].expand(B, D)
        strided = torch.as_strided(x, (4, 4), (1, 8)).exp().sum()
        return (a @ b.t()).sum(1, True) * strided * 1e-3 + (row * x) * x.view(-1, 2, 4).transpose(1, 2).reshape(B, D)

    assert_equal_to_plain(training(forward), how)


@evictions
def test_calls_in_place_come_back_and_leave_their_sources_right(how: str) -> None:
    def forward(model: Model, x: torch.Tensor) -> torch.Tensor:
        x = model.layers[0](x)
        for layer in model.layers:
            identity, out = x, F.dropout(layer(x) * 2, 0.2, inplace=True)
            out = layer(out).relu_()
            out = layer(out)
            out += identity
            x = F.silu(out, inplace=True)
        x = F.hardtanh(x * 1, inplace=True)
        y = model.layers[1](x)
        y[:, 0] = x[:, 1] * 2
        y[y > 1] = 0.5
        return y.mul_(0.5).masked_fill_(x > 1, 0.0) + x

    assert_equal_to_plain(training(forward), how)


@evictions
def test_a_source_overwritten_after_it_was_recorded_is_no_source(how: str) -> None:
    def forward(model: Model, x: torch.Tensor) -> torch.Tensor:
        a = model.layers[0](x)
        b = a * 2
        c = b.exp()
        a.add_(1)
        d = (b + a).sigmoid()
        a.detach().mul_(3)
        b[:, :3].zero_()
        a.view(-1)[5:9].fill_(0.1)
        return c * d + b + (a + 0).exp()

    assert_equal_to_plain(training(forward), how)


def _zero(mask: torch.Tensor) -> None:
    mask.zero_()


def _copy_without_gradient(mask: torch.Tensor) -> None:
    with torch.no_grad():
        mask.copy_(torch.ones(B, D))


def _write_to_out(mask: torch.Tensor) -> None:
    torch.add(mask, 1, out=mask)


def _foreach(mask: torch.Tensor) -> None:
    torch._foreach_add_([mask], 1.0)


def _through_data(mask: torch.Tensor) -> None:
    mask.data.add_(1)


@evictions
@pytest.mark.parametrize("write", [_zero, _copy_without_gradient, _write_to_out, _foreach, _through_data])
def test_content_from_outside_overwritten_before_backward_is_remembered(write, how: str) -> None:
    def step(model: Model, _: torch.optim.Optimizer) -> torch.Tensor:
        mask = torch.rand(B, D)
        hidden = (model.layers[0](torch.randn(B, D)) + mask).square()
        loss = (model.layers[1](hidden) + mask).exp().mean()
        write(mask)
        loss.backward()
        return loss

    assert_equal_to_plain(steps(step), how)


@evictions
@pytest.mark.parametrize("options", [{}, {"momentum": None}, {"track_running_stats": False}, {"affine": False}], ids=str)
@pytest.mark.parametrize("is_training", [True, False])
def test_batch_norm_statistics_are_written_once(options: dict, is_training: bool, how: str) -> None:
    def forward(model: Model, x: torch.Tensor) -> torch.Tensor:
        for layer in model.layers:
            x = model.norm(layer(x)).relu()
        return x

    assert_equal_to_plain(training(forward, norm=lambda: nn.BatchNorm1d(D, **options).train(is_training)), how)


@evictions
def test_casts_of_autocast_come_back_from_the_cast(how: str) -> None:
    def forward(model: Model, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            for layer in model.layers:
                x = F.layer_norm(layer(F.dropout(F.gelu(layer(x)), 0.1)), (D,))
            with torch.autocast("cpu", enabled=False):
                x = x.float().exp()
        return x.float()

    assert_equal_to_plain(training(forward), how)


@evictions
def test_tied_frozen_and_sliced_parameters_are_never_cells(how: str) -> None:
    def make() -> Run:
        run = training(
            lambda model, x: F.linear(
                model.layers[2](model.layers[1](model.layers[0](x).exp())).tanh(), model.layers[0].weight[:4]
            )
        )()
        run.model.layers[1].weight = run.model.layers[0].weight
        run.model.layers[2].requires_grad_(False)
        return run

    assert_equal_to_plain(make, how)


@evictions
def test_a_chain_of_two_thousand_calls_comes_back_without_recursion(how: str) -> None:
    def step(model: Model, _: torch.optim.Optimizer) -> torch.Tensor:
        x = model.layers[0].bias * 1
        for number in range(1000):
            x = (x * 1.0001).sin_() if number % 2 else (x + 0.1).tanh()
        loss = x.sum()
        loss.backward()
        return loss

    assert_equal_to_plain(steps(step), how, num_steps=1)


@evictions
def test_a_hidden_state_carried_over_steps_is_cut_from_its_recipe(how: str) -> None:
    def make() -> Run:
        cell = nn.GRUCell(D, D)
        optimizer = torch.optim.Adam(cell.parameters())
        carried = {"hidden": torch.zeros(B, D)}

        def step(_: int) -> torch.Tensor:
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

    assert_equal_to_plain(make, how)


@evictions
def test_retained_graphs_and_several_backwards_over_them(how: str) -> None:
    def step(model: Model, _: torch.optim.Optimizer) -> torch.Tensor:
        y = model(torch.randn(B, D))
        one, other = y.square().mean(), y.tanh().mean()
        one.backward(retain_graph=True)
        one.backward(retain_graph=True)
        other.backward()
        return one

    assert_equal_to_plain(steps(step), how)


@evictions
def test_double_backward(how: str) -> None:
    def step(model: Model, _: torch.optim.Optimizer) -> torch.Tensor:
        x = torch.randn(B, D, requires_grad=True)
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        loss = gradient.square().mean()
        loss.backward()
        return loss

    assert_equal_to_plain(steps(step), how)


@evictions
def test_exceptions_in_forward_and_backward_leave_the_next_step_right(how: str) -> None:
    def step(model: Model, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            model(torch.randn(B, D)) @ torch.randn(3, 3)

        def fail(_: torch.Tensor) -> None:
            raise ValueError("from a hook")

        hidden = model.layers[0](torch.randn(B, D)).exp()
        hidden.register_hook(fail)
        with pytest.raises(ValueError, match="from a hook"):
            model(hidden).mean().backward()
        optimizer.zero_grad()
        loss = model(torch.randn(B, D)).mean()
        loss.backward()
        return loss

    assert_equal_to_plain(steps(step), how)


@evictions
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_the_users_own_checkpoints(use_reentrant: bool, how: str) -> None:
    def step(model: Model, _: torch.optim.Optimizer) -> torch.Tensor:
        x = torch.randn(B, D, requires_grad=True)
        for layer in model.layers:
            x = checkpoint(lambda x, layer=layer: F.dropout(layer(x).tanh(), 0.2).exp(), x, use_reentrant=use_reentrant)
        loss = (x * 2).exp().mean()
        loss.backward()
        return loss

    assert_equal_to_plain(steps(step), how)


@evictions
def test_the_users_own_saved_tensor_hooks(how: str) -> None:
    def forward(model: Model, x: torch.Tensor) -> torch.Tensor:
        x = model.layers[0](x).tanh()
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.double(), lambda tensor: tensor.float()):
            x = model.layers[1](x).exp()
        return model.layers[2](x).sigmoid()

    assert_equal_to_plain(training(forward), how)


class _ScaledExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        result = x.exp()
        ctx.save_for_backward(y, result)
        return result * y

    @staticmethod
    def backward(ctx, gradient):
        y, result = ctx.saved_tensors
        return gradient * result * y, gradient * result


class _AddInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.add_(1)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


@evictions
def test_custom_functions_that_save_and_that_write(how: str) -> None:
    def forward(model: Model, x: torch.Tensor) -> torch.Tensor:
        a, b = model.layers[0](x), model.layers[1](x)
        c = (a * 2).exp()
        a = _AddInPlace.apply(a)
        return _ScaledExp.apply(a, b).tanh() * c * (a * 1.5).sin()

    assert_equal_to_plain(training(forward), how)


@evictions
def test_another_way_through_the_program_each_step(how: str) -> None:
    def forward(model: Model, x: torch.Tensor) -> torch.Tensor:
        for layer in model.layers:
            x = F.dropout(layer(x).tanh(), 0.1) + x if random.random() < 0.5 else F.gelu(layer(x)).sin_()
        return x

    assert_equal_to_plain(training(forward), how, num_steps=5)


@pytest.mark.parametrize("how", ["now", "half"])
def test_two_hundred_steps_keep_no_tensor_and_no_object(how: str) -> None:
    def forward(model: Model, x: torch.Tensor) -> torch.Tensor:
        for layer in model.layers:
            x = F.dropout(layer(x).relu_().softmax(-1), 0.1)
        return x

    run = training(forward)()
    tape = EvictingTape(how)
    counts = []
    tape.enter()
    gc.collect()
    gc.disable()  # a cycle would show
    try:
        for number in range(200):
            run.step(number)
            tape.end_step()
            tape._kept.clear()
            if number in (50, 199):
                objects = gc.get_objects()
                counts.append((sum(issubclass(type(each), torch.Tensor) for each in objects), len(objects), len(tape._cells)))
                del objects
    finally:
        gc.enable()
        tape.exit()
    (tensors, objects, cells), (later_tensors, later_objects, later_cells) = counts
    assert (later_tensors, later_cells) == (tensors, cells)
    assert abs(later_objects - objects) < 50
