"""apex's names: the numbers of torch.amp by hand, the behaviour of apex's documentation, bad input, and who gets to see them."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memfit.core.errors import PrecisionError
from memfit.integrations.apex import amp
from memfit.integrations.apex.optimizers import FusedAdam, FusedLAMB


@pytest.fixture(autouse=True)
def after_each():
    yield
    amp.reset()


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(16, 8, generator=generator), torch.randint(0, 4, (16,), generator=generator)


def equal(one: nn.Module, two: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))


def train_with_apex(model, optimizer, steps, clip=0.5, overflow_in=()):
    for step in steps:
        x, y = batch(step)
        loss = F.cross_entropy(model(x), y) * (1e36 if step in overflow_in else 1)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), clip)
        optimizer.step()


def train_by_hand(model, optimizer, steps, clip=0.5, overflow_in=()):
    scaler = torch.amp.GradScaler("cpu")
    for step in steps:
        x, y = batch(step)
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(x), y) * (1e36 if step in overflow_in else 1)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
    return scaler


def test_o1_equals_autocast_and_gradscaler_by_hand_bit_for_bit(capsys):
    by_hand, ours = make_model(), make_model()
    optimizer = torch.optim.AdamW(by_hand.parameters(), lr=1e-2)
    scaler = train_by_hand(by_hand, optimizer, range(8), overflow_in=(2, 3))
    model, optimizer = amp.initialize(ours, torch.optim.AdamW(ours.parameters(), lr=1e-2), opt_level="O1")
    assert model is ours
    train_with_apex(model, optimizer, range(8), overflow_in=(2, 3))
    assert equal(ours, by_hand)
    assert (
        amp.state_dict()
        == {"loss_scaler0": {"loss_scale": scaler.get_scale(), "unskipped": 4}}
        == {"loss_scaler0": {"loss_scale": 2.0**14, "unskipped": 4}}
    )
    out = capsys.readouterr().out
    assert "Selected optimization level O1" in out
    assert "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0" in out
    assert "reducing loss scale to 16384.0" in out


def test_o0_is_the_float32_script_bit_for_bit():
    plain, ours = make_model(), make_model()
    for model, prepare in ((plain, False), (ours, True)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if prepare:
            model, optimizer = amp.initialize(model, optimizer, opt_level="O0", verbosity=0)
            train_with_apex(model, optimizer, range(3))
        else:
            for step in range(3):
                x, y = batch(step)
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
    assert equal(plain, ours)


def test_o2_equals_half_weights_with_float32_masters_by_hand_bit_for_bit():
    """By hand: a half model beside a float32 one that the optimizer holds, as apex's FP16_Optimizer did it; scale 128."""
    masters = make_model()
    half = copy.deepcopy(masters)
    for each in half:
        if not isinstance(each, nn.BatchNorm1d):
            each.half()
    optimizer = torch.optim.AdamW(masters.parameters(), lr=1e-2)
    for step in range(6):
        x, y = batch(step)
        half.zero_grad()
        (F.cross_entropy(half(x.half()).float(), y) * 128.0).backward()
        for master, weight in zip(masters.parameters(), half.parameters(), strict=True):
            master.grad = weight.grad.float() / 128.0
        optimizer.step()
        with torch.no_grad():
            for master, weight in zip(masters.parameters(), half.parameters(), strict=True):
                weight.copy_(master)
    ours = make_model()
    model, optimizer = amp.initialize(ours, torch.optim.AdamW(ours.parameters(), lr=1e-2), opt_level="O2", loss_scale="128.0")
    train_with_apex(model, optimizer, range(6), clip=1e9)
    for (name, ours_weight), master in zip(ours.named_parameters(), masters.parameters(), strict=True):
        assert torch.equal(ours_weight, master), name
    assert torch.equal(ours[1].running_mean, half[1].running_mean)


def test_o2_computes_in_half_but_for_batch_norm_and_gives_float32():
    model, _ = amp.initialize(make_model(), torch.optim.SGD([torch.zeros(1)], lr=0.1), opt_level="O2", verbosity=0)
    seen = {}
    for name, module in model.named_children():
        module.register_forward_hook(
            lambda m, args, out, name=name: seen.update(
                {name: (args[0].dtype, m.weight.dtype if hasattr(m, "weight") else None)}
            )
        )
    assert model(batch(0)[0]).dtype is torch.float32
    assert seen == {
        "0": (torch.float16, torch.float16), "1": (torch.float16, torch.float32), "2": (torch.float16, None), "3": (torch.float16, torch.float16),
    }  # fmt: skip
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_o2_with_keep_batchnorm_fp32_as_text_casts_batch_norm_too():
    model, _ = amp.initialize(
        make_model(), torch.optim.SGD([torch.zeros(1)], lr=0.1), opt_level="O2", keep_batchnorm_fp32="False", verbosity=0
    )
    seen = []
    model[1].register_forward_hook(lambda m, args, out: seen.append(m.weight.dtype))
    model(batch(0)[0])
    assert seen == [torch.float16]
    assert model[1].num_batches_tracked == 1


def test_o3_trains_half_weights_and_saves_them_in_float32():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O3", verbosity=0)
    before = model[0].weight.detach().clone()
    train_with_apex(model, optimizer, range(2), clip=1.0)
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    assert {state["momentum_buffer"].dtype for state in optimizer.state.values()} == {torch.float16}
    assert not torch.equal(before, model[0].weight)
    assert model.state_dict()["0.weight"].dtype is torch.float32
    assert model.state_dict()["1.num_batches_tracked"].dtype is torch.int64


def test_o3_with_a_loss_scale_unscales_half_gradients():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O3", loss_scale=64.0, verbosity=0)
    x, y = batch(0)
    with amp.scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled_loss:
        scaled_loss.backward()
    scaled = model[3].weight.grad.clone()
    amp.reset()
    plain = make_model()
    plain, optimizer = amp.initialize(plain, torch.optim.SGD(plain.parameters(), lr=0.1), opt_level="O3", verbosity=0)
    with amp.scale_loss(F.cross_entropy(plain(x), y), optimizer) as loss:
        loss.backward()
    assert torch.allclose(scaled.float(), plain[3].weight.grad.float(), atol=2**-12)
    assert scaled.abs().max() < 1


def test_accumulated_gradients_with_and_without_delayed_unscaling_are_equal():
    grads = []
    for delay in (False, True):
        model = make_model()
        model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O1", verbosity=0)
        for part in range(3):
            x, y = batch(part)
            with amp.scale_loss(F.cross_entropy(model(x), y) / 3, optimizer, delay_unscale=delay and part < 2) as scaled_loss:
                scaled_loss.backward()
            if delay and part < 2:
                assert model[3].weight.grad.abs().max() > 100  # still multiplied by 65536
        grads.append([p.grad.clone() for p in model.parameters()])
        amp.reset()
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_lists_come_back_as_lists_and_each_loss_has_its_own_scale():
    models = [make_model(0), make_model(1)]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in models]
    got_models, got_optimizers = amp.initialize(models, optimizers, opt_level="O1", num_losses=2, verbosity=0)
    assert (got_models, got_optimizers) == (models, optimizers)
    x, y = batch(0)
    before = [each[0].weight.detach().clone() for each in models]
    with amp.scale_loss(F.cross_entropy(models[0](x), y) * 1e37, optimizers[0], loss_id=0) as scaled_loss:
        scaled_loss.backward()
    with amp.scale_loss(F.cross_entropy(models[1](x), y), optimizers[1], loss_id=1) as scaled_loss:
        scaled_loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    assert torch.equal(before[0], models[0][0].weight)  # held back
    assert not torch.equal(before[1], models[1][0].weight)
    scales = {name: state["loss_scale"] for name, state in amp.state_dict().items()}
    assert scales == {"loss_scaler0": 32768.0, "loss_scaler1": 65536.0}


def test_a_model_alone_comes_back_alone():
    model = make_model()
    assert amp.initialize(model, opt_level="O1", verbosity=0) is model
    assert amp.initialize([model], opt_level="O1", verbosity=0) == [model]


def test_disabled_amp_is_not_there():
    plain, ours = make_model(), make_model()
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    assert amp.initialize(ours, optimizer, enabled=False, opt_level="O2") == (ours, optimizer)
    x, y = batch(0)
    loss = F.cross_entropy(ours(x), y)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss is loss
    assert torch.equal(loss, F.cross_entropy(plain(x), y))


def test_training_goes_on_from_a_checkpoint_bit_for_bit():
    def start():
        model = make_model()
        return amp.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), opt_level="O2", verbosity=0)

    model, optimizer = start()
    train_with_apex(model, optimizer, range(3), overflow_in=(1,))
    saved = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}, saved)
    train_with_apex(model, optimizer, range(3, 6))
    wanted, wanted_amp = copy.deepcopy(model.state_dict()), amp.state_dict()
    amp.reset()

    saved.seek(0)
    checkpoint = torch.load(saved)
    model, optimizer = start()
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    amp.load_state_dict(checkpoint["amp"])
    train_with_apex(model, optimizer, range(3, 6))
    assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())
    assert amp.state_dict() == wanted_amp
    assert wanted_amp["loss_scaler0"] == {"loss_scale": 32768.0, "unskipped": 4}


def test_a_state_of_another_number_of_losses_is_warned_of():
    model = amp.initialize(make_model(), opt_level="O1", verbosity=0)
    assert isinstance(model, nn.Module)
    with pytest.warns(UserWarning, match="the state has 2 loss scales and amp was initialized with 1"):
        amp.load_state_dict({f"loss_scaler{n}": {"loss_scale": 64.0, "unskipped": 0} for n in range(2)})
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 64.0
    with pytest.raises(PrecisionError, match="'scale' is no entry of an amp state_dict"):
        amp.load_state_dict({"scale": 1.0})


def test_the_scale_stays_within_its_limits():
    model = make_model()
    model, optimizer = amp.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O1", min_loss_scale=8.0, max_loss_scale=32.0, verbosity=0
    )
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 32.0
    train_with_apex(model, optimizer, range(5), overflow_in=range(5))
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 8.0


def test_decorated_and_registered_functions_run_in_their_precision_once_o1_is_chosen():
    class Library:
        @staticmethod
        def product(a, b):
            return a @ b

    Library.product = lambda a, b: a @ b
    half = amp.half_function(lambda a, b: (a.dtype, (a * b).dtype))
    single = amp.float_function(lambda a, b: (a @ b).dtype)
    widest = amp.promote_function(lambda a, b: (a.dtype, b.dtype))
    a, b = torch.randn(4, 4), torch.randn(4, 4).half()
    assert half(a, a) == (torch.float32, torch.float32)
    original = Library.product
    amp.register_float_function(Library, "product")
    amp.initialize(make_model(), opt_level="O1", verbosity=0)
    assert half(a, a) == (torch.float16, torch.float16)
    with torch.autocast("cpu", torch.float16):
        assert (a @ a).dtype is torch.float16
        assert single(b, b) is torch.float32
        assert Library.product(a, b).dtype is torch.float32
    assert widest(a, b) == (torch.float32, torch.float32)
    amp.reset()
    assert Library.product is original
    with pytest.raises(PrecisionError, match="has no function 'nothing' to register"):
        amp.register_half_function(Library, "nothing")


def test_a_model_in_data_parallel_is_run_through_its_inner_model_after_initialize():
    """A wrapper made of what initialize gave back calls the prepared model."""

    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, x):
            return self.module(x)

    model = amp.initialize(make_model(), opt_level="O2", verbosity=0)
    seen = []
    model[0].register_forward_hook(lambda m, args, out: seen.append(m.weight.dtype))
    Wrapper(model)(batch(0)[0])
    assert seen == [torch.float16]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"opt_level": "O4"}, r"'O4' is no opt level. There are O0 \(pure float32\), O1 \(.*\), O2 \(.*\) and O3 \(pure half\)\."),
        ({"opt_level": "01"}, "'01' is no opt level. The O is a letter, not a zero."),
        ({"opt_level": "O1", "master_weights": True}, "master_weights=True does not make sense with O1"),
        ({"opt_level": "O1", "keep_batchnorm_fp32": True}, "keep_batchnorm_fp32=True does not make sense with O1"),
        ({"opt_level": "O1", "cast_model_type": torch.float16}, "cast_model_type=torch.float16 does not make sense with O1"),
        ({"opt_level": "O2", "patch_torch_functions": True}, "patch_torch_functions=True does not go with O2"),
        ({"opt_level": "O2", "keep_batchnorm_fp32": "yes"}, "keep_batchnorm_fp32='yes' is neither True nor False"),
        ({"opt_level": "O2", "loss_scale": "high"}, "loss_scale='high' is no number"),
    ],
)  # fmt: skip
def test_options_that_make_no_sense_are_refused_in_a_sentence(options, words):
    with pytest.raises(PrecisionError, match=words):
        amp.initialize(make_model(), torch.optim.SGD([torch.zeros(1)], lr=0.1), **options)


def test_bad_models_and_optimizers_are_refused_in_a_sentence():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(PrecisionError, match=r"a generator, which can be read only once, for optimizers.*list\(optimizers\)"):
        amp.initialize(model, (each for each in [optimizer]))
    with pytest.raises(PrecisionError, match="a tuple, for models"):
        amp.initialize((model, model), optimizer)
    with pytest.raises(PrecisionError, match=r"0.weight of Sequential is float16 already"):
        amp.initialize(make_model().half(), optimizer)
    with pytest.raises(
        PrecisionError, match="O2 keeps float32 master weights, but this SGD was built on parameters that are float16"
    ):
        amp.initialize(model, torch.optim.SGD(make_model().half().parameters(), lr=0.1), opt_level="O2")
    with pytest.raises(PrecisionError, match="wrapped in DataParallel already"):
        amp.initialize(nn.DataParallel(model), optimizer)
    with pytest.raises(PrecisionError, match=r"amp.init is apex's old interface"):
        amp.init()


def test_scale_loss_before_initialize_says_what_to_call():
    loss = torch.zeros((), requires_grad=True)
    with (
        pytest.raises(RuntimeError, match=r"amp.scale_loss was called before amp.initialize"),
        amp.scale_loss(loss, torch.optim.SGD([loss], lr=0.1)),
    ):
        pass


def test_an_unknown_loss_id_says_how_many_there_are():
    model = make_model()
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), verbosity=0)
    with (
        pytest.raises(PrecisionError, match=r"There is no loss scale 1: .* num_losses=1"),
        amp.scale_loss(model(batch(0)[0]).sum(), optimizer, loss_id=1),
    ):
        pass


def test_a_closure_with_master_weights_is_refused():
    model = make_model()
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O2", verbosity=0)
    with pytest.raises(PrecisionError, match="does not support a closure"):
        optimizer.step(lambda: None)


def test_fused_optimizers_are_pytorchs_or_a_sentence():
    weight = nn.Parameter(torch.zeros(2))
    assert type(FusedAdam([weight], lr=1e-3)) is torch.optim.AdamW
    assert FusedAdam([weight]).defaults["weight_decay"] == 0.0
    assert type(FusedAdam([weight], adam_w_mode=False)) is torch.optim.Adam
    with pytest.raises(PrecisionError, match="PyTorch has no LAMB"):
        FusedLAMB([weight], lr=1e-3)


def test_a_model_that_overflows_for_ever_stops_with_its_module_and_no_parameter_changed(capsys):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    before = [p.detach().clone() for p in model.parameters()]
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), verbosity=0)

    def step():
        with amp.scale_loss(model(torch.full((4, 8), 1e30)).sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(24):
        step()
    with pytest.raises(PrecisionError, match=r"25 steps in a row were held back .* is 0 \(Linear\)"):
        step()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
