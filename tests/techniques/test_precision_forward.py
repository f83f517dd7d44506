"""Forward passes at O1 to O3: which precision each part runs in, and that no cast of a weight outlives the weight."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from memfit.core.errors import PrecisionError
from memfit.core.precision import choose
from memfit.runtime.precision import Precision

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class CountCasts(TorchDispatchMode):
    """How many casts of a matrix of the given shape to half were made."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].shape == self.shape and result.dtype is torch.bfloat16:
            self.count += 1
        return result


def o1():
    return Precision(choose("O1", "bf16"))


def o2(half: str = "bf16"):
    return Precision(choose("O2", half))


def test_the_loss_after_the_model_is_under_autocast_and_backward_and_step_are_not():
    seen = {}

    class Watched(torch.optim.SGD):
        def step(self, closure=None):
            seen["step"] = torch.is_autocast_enabled("cpu")
            return super().step(closure)

    with o1():
        model = nn.Linear(4, 4)
        optimizer = Watched(model.parameters(), lr=0.1)
        seen["before"] = torch.is_autocast_enabled("cpu")
        out = model(torch.ones(2, 4))
        seen["loss"] = torch.is_autocast_enabled("cpu")
        out.register_hook(lambda gradient: seen.update(backward=torch.is_autocast_enabled("cpu")))
        F.mse_loss(out, torch.zeros(2, 4)).backward()
        optimizer.step()
    assert seen == {"before": False, "loss": True, "backward": False, "step": False}
    assert out.dtype is torch.bfloat16


def test_a_weight_is_cast_once_a_step_however_often_it_is_used():
    with o1():
        model = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with CountCasts(8, 8) as casts:
            for _ in range(2):
                model(model(model(torch.ones(3, 8)))).sum().backward()
                optimizer.step()
    assert casts.count == 2


def test_a_weight_written_between_two_forward_passes_is_cast_anew():
    """No optimizer stepped and no backward ran: plain autocast in one block would go on with the old weight."""
    with o1():
        model = nn.Linear(4, 4, bias=False)
        first = model(torch.ones(1, 4))
        model.load_state_dict({"weight": torch.zeros(4, 4)})
        second = model(torch.ones(1, 4))
    assert first.abs().sum() > 0
    assert torch.equal(second, torch.zeros(1, 4, dtype=torch.bfloat16))


def test_an_evaluation_without_gradients_keeps_no_cast_and_gives_float32():
    with o1():
        layer = nn.Linear(8, 8)
        model = nn.Sequential(layer, layer)
        with torch.no_grad(), CountCasts(8, 8) as casts:
            outputs = [model(torch.ones(2, 8)) for _ in range(3)]
        assert casts.count == 6  # one a use, freed at once; with the cache it would be one a call
        assert not torch.is_autocast_enabled("cpu")
    assert {each.dtype for each in outputs} == {torch.float32}
    assert torch.equal(outputs[0], outputs[0].bfloat16().float())  # computed in bfloat16


def test_an_evaluation_in_the_middle_of_a_step_does_not_take_the_gradients_away():
    """A teacher with the same weights, and a part of the forward pass without gradients."""

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            with torch.no_grad():
                target = self.inner(x)
            return self.inner(x) - 2 * target

    with o1():
        model = Both()
        with torch.no_grad():
            model(torch.ones(1, 4))
        loss = model(torch.ones(1, 4)).sum()
        with torch.no_grad():
            model(torch.ones(1, 4))
        (loss + model.inner(torch.ones(1, 4)).sum()).backward()
    assert torch.equal(model.inner.weight.grad, torch.full((4, 4), 2.0))


class Everything(nn.Module):
    """Attention (reads its child's weight without calling it), a recurrent layer, a tied weight, a written buffer, a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.conv = nn.Conv1d(8, 8, 1)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("level", torch.zeros(8))

    def forward(self, tokens, scale):
        x = self.embed(tokens)  # (B, T, C)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x, _ = self.lstm(x)
        x = self.norm(self.conv(x.transpose(1, 2))).transpose(1, 2)
        self.level.mul_(0.5).add_(x.detach().mean((0, 1)))
        return {"logits": F.linear(x * scale, self.embed.weight), "states": (x,)}


@pytest.mark.parametrize("half", ["bf16", "fp16"])
def test_o2_trains_attention_recurrence_ties_and_buffers_like_float32(half):
    losses = {}
    for name, context in (("O2", o2(half)), ("O0", Precision(choose("O0")))):
        torch.manual_seed(0)
        with context:
            model = Everything()
            seen: dict[str, set[torch.dtype]] = {each: set() for each in ("attention", "lstm", "conv", "norm")}
            for each, types in seen.items():
                hook = lambda m, args, out, types=types: types.add((out[0] if isinstance(out, tuple) else out).dtype)  # noqa: E731
                getattr(model, each).register_forward_hook(hook)
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
            losses[name] = []
            for step in range(20):
                tokens = torch.randint(0, 10, (4, 6), generator=torch.Generator().manual_seed(step % 2))
                out = model(tokens, scale=torch.ones(()))
                loss = F.cross_entropy(out["logits"].flatten(0, 1), tokens.flatten())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses[name].append(loss.item())
            assert set().union(*seen.values()) == {HALVES[half] if name == "O2" else torch.float32}
            assert out["states"][0].dtype is torch.float32
            assert model.lstm._flat_weights[0] is model.lstm.weight_ih_l0  # else it would hold a half copy until the next step
            assert {p.dtype for p in model.parameters()} == {torch.float32}
            assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
            assert model.level.dtype is torch.float32
            assert model.level.abs().sum() > 0
    assert losses["O2"] != losses["O0"]
    assert losses["O0"][-1] < 0.6 * losses["O0"][0]
    assert abs(losses["O2"][-1] - losses["O0"][-1]) < 0.1


class Checkpointed(nn.Module):
    """A checkpointed module, and a checkpointed function that reads a weight without calling its module."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.inner, self.last = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), nn.Linear(8, 2, bias=False)
        self.reentrant = reentrant

    def project(self, x):
        return F.linear(x, self.last.weight)

    def forward(self, x):
        if self.reentrant is None:
            return self.project(self.inner(x))
        x = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return checkpoint(self.project, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("half", ["bf16", "fp16"])
def test_o2_with_the_programs_own_checkpoints_has_the_same_gradients(half, reentrant):
    grads = []
    for kind in (reentrant, None):
        torch.manual_seed(0)
        with o2(half):
            net = Checkpointed(kind)
            x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
            (net(x).square().mean() / 16).backward()
        grads.append([x.grad, *(p.grad for p in net.parameters())])
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(*grads, strict=True))


def test_o2_puts_the_float32_weights_back_when_the_forward_pass_raises():
    class Failing(nn.Linear):
        def forward(self, x):
            raise ValueError("no")

    with o2():
        model = nn.Sequential(nn.Linear(4, 4), Failing(4, 4))
        with pytest.raises(ValueError, match="no"):
            model(torch.ones(1, 4))
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert all(isinstance(p, nn.Parameter) for p in model.parameters())


def test_o2_without_gradients_makes_copies_for_the_call_only():
    with o2() as applied:
        model = nn.Linear(4, 4)
        with torch.no_grad():
            out = model(torch.ones(1, 4))
        assert not applied._forwards._copies
    assert out.dtype is torch.float32


def test_small_updates_arrive_with_master_weights_and_are_rounded_away_in_pure_half():
    """A step of 1e-4 on a weight of one: float16 has no number between 1 and 1 - 4.9e-4."""
    ends = {}
    for level in ("O2", "O3"):
        with Precision(choose(level, "fp16")):
            model = nn.Linear(1, 1, bias=False)
            nn.init.ones_(model.weight)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
            for _ in range(100):
                optimizer.zero_grad()
                model(torch.ones(1, 1)).sum().backward()
                optimizer.step()
        ends[level] = model.weight.item()
    assert ends["O3"] == 1.0
    assert ends["O2"] == pytest.approx(1 - 99e-4, abs=1e-5)  # 65536 is no float16 number, so the first step was held back


def test_gradients_are_clipped_after_they_are_unscaled():
    """Clipped while scaled, the update would be 1 / 65536 of this one."""
    with Precision(choose("O1", "fp16")):
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        before = model.weight.detach().clone()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        while torch.equal(model.weight, before):  # 65536 times this loss overflows in float16, 256 times it does not
            optimizer.zero_grad()
            (model(torch.ones(8, 4)) - 100).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    assert (model.weight - before).norm().item() == pytest.approx(2 / 5**0.5, abs=1e-3)  # four equal gradients and the bias's


def test_an_evaluation_with_gradients_on_has_autocast_for_its_call_only():
    """A program that forgets no_grad must not go on in half after the evaluation."""
    with o1():
        model = nn.Linear(4, 4).eval()
        out = model(torch.ones(2, 4))
        assert not torch.is_autocast_enabled("cpu")
        assert out.dtype is torch.float32
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
        F.cross_entropy(out, torch.zeros(2, dtype=torch.long)).backward()
        ours = model.weight.grad.clone()
    model.weight.grad = None
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(torch.ones(2, 4)), torch.zeros(2, dtype=torch.long))
    loss.backward()
    assert torch.equal(ours, model.weight.grad)  # a model fine-tuned in eval mode loses nothing


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_output_classes_of_transformers_keep_their_type_and_their_other_fields(level):
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=20,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=8,
    )
    torch.manual_seed(0)
    with Precision(choose(level, "bf16")) as applied:
        model = BertForSequenceClassification(config)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        tokens = torch.randint(0, 20, (2, 8))
        out = model(input_ids=tokens, attention_mask=torch.ones(2, 8), labels=torch.tensor([0, 1]))
        out.loss.backward()
        optimizer.step()
        with torch.no_grad():
            evaluated = model(input_ids=tokens)
    assert applied.label == f"{level} bfloat16"
    assert type(out) is type(evaluated)
    assert out["loss"] is out.loss
    assert evaluated.logits.dtype is evaluated["logits"].dtype is torch.float32
    assert model.bert.embeddings.word_embeddings.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_model_that_makes_float32_tensors_of_its_own_is_told_to_use_o1(level):
    class Masked(nn.Linear):
        def forward(self, x):
            return super().forward(x + torch.zeros(x.shape))

    with Precision(choose(level, "bf16")):
        model = Masked(4, 4)
        with pytest.raises(
            PrecisionError,
            match=f"{level} runs the whole of Masked in half, but its forward pass makes float32 tensors.*Use O1",
        ):
            model(torch.ones(1, 4))
    with o1():
        assert Masked(4, 4)(torch.ones(1, 4)).dtype is torch.bfloat16


def test_another_error_of_the_models_own_is_left_as_it_is():
    with o2(), pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        nn.Linear(4, 4)(torch.ones(1, 5))
    assert not isinstance(caught.value, PrecisionError)
