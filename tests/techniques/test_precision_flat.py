"""Flat parameter buffers together with amp: they train, and a combination that would stop learning is named."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from contiguous_params import ContiguousParams
from torch import nn

from memfit.core.errors import PrecisionError
from memfit.core.precision import choose
from memfit.integrations.apex import amp
from memfit.runtime.precision import Precision


@pytest.fixture(autouse=True)
def after_each():
    yield
    amp.reset()


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def train(model, optimizer, num_steps=5, backward=lambda loss: loss.backward(), zero=None):
    losses = []
    for step in range(num_steps):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(32, 8, generator=generator), torch.randint(0, 4, (32,), generator=generator)
        loss = F.cross_entropy(model(x), y)
        backward(loss)
        optimizer.step()
        zero() if zero is not None else optimizer.zero_grad(set_to_none=False)
        losses.append(loss.item())
    return losses


def with_apex(level: str, flat: bool) -> tuple[list[float], list[torch.Tensor]]:
    model = make_model()
    held = ContiguousParams(model.parameters()) if flat else None
    optimizer = torch.optim.AdamW(held.contiguous() if held is not None else model.parameters(), lr=1e-2)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)

    def backward(loss):
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()

    losses = train(model, optimizer, backward=backward)
    if held is not None:
        held.assert_buffer_is_valid()
    amp.reset()
    return losses, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_apex_names_with_contiguous_params_train_as_without_bit_for_bit(level):
    flat_losses, flat_weights = with_apex(level, flat=True)
    losses, weights = with_apex(level, flat=False)
    assert flat_losses == losses
    assert all(torch.equal(a, b) for a, b in zip(flat_weights, weights, strict=True))
    assert not any(torch.equal(weight, first) for weight, first in zip(weights, make_model().parameters(), strict=True))


@pytest.mark.parametrize("half", ["bf16", "fp16"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_unmodified_program_with_contiguous_params_trains_as_without_bit_for_bit(level, half):
    results = []
    for flat in (True, False):
        with Precision(choose(level, half)) as applied:
            model = make_model()
            held = ContiguousParams(model.parameters()) if flat else None
            optimizer = torch.optim.AdamW(held.contiguous() if held is not None else model.parameters(), lr=1e-2)
            losses = train(model, optimizer)
        assert applied.label.startswith(level)
        results.append((losses, [p.detach().clone() for p in model.parameters()]))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_parameters_given_new_storage_after_the_flat_buffer_was_made_are_named(level):
    with Precision(choose(level, "bf16")):
        model = make_model()
        held = ContiguousParams(model.parameters())
        optimizer = torch.optim.SGD(held.contiguous(), lr=0.1)
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()  # what a move to another device or a cast does
        with pytest.raises(
            PrecisionError, match=r"would update storage that the model no longer reads: .* gave gradients to 4 parameters"
        ):
            train(model, optimizer)


def test_the_same_is_named_under_apex_names_before_the_step():
    model = make_model()
    held = ContiguousParams(model.parameters())
    optimizer = torch.optim.SGD(held.contiguous(), lr=0.1)
    model.double().float()
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    with (
        pytest.raises(PrecisionError, match="no longer reads"),
        amp.scale_loss(model(torch.ones(2, 8)).sum(), optimizer) as scaled_loss,
    ):
        scaled_loss.backward()


def test_a_zero_grad_that_parts_the_buffer_from_its_gradient_is_named():
    """PyTorch's default drops the buffer's gradient, while the parameters' go on filling the old one: step 2 would do nothing."""
    with Precision(choose("O1", "bf16")):
        model = make_model()
        optimizer = torch.optim.SGD(ContiguousParams(model.parameters()).contiguous(), lr=0.1)
        with pytest.raises(
            PrecisionError, match=r"flat parameter buffer of 212 numbers has no gradient.*zero_grad\(set_to_none=False\)"
        ):
            train(model, optimizer, zero=optimizer.zero_grad)


def test_a_models_zero_grad_that_leaves_the_buffer_an_old_gradient_is_named():
    with Precision(choose("O1", "fp16")):
        model = make_model()
        optimizer = torch.optim.SGD(ContiguousParams(model.parameters()).contiguous(), lr=0.1)
        with pytest.raises(
            PrecisionError, match="still has the gradient of an earlier step, while the 4 parameters in it have new gradients"
        ):
            train(model, optimizer, zero=model.zero_grad)


def test_plain_pytorch_says_nothing_there_and_stops_learning():
    """Why it is named: the same program without memfit runs on, and only its first step changes anything."""
    model = make_model()
    optimizer = torch.optim.SGD(ContiguousParams(model.parameters()).contiguous(), lr=0.1)
    train(model, optimizer, num_steps=1, zero=optimizer.zero_grad)
    after_one = [p.detach().clone() for p in model.parameters()]
    train(model, optimizer, num_steps=3, zero=optimizer.zero_grad)
    assert all(torch.equal(a, b) for a, b in zip(after_one, model.parameters(), strict=True))


def test_o3_with_a_flat_buffer_is_refused_since_it_would_part_them():
    with Precision(choose("O3", "bf16")):
        model = make_model()
        optimizer = torch.optim.SGD(ContiguousParams(model.parameters()).contiguous(), lr=0.1)
        with pytest.raises(
            PrecisionError, match=r"O3 without master weights would give the parameter 0.weight storage of its own"
        ):
            train(model, optimizer)


def test_a_gan_whose_backward_passes_reach_both_halves_is_no_false_alarm():
    with Precision(choose("O1", "fp16")):
        torch.manual_seed(0)
        generator, critic = nn.Linear(4, 4), nn.Linear(4, 1)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (critic, generator)]
        first = [generator.weight.detach().clone(), critic.weight.detach().clone()]
        for _ in range(4):
            fake = generator(torch.randn(8, 4))
            for optimizer, seen, sign in ((optimizers[0], fake.detach(), 1), (optimizers[1], fake, -1)):
                for each in optimizers:
                    each.zero_grad()
                (sign * critic(seen).mean()).backward()
                optimizer.step()
        assert not torch.equal(first[0], generator.weight)
        assert not torch.equal(first[1], critic.weight)
