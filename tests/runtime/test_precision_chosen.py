"""Lower precision as a library call, in a plan, and chosen where the budget cannot be met without it."""

from __future__ import annotations

import copy
import gc
import random
import sys
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memfit
from memfit.core.errors import PrecisionError
from memfit.core.plan import Plan
from memfit.core.precision import choose, suggest
from memfit.core.replay import replay
from runtime.conftest import live_bytes

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
WIDTH, BATCH = 64, 1024


pytestmark = pytest.mark.usefixtures("one_thread")


class Training:
    """A model, its optimizer and a step, everything made beforehand, as a notebook has it."""

    def __init__(self, build=None):
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU()) for _ in range(4)]
        self.model = build() if build is not None else nn.Sequential(*layers, nn.Linear(WIDTH, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.9)
        self.losses: list[float] = []

    def batch(self, number):
        generator = torch.Generator().manual_seed(number)
        scale = 1e8 if number == 2 else 1.0  # overflows in float16
        return torch.randn(BATCH, WIDTH, generator=generator) * scale, torch.arange(BATCH) % 4

    def step(self, number=0):
        x, y = self.batch(number)
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        self.losses.append(loss.item())
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def train_fitted(self, num_steps, **options):
        with memfit.fit(self.model, self.optimizer, **options) as session:
            for number in range(num_steps):
                self.step(number)
        return session.result()

    def train_by_hand(self, half, num_steps):
        scaler = torch.amp.GradScaler("cpu", enabled=half is torch.float16)
        for number in range(num_steps):
            x, y = self.batch(number)
            with torch.autocast("cpu", half):
                loss = F.cross_entropy(self.model(x), y)
            scaler.scale(loss).backward()
            self.losses.append(loss.item())
            scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            before = scaler.get_scale()
            scaler.step(self.optimizer)
            scaler.update()
            if scaler.get_scale() >= before:
                self.scheduler.step()
            self.optimizer.zero_grad()

    def bits(self):
        tensors = [*self.model.state_dict().values(), *(v for s in self.optimizer.state.values() for v in s.values())]
        return [tensor.detach().reshape(-1).view(torch.uint8).tolist() for tensor in tensors]


def measure(precision=None):
    """The trace of a second step."""
    training = Training()
    return memfit.trace(lambda: training.step(1), precision=precision, half="bf16" if precision else None)


@pytest.mark.parametrize(("half", "num_held_back"), [("bf16", 0), ("fp16", 1)])
def test_fit_in_o1_within_a_budget_equals_autocast_and_gradscaler_by_hand_bit_for_bit(half, num_held_back):
    by_hand, fitted = Training(), Training()
    by_hand.train_by_hand(HALVES[half], 6)
    elsewhere = live_bytes()
    budget = int(0.8 * (replay(measure("O1")).peak_bytes - elsewhere)) + elsewhere
    names = [(nn.Module, "__call__"), (torch.Tensor, "backward"), (torch.optim.AdamW, "step"), (torch.optim.Adam, "step")]
    before = [getattr(owner, name) for owner, name in names]
    result = fitted.train_fitted(6, budget=budget, precision="O1", half=half)
    assert list(map(repr, fitted.losses)) == list(map(repr, by_hand.losses))  # one is NaN in float16
    assert fitted.bits() == by_hand.bits()
    assert fitted.scheduler.get_last_lr() == by_hand.scheduler.get_last_lr()
    assert result.precision == f"O1 {str(HALVES[half]).removeprefix('torch.')}"
    assert (result.allow, result.num_steps) == ("approximate", 6 - num_held_back)
    assert result.peak_bytes <= budget
    assert result.certificate.verdict == "equal"
    assert [getattr(owner, name) for owner, name in names] == before
    assert not torch.is_autocast_enabled("cpu")


def test_the_weights_die_with_the_model_although_the_session_is_kept():
    training = Training()
    weight = weakref.ref(training.model[0][0].weight)
    with memfit.fit(precision="O1") as session:  # a session that is given a model keeps it
        training.step()
    del training
    gc.collect()
    assert session.result().precision == "O1 bfloat16"
    assert weight() is None


def test_fit_in_o1_needs_no_budget_on_a_cpu_and_says_what_it_took():
    result = Training().train_fitted(1, precision="O1")
    assert result.budget_source == "this machine's memory"
    assert result.messages[0].startswith("precision O1 (mixed by operator lists, float32 weights) in bfloat16;")
    assert result.messages[1].startswith("autocast keeps ")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"precision": "O4"},
            r"'O4' is no opt level. There are O0 \(pure float32\), O1 \(.*\), O2 \(.*\) and O3 \(pure half\)\.",
        ),
        ({"precision": "01"}, "'01' is no opt level. The O is a letter, not a zero."),
        ({"precision": "O1", "half": "int8"}, "'int8' is no half precision. Give 'bf16' or 'fp16'."),
        ({"half": "bf16"}, "half=bf16 says nothing without an opt level. Add precision='O1', or leave it out."),
    ],
)
def test_unknown_words_are_refused_before_anything_is_touched(options, words):
    with pytest.raises(PrecisionError, match=words):
        memfit.fit(budget="1GiB", **options)
    with pytest.raises(PrecisionError, match=words):
        memfit.trace(lambda: None, **options)


def with_parameter(name, tensor, *, trained=True):
    def build():
        model = nn.Linear(WIDTH, 4)
        model.register_parameter(name, nn.Parameter(tensor, requires_grad=trained))
        return model

    return build


@pytest.mark.parametrize(
    ("level", "build", "words"),
    [
        ("O1", with_parameter("phase", torch.zeros(3, dtype=torch.complex64)), "its parameter phase is complex"),
        ("O2", with_parameter("codes", torch.arange(3), trained=False), r"the parameter codes of Linear holds integers \(torch.int64\)"),
        ("O2", lambda: nn.Linear(WIDTH, 4).half(), "O2 keeps float32 master weights, but this AdamW was built on parameters that are float16"),
    ],
)  # fmt: skip
def test_weights_a_level_cannot_take_are_refused_before_the_first_step(level, build, words):
    training = Training(build)
    before = torch.nn.Module.__call__
    with pytest.raises(PrecisionError, match=words):
        training.train_fitted(1, precision=level, half="fp16")
    assert training.losses == []
    assert torch.nn.Module.__call__ is before


def test_what_is_no_model_or_optimizer_is_refused_in_a_sentence():
    training = Training()
    with pytest.raises(
        memfit.MemfitError, match=r"The optimizer is a generator, no torch Optimizer\. .* where there are several, leave it out"
    ):
        memfit.fit(training.model, (each for each in [training.optimizer]), precision="O1")
    with pytest.raises(memfit.MemfitError, match="The model is a generator, no torch Module"):
        memfit.fit(training.model.parameters(), training.optimizer, budget="1GiB")


def test_float16_that_overflows_for_ever_stops_with_the_module_and_no_parameter_changed():
    training = Training(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)))
    training.batch = lambda number: (torch.full((4, 8), 1e30), torch.zeros(4, dtype=torch.long))
    before = copy.deepcopy(training.model.state_dict())
    with pytest.raises(PrecisionError, match=r"25 steps in a row were held back .* is 0 \(Linear\)"):
        training.train_fitted(100, precision="O1", half="fp16", budget="1GiB")
    assert len(training.losses) == 25
    assert all(torch.equal(value, before[name]) for name, value in training.model.state_dict().items())


# ---- in a plan -------------------------------------------------------------------------------------------------------


def test_a_plan_is_made_in_lower_precision_only_where_the_budget_cannot_be_met_without_and_fit_trains_in_it(tmp_path):
    plain, lower = measure(), measure("O1")
    assert lower.meta["precision"] == "O1 bfloat16"
    with pytest.raises(memfit.BudgetError) as error:
        memfit.plan(plain, 1000)
    floor = error.value.needed_bytes
    assert memfit.plan(plain, floor, lower=lower).precision == ""
    with pytest.raises(
        memfit.BudgetError, match=r"Lower precision may help: O1 at best halves the [\d.]+ .iB of activations"
    ) as error:
        memfit.plan(plain, floor - 30_000)
    assert error.value.may_lower
    memfit.plan(plain, floor - 30_000, lower=lower).save(tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.precision == "O1 bfloat16"
    assert plan.notes[0].startswith(
        "Trains in O1 bfloat16, which changes results: in the program's own precision the best plan"
    )
    training = Training()
    with pytest.raises(
        memfit.PlanError, match=r"made for a step in O1 bfloat16 and .* the program's own precision.*--allow approximate"
    ):
        memfit.fit(training.model, training.optimizer, budget=2 * floor, plan=plan)
    result = training.train_fitted(3, budget=2 * floor, plan=plan, allow="approximate")
    assert result.precision == "O1 bfloat16"
    assert result.moves == plan.moves
    assert result.certificate.num_mismatched == 0


def test_a_plan_for_float32_is_refused_in_o1():
    plan = memfit.plan(measure(), "1GiB")
    with pytest.raises(
        memfit.PlanError,
        match=r"a step in the program's own precision and this run is to train in O1.*Make one from a trace in O1",
    ):
        memfit.fit(budget="1GiB", plan=plan, precision="O1")


def test_a_trace_of_the_programs_own_precision_is_no_lower_one():
    plain = measure()
    with pytest.raises(memfit.TraceError, match="was measured in the program's own"):
        memfit.plan(plain, "1GiB", lower=plain)


# ---- chosen by a run -------------------------------------------------------------------------------------------------

SCRIPT = """
import random
import own
own.count += 1
print("begins", own.count, random.random(), torch.rand(1).item())
net = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU()) for _ in range(8)], nn.Linear(64, 4))
optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
for step in range(3):
    out = net(torch.randn(4096, 64))
    out.float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, out.dtype, out.float().sum().item())
"""


@pytest.fixture
def script(scripts):
    (scripts.directory / "own.py").write_text("count = 0\n")
    sys.modules.pop("own", None)
    yield scripts.write(SCRIPT)
    sys.modules.pop("own", None)


def between(script) -> int:
    """A budget that O1 can meet and float32 cannot: of the two floors the mean."""
    floors = []
    for precision in (None, choose("O1", "bf16")):
        trace = memfit.api.trace_script(script, [], None, precision)
        with pytest.raises(memfit.BudgetError) as error:
            memfit.plan(trace, 1000)
        floors.append(error.value.needed_bytes)
    assert floors[1] < 0.9 * floors[0]
    return sum(floors) // 2


def test_a_script_whose_budget_only_o1_can_meet_is_started_over_in_it_if_that_is_allowed(scripts, script):
    random.seed(1)
    torch.manual_seed(1)
    state, torch_state = random.getstate(), torch.get_rng_state()
    budget = between(script)

    def run(**options):
        random.setstate(state)
        torch.set_rng_state(torch_state)
        sys.modules.pop("own", None)
        return scripts.run(script, budget=budget, **options)

    _, refused = run()
    assert isinstance(refused.error, memfit.BudgetError)
    assert "Lower precision may help" in str(refused.error)
    del refused  # its traceback holds the tensors of that try
    wanted, ran = run(precision=choose("O1"))
    assert ran.error is None, ran.error
    out, ran = run(allow="approximate")
    assert ran.error is None, ran.error
    begins = wanted.splitlines(keepends=True)[0]
    assert begins.startswith("begins 1 ")
    assert out == begins + wanted  # the first try got as far as its first line; everything it drew is drawn again
    assert (ran.result.precision, ran.result.allow) == ("O1 bfloat16", "approximate")
    assert ran.result.peak_bytes <= budget
    assert ran.result.messages[0].startswith("in the program's own precision its first step needs ")
    assert "so it was started over in O1, which --allow approximate allows" in ran.result.messages[0]


def test_the_first_try_is_gone_when_the_second_begins_although_atexit_functions_were_registered(scripts):
    """By a library, say: torch does it for the first optimizer of a process. What runs then finds the script's names."""
    path = scripts.write(
        "import atexit\natexit.register(len, ())\n"
        + SCRIPT.replace("import own\nown.count += 1\n", "").replace("own.count, ", "")
    )
    budget = between(path)
    _, ran = scripts.run(path, budget=budget, allow="approximate")
    assert ran.error is None, ran.error
    assert ran.result.peak_bytes <= budget


def test_a_script_that_fits_in_float32_stays_there_although_o1_is_allowed(scripts, script):
    out, ran = scripts.run(script, budget=1 << 30, allow="approximate")
    assert ran.error is None, ran.error
    assert out.count("begins") == 1
    assert "torch.float32" in out
    assert ran.result.precision == ""


def test_o1_is_advised_only_where_half_of_what_can_shrink_is_enough():
    kinds = {"parameter": 100, "activation": 60, "temporary": 20, "input": 50}
    assert suggest(kinds, 230, 189) == ""  # 230 less half of 80 is 190
    assert "halves the 80 B of activations and temporaries" in suggest(kinds, 230, 190)
