"""Loss scaling around backward: GradScaler is the oracle, and nobody ever sees a scaled gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from memfit.core.errors import PrecisionError
from memfit.core.precision import choose
from memfit.runtime.precision import Precision
from memfit.techniques.precision.leaves import leaves_of
from memfit.techniques.precision.scaling import Scaling


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=3), min_size=1, max_size=12))
def test_the_scale_and_the_skipped_steps_are_gradscalers_for_any_pattern_of_overflows(rounds):
    """rounds: for each optimizer step, which of the backward passes accumulated before it overflow."""
    weight, ours = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer, our_optimizer = torch.optim.SGD([weight], lr=0.1), torch.optim.SGD([ours], lr=0.1)
    scaler, scaling = torch.amp.GradScaler("cpu"), Scaling()
    for overflows in rounds:
        for overflow in overflows:
            factor = float("inf") if overflow else 0.3
            scaler.scale((weight * factor).sum()).backward()
            with scaling.scaled([(ours * factor).sum()]) as scaled:
                scaled[0].backward()
        scaler.step(optimizer)
        scaler.update()
        if not scaling.must_hold_back(our_optimizer):
            our_optimizer.step()
        assert torch.equal(weight, ours)
        optimizer.zero_grad()
        our_optimizer.zero_grad()
        scaling.update()
        assert scaling.scale == scaler.get_scale()


def test_the_scale_doubles_after_two_thousand_steps_without_overflow():
    weight = nn.Parameter(torch.ones(1))
    optimizer, scaling = torch.optim.SGD([weight], lr=0.0), Scaling()
    for _ in range(2000):
        with scaling.scaled([weight.sum()]) as scaled:
            scaled[0].backward()
        assert scaling.scale == 65536.0
        assert not scaling.must_hold_back(optimizer)
    scaling.update()
    assert scaling.scale == 131072.0


def test_gradients_that_are_there_already_come_back_bit_for_bit():
    weight = nn.Parameter(torch.randn(1000))
    weight.grad = before = torch.randn(1000) * torch.logspace(-37, 30, 1000)
    wanted = before + 0.1 * torch.ones(1000)
    with Scaling().scaled([(weight * 0.1).sum()]) as scaled:
        scaled[0].backward()
    assert weight.grad is before  # in place: a flat gradient buffer stays whole
    assert torch.equal(weight.grad, wanted)


def test_overflowed_gradients_that_the_program_throws_away_itself_lower_the_scale_and_hold_no_later_step_back():
    weight = nn.Parameter(torch.ones(2))
    optimizer, scaling = torch.optim.SGD([weight], lr=0.1), Scaling()
    with scaling.scaled([(weight * float("inf")).sum()]) as scaled:
        scaled[0].backward()
    weight.grad = None
    with scaling.scaled([weight.sum()]) as scaled:
        scaled[0].backward()
    assert scaling.scale == 32768.0
    assert torch.equal(weight.grad, torch.ones(2))
    assert not scaling.must_hold_back(optimizer)


def test_a_clip_by_value_does_not_hide_an_overflow():
    weight = nn.Parameter(torch.ones(2))
    optimizer, scaling = torch.optim.SGD([weight], lr=0.1), Scaling()
    with scaling.scaled([(weight * float("inf")).sum()]) as scaled:
        scaled[0].backward()
    nn.utils.clip_grad_value_([weight], 1.0)
    assert torch.equal(weight.grad, torch.ones(2))
    assert scaling.must_hold_back(optimizer)


def test_leaves_are_found_once_each_also_through_views_ties_and_custom_functions():
    a, b, unused = (nn.Parameter(torch.randn(3)) for _ in range(3))
    plain = torch.randn(3)
    loss = (a.view(3, 1) * b).sum() + (a + plain).exp().sum()
    assert {id(leaf) for leaf in leaves_of([loss])} == {id(a), id(b)}
    assert leaves_of([a]) == [a]
    assert leaves_of([plain]) == []
    assert unused.grad is None


def scaled_grads(make_loss, **options):
    """Gradients of a model and of its input under float16 amp, by memfit and by torch.amp with a scale of one."""
    results = []
    for ours in (True, False):
        model = make_model()
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
        if ours:
            with Precision(choose("O1", "fp16")):
                make_loss(model, x).backward(**options)
        else:
            with torch.autocast("cpu", torch.float16):
                loss = make_loss(model, x)
            loss.backward(**options)
        results.append([x.grad, *(p.grad for p in model.parameters())])
    return results


def close(ours, unscaled):
    """float16 loses more of an unscaled gradient, so equal only up to its digits; a factor of 65536 would show."""
    return all(torch.allclose(a, b, rtol=2e-2, atol=1e-4) for a, b in zip(ours, unscaled, strict=True))


def test_the_gradient_of_an_input_is_unscaled_too_although_no_optimizer_holds_it():
    assert close(*scaled_grads(lambda model, x: model(x).float().square().mean() / 8))


def test_gradients_inside_a_reentrant_checkpoint_are_unscaled_too():
    """Its graph hides from the outer one until backward runs it."""
    assert close(*scaled_grads(lambda model, x: checkpoint(model, x, use_reentrant=True).float().square().mean() / 8))


# PyTorch's own advice, given once a process.
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True will create a reference cycle:UserWarning")
def test_gradients_of_a_graph_that_is_derived_again_are_not_scaled():
    ours, unscaled = scaled_grads(lambda model, x: model(x).square().mean(), create_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(ours, unscaled, strict=True))


def test_autograd_grad_inside_the_program_gives_unscaled_gradients_outside_autocast():
    with Precision(choose("O1", "fp16")):
        model = make_model()
        x = torch.ones(4, 4, requires_grad=True)
        out = model(x)
        assert torch.is_autocast_enabled("cpu")
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        assert torch.is_autocast_enabled("cpu")
    with torch.autocast("cpu", torch.float16):
        out = model(x)
    (wanted,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(slope, wanted)


def test_several_losses_in_one_backward_call_are_all_scaled():
    with Precision(choose("O1", "fp16")):
        weight = nn.Linear(2, 1, bias=False)
        out = weight(torch.ones(1, 2))
        torch.autograd.backward([out.float().sum() / 4, 2 * weight.weight.sum()])
    assert torch.equal(weight.weight.grad, torch.full((1, 2), 2.25))


def test_an_optimizer_that_steps_inside_backward_is_refused_in_float16():
    with Precision(choose("O1", "fp16")):
        model = make_model()
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
        loss = F.mse_loss(model(torch.ones(2, 4)), torch.zeros(2, 2))
        with pytest.raises(
            PrecisionError, match="The SGD steps inside the backward pass, where float16 gradients are still multiplied"
        ):
            loss.backward()


def test_float16_without_scaling_would_lose_the_gradients_that_scaling_keeps():
    """What the scale is for: a gradient of 1e-8 is below float16's smallest number."""
    grads = []
    for scaled in (True, False):
        model = nn.Linear(4, 4)
        nn.init.ones_(model.weight)
        if scaled:
            with Precision(choose("O1", "fp16")):
                (model(torch.ones(1, 4)).float().sum() * 1e-8).backward()
        else:
            with torch.autocast("cpu", torch.float16):
                out = model(torch.ones(1, 4))
            (out.float().sum() * 1e-8).backward()
        grads.append(model.weight.grad)
    assert torch.allclose(grads[0], torch.full((4, 4), 1e-8), rtol=1e-3)
    assert torch.equal(grads[1], torch.zeros(4, 4))
