"""Trap programs: forward passes that make recomputation hard, by name. `LOOPS` in loops.py has whole training steps.

DESIGN.md section 2 lists the traps; each program holds one or a few of one kind. Activations are large beside parameters, so that
a budget bites, and large enough that hidden workspaces are looked for.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from equality import Program, Run

B, D = 2048, 32  # batch, width: 256 KiB an activation
FORWARDS: dict[str, Program] = {}
Tensor = torch.Tensor
Forward = Callable[["Model", Tensor], Tensor]


class Model(nn.Module):
    """Three linear layers and whatever else a program needs; `forward` is the program.

    Its input comes through `head`: twelve calls without a trap, whose activations a budget can be met with.
    """

    def __init__(self, forward: Forward | None = None, **modules: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(3))
        self.head = nn.Sequential(*(nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Dropout(0.1)) for _ in range(4)))
        self.program = forward
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(x)
        if self.program is not None:
            return self.program(self, x)
        return self.layers[1](F.dropout(self.layers[0](x).tanh(), 0.2)).exp()


def training(make_model: Callable[[], nn.Module], make_input: Callable[[], Tensor] = lambda: torch.randn(B, D)) -> Program:
    """The model trained with SGD and momentum on random input."""

    def make() -> Run:
        model = make_model()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01, momentum=0.9)

        def step(_: int) -> Tensor:
            optimizer.zero_grad()
            loss = model(make_input()).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Run(step, model, [optimizer])

    return make


def forward(**modules: Callable[[], nn.Module]) -> Callable[[Forward], Forward]:
    """File a function as the forward pass of a program of its name."""

    def file(function: Forward) -> Forward:
        FORWARDS[function.__name__] = training(
            lambda: Model(function, **{name: make_module() for name, make_module in modules.items()})
        )
        return function

    return file


# ---- what calls save, and draw -----------------------------------------------------------------------------------------


@forward()
def outputs_saved_by_their_own_node(model: Model, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer(x).relu().softmax(-1)
    return x


@forward()
def dropout_of_every_kind(model: Model, x: Tensor) -> Tensor:
    x = F.alpha_dropout(F.dropout(model.layers[0](x), 0.3), 0.3, training=True)
    x = F.rrelu(model.layers[1](x), training=True)
    x = F.feature_alpha_dropout(x, 0.3, training=True) + torch.randn_like(x)
    x = F.dropout1d(F.gumbel_softmax(x).view(-1, 4, D), 0.5) * torch.bernoulli(x.sigmoid()).view(-1, 4, D)
    return x.view(B, D) * torch.empty(B, D).normal_() + torch.normal(x.view(B, D), 0.1)


@forward()
def dropout_in_place_of_a_product_and_of_everything(model: Model, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = x + F.dropout(layer(x).sigmoid() * 1.1, 0.5, inplace=True)
    return x + F.dropout(x, 1.0) + F.dropout(x.exp(), 0.5, training=False)


@forward()
def a_generator_of_the_programs_own(model: Model, x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    x = (model.layers[0](x) * torch.rand(B, D, generator=generator)).exp()
    x = (model.layers[1](x) * torch.empty(B, D).bernoulli_(0.5, generator=generator)).tanh()
    return model.layers[2](x + torch.bernoulli(x.detach().sigmoid(), generator=generator)).relu()


@forward()
def draws_that_depend_on_what_was_computed(model: Model, x: Tensor) -> Tensor:
    chances = model.layers[0](x).softmax(-1)
    hard = torch.bernoulli(chances) + chances - chances.detach()
    return model.layers[1](hard).square().gather(1, torch.multinomial(chances, 1)) * chances


@forward()
def a_seed_set_in_the_middle(model: Model, x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        x = F.dropout(model.layers[0](x).exp(), 0.5)
    state = torch.get_rng_state()
    torch.manual_seed(7)
    x = F.dropout(model.layers[1](x).tanh(), 0.5)
    torch.set_rng_state(state)
    return F.dropout(x, 0.5)


@forward(
    encoder=lambda: nn.TransformerEncoderLayer(D, 2, 16, 0.1, batch_first=True),
    attention=lambda: nn.MultiheadAttention(D, 2, dropout=0.1, batch_first=True),
)
def attention_with_dropout_and_masks(model: Model, x: Tensor) -> Tensor:
    x = model.encoder(x.view(-1, 8, D), src_key_padding_mask=torch.zeros(B // 8, 8, dtype=torch.bool))
    x, weights = model.attention(x, x, x)
    q, k, v = (layer(x).view(-1, 8, 2, D // 2).transpose(1, 2) for layer in model.layers)
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.2, is_causal=True) * weights.mean()


@forward()
def a_choice_of_attention_kernels(model: Model, x: Tensor) -> Tensor:
    q, k, v = (layer(x).view(-1, 16, 2, D // 2).transpose(1, 2) for layer in model.layers)
    with sdpa_kernel(SDPBackend.MATH):
        y = F.scaled_dot_product_attention(q, k, v)
    return (y * F.scaled_dot_product_attention(k, q, v)).exp()


@forward()
def several_results_of_one_call(model: Model, x: Tensor) -> Tensor:
    x = model.layers[0](x)
    values, _ = x.max(1)
    ordered, _ = torch.sort(x, 1)
    deviation, mean = torch.std_mean(x, 1)
    q, r = torch.linalg.qr(x[:D])
    return values[:, None] * ordered.exp() + x.topk(3).values.sum() + (mean * deviation.exp())[:, None] + (q @ r)[0]


@forward()
def losses_of_many_kinds(model: Model, x: Tensor) -> Tensor:
    x = model.layers[0](x)
    target = torch.randint(1, D, (B,))
    scores = F.log_softmax(model.layers[1](x).view(32, B // 32, D), -1)
    lengths = torch.full((B // 32,), 32), torch.full((B // 32,), 5)
    return (
        F.cross_entropy(x, target, label_smoothing=0.1)
        + F.nll_loss(F.log_softmax(model.layers[1](x), 1), target)
        + F.binary_cross_entropy_with_logits(x, torch.rand(B, D))
        + F.ctc_loss(scores, torch.randint(1, D, (B // 32, 5)), *lengths)
        + F.gaussian_nll_loss(x, x.detach() * 0, x.exp())
    )


# ---- storages, views, writes -------------------------------------------------------------------------------------------


@forward()
def views_of_one_storage(model: Model, x: Tensor) -> Tensor:
    x = model.layers[0](x) * 2
    a, b = x.chunk(2, 1)
    strided = torch.as_strided(x, (4, 4), (1, 8)).exp().sum()
    product = (a @ b[:D].t()).sum(1, True) * strided * 1e-3
    return product + (x.unbind(0)[0].expand(B, D) * x) * x.view(-1, 2, D // 2).transpose(1, 2).reshape(B, D)


@forward()
def lists_and_numbers_that_change_later(model: Model, x: Tensor) -> Tensor:
    parts = [layer(x) for layer in model.layers]
    joined = torch.cat(parts, 1).exp()
    parts.clear()
    rows, count, x = [0, 1], torch.tensor(4), model.layers[0](x)
    some, few = (x[rows] * 3).exp(), (x[:, :count] + 1).exp()
    rows[0] = 5
    count.fill_(2)
    return joined[:, :D].tanh() * x.tanh() + some.mean() + few.mean()


@forward()
def memory_that_is_not_contiguous(model: Model, x: Tensor) -> Tensor:
    y = model.layers[0](x).t().contiguous().t()
    spread = torch.empty_strided((B, D), (1, B)).copy_(y)
    return y.exp() * spread.tanh() + model.layers[1](spread).sigmoid()


@forward()
def calls_in_place(model: Model, x: Tensor) -> Tensor:
    x = model.layers[0](x)
    for layer in model.layers:
        identity, out = x, F.dropout(layer(x) * 2, 0.2, inplace=True)
        out = layer(out).relu_()
        out = layer(out)
        out += identity
        x = F.silu(out, inplace=True)
    return F.hardtanh(x * 1, inplace=True)


@forward()
def assignments_to_parts(model: Model, x: Tensor) -> Tensor:
    x = model.layers[0](x)
    y = model.layers[1](x)
    y[:, 0] = x[:, 1] * 2
    y[y > 1] = 0.5
    z = x.clone()
    z[torch.arange(5)] = x[torch.arange(5) + 3].sigmoid()
    z.index_add_(0, torch.arange(5), x[:5])
    z.scatter_(1, torch.zeros(B, 1, dtype=torch.long), x[:, :1])
    return y.mul_(0.5).masked_fill_(x > 1, 0.0) + model.layers[2](z).exp() * x


@forward()
def a_source_overwritten_after_it_was_read(model: Model, x: Tensor) -> Tensor:
    a = model.layers[0](x)
    b = a * 2
    c = b.exp()
    a.add_(1)
    d = (b + a).sigmoid()
    a.detach().mul_(3)
    b[:, :3].zero_()
    a.view(-1)[5:9].fill_(0.1)
    return c * d + b + (a + 0).exp()


@forward()
def one_tensor_on_both_sides_of_a_write(model: Model, x: Tensor) -> Tensor:
    b = model.layers[0](x) * 1
    b += b
    c = b * 1
    c.mul_(c.detach() + 1)
    d = c.exp()
    c.copy_(b)
    left, right = c[:, : D // 2].clone(), c[:, D // 2 :].clone()
    c[:, : D // 2] = right
    c[:, D // 2 :] = left.tanh()
    return d * c.tanh()


@forward()
def writes_by_foreach_and_unsafe_splits(model: Model, x: Tensor) -> Tensor:
    outs = [layer(x) for layer in model.layers]
    doubled = torch._foreach_mul(outs, 2.0)
    torch._foreach_add_(doubled, 1.0)
    mixed = doubled[2].lerp_(torch.lerp(doubled[0], doubled[1], 0.3), 0.5)
    left, _ = torch.unsafe_chunk(
        mixed * 1, 2, 1
    )  # not of what a call has saved: eager would not notice, and use it overwritten
    return left.mul_(2.0).exp().mean() + torch.addcmul(outs[0], outs[1], mixed).clamp_(min=-1).addcdiv_(outs[2], mixed.exp())


@forward()
def a_buffer_filled_row_by_row(model: Model, x: Tensor) -> Tensor:
    out, row = torch.zeros(6, D), x[:1]
    for number in range(6):
        row = model.layers[0](row).tanh()
        out[number] = row[0]
    return model.layers[1](out).exp().mean() * model.layers[2](x).exp()


@forward()
def data_of_a_tensor_replaced(model: Model, x: Tensor) -> Tensor:
    y = model.layers[0](x)
    z = (y * 2).exp()
    y.data = torch.zeros(B, D)
    return z + (y + 1).exp() * model.layers[1](x)


# ---- modules -----------------------------------------------------------------------------------------------------------

for _name, _options in {
    "": {},
    "_cumulative": {"momentum": None},
    "_without_statistics": {"track_running_stats": False},
}.items():
    for _is_training in (True, False):

        @forward(norm=lambda options=_options, is_training=_is_training: nn.BatchNorm1d(D, **options).train(is_training))
        def _norms(model: Model, x: Tensor) -> Tensor:
            for layer in model.layers:
                x = model.norm(layer(x)).relu()
            return x

        FORWARDS[f"batch_norm{_name}{'' if _is_training else '_in_evaluation'}"] = FORWARDS.pop("_norms")


@forward(
    instance=lambda: nn.InstanceNorm1d(4, track_running_stats=True, affine=True),
    group=lambda: nn.GroupNorm(4, D),
    root=lambda: nn.RMSNorm(D),
)
def other_norms(model: Model, x: Tensor) -> Tensor:
    x = model.instance(model.layers[0](x).view(B, 4, -1)).reshape(B, D)
    return model.root(F.layer_norm(model.group(model.layers[1](x)), (D,))).relu()


@forward()
def casts_of_autocast(model: Model, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        for layer in model.layers:
            x = F.layer_norm(layer(F.dropout(F.gelu(layer(x)), 0.1)), (D,))
        with torch.autocast("cpu", enabled=False):
            x = x.float().exp()
    return x.to(torch.bfloat16).exp().double().sin().float()


@forward()
def parameters_read_through_views(model: Model, x: Tensor) -> Tensor:
    weight = model.layers[0].weight
    x = torch.cat([F.linear(x, weight[:8]), F.linear(x, weight[8:].clone())], 1) * weight.view(-1)[:D]
    return (x @ weight.t()).exp() * weight.unbind(0)[0]


@forward()
def one_module_called_six_times(model: Model, x: Tensor) -> Tensor:
    for _ in range(6):
        x = model.layers[0](F.dropout(x, 0.1)).tanh()
    return x


@forward()
def another_way_through_the_program_each_step(model: Model, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = F.dropout(layer(x).tanh(), 0.1) + x if random.random() < 0.5 else F.gelu(layer(x)).sin_()
    return x


@dataclasses.dataclass
class _Output:
    hidden: Tensor
    more: dict[str, Any]


class _Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, *, x: Tensor, scale: float) -> _Output:
        hidden = torch.add(input=self.linear(x), other=x, alpha=2).exp()
        return _Output(hidden, {"list": [hidden * scale, None, "text"], "largest": hidden.max(1)})


@forward(named=_Named)
def keyword_arguments_and_nested_outputs(model: Model, x: Tensor) -> Tensor:
    out = model.named(x=x.tanh(), scale=0.5)
    return out.hidden * out.more["list"][0].tanh() + out.more["largest"].values[:, None]


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


@forward()
def custom_functions_that_save_and_that_write(model: Model, x: Tensor) -> Tensor:
    a, b = model.layers[0](x), model.layers[1](x)
    c = (a * 2).exp()
    a = _AddInPlace.apply(a)
    rounded = b + (b.round() - b).detach()
    return _ScaledExp.apply(a, rounded).tanh() * c * (a * 1.5).sin()


@forward()
def saved_tensor_hooks_of_the_programs_own(model: Model, x: Tensor) -> Tensor:
    x = model.layers[0](x).tanh()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.double(), lambda tensor: tensor.float()):
        x = model.layers[1](x).exp()
    with torch.autograd.graph.save_on_cpu():
        x = model.layers[2](x).sigmoid()
    return x.exp()


class _Subclass(torch.Tensor):
    pass


class _Transparent(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class _TransparentDispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@forward()
def subclasses_and_modes_of_the_programs_own(model: Model, x: Tensor) -> Tensor:
    y = (model.layers[0](x).as_subclass(_Subclass) * 2).sin()
    y = y.mul_(0.5).as_subclass(torch.Tensor)
    with _Transparent():
        y = model.layers[1](y).tanh()
    with _TransparentDispatch():
        return model.layers[2](y).exp().sin()


@forward()
def complex_numbers_and_negative_views(model: Model, x: Tensor) -> Tensor:
    x = model.layers[0](x)
    spectrum = torch.fft.rfft(x)
    power = (spectrum * spectrum.conj()).real.exp().mean()
    imaginary = torch.view_as_complex((x * 2).view(B, D // 2, 2)).conj().imag
    return torch.fft.irfft(spectrum * 2, n=D).tanh() * x.exp() + power * 0.01 + (imaginary * 2).exp().sum(1, True)


@forward()
def empty_tensors_and_scalars(model: Model, x: Tensor) -> Tensor:
    x = model.layers[0](x)
    joined = torch.cat([x[:0].exp() * 2, x], 0).tanh()
    return joined * x.mean().exp() * x.sum().sin() + model.layers[1](x[:0]).sum()


@forward()
def transforms_of_torch_func(model: Model, x: Tensor) -> Tensor:
    x = torch.func.vmap(lambda row: model.layers[0](row).tanh().exp())(x)
    scaled = {name: parameter * 1.01 for name, parameter in model.layers[1].named_parameters()}
    return torch.func.functional_call(model.layers[1], scaled, (x,)).exp()


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(2))
        self.norm, self.last_norm = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.last_norm(self.other(self.relu(self.norm(self.one(x)))))
        out += x
        return self.relu(out)


def _convolutions() -> nn.Module:
    upwards = nn.Sequential(
        nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, groups=2, padding=1), nn.Dropout2d(0.2), nn.Upsample(scale_factor=2)
    )
    return nn.Sequential(
        nn.Conv2d(3, 8, 1), _Residual(), _Residual(), upwards, nn.ConvTranspose2d(8, 4, 2), nn.AdaptiveAvgPool2d(2)
    )


FORWARDS["convolutions_with_residuals_in_place"] = training(_convolutions, lambda: torch.randn(32, 3, 16, 16))
FORWARDS["a_recurrent_network"] = training(lambda: Model(_recur, lstm=nn.GRU(D, D, 2, dropout=0.2, batch_first=True)))
FORWARDS["parametrized_modules"] = training(
    lambda: nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(D, D)),
        nn.Tanh(),
        nn.utils.parametrizations.weight_norm(nn.Linear(D, D)),
        nn.GELU(),
    )
)


def _recur(model: Model, x: Tensor) -> Tensor:
    return model.lstm(model.layers[0](x).view(-1, 8, D))[0].tanh()


def _tied_and_frozen() -> nn.Module:
    model = Model(
        lambda model, x: F.linear(model.layers[2](model.layers[1](model.layers[0](x).exp())).tanh(), model.layers[0].weight[:4])
    )
    model.layers[1].weight = model.layers[0].weight
    model.layers[2].requires_grad_(False)
    return model


FORWARDS["tied_frozen_and_sliced_parameters"] = training(_tied_and_frozen)
