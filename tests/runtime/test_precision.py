"""An opt level on an unmodified script equals the same script with `torch.autocast` and `GradScaler` written by hand, bit for bit."""

from __future__ import annotations

import pytest
import torch

from memfit import api
from memfit.core.errors import PrecisionError
from memfit.core.precision import choose
from memfit.core.replay import replay
from memfit.runtime.session import Session
from runtime.conftest import live_bytes

HALVES = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}

# Both scripts print every loss, learning rate and scale that matters, and a digest of all state at the end.
UNMODIFIED = """
from helper import Net, batch, digest
torch.manual_seed(0)
net = Net(depth=3)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=40)
for step in range(8):
    for part in range({parts}):
        x, y = batch(step * 10 + part)
        if step in {overflowing}:
            x = x * 1e8
        loss = F.cross_entropy(net(x), y) / {parts}
        loss.backward()
        print(step, loss.item())
    print("norm", nn.utils.clip_grad_norm_(net.parameters(), 0.5).item())
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    print("rate", scheduler.get_last_lr())
print(digest(net, optimizer))
"""
BY_HAND = """
from helper import Net, batch, digest
torch.manual_seed(0)
net = Net(depth=3)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=40)
scaler = torch.amp.GradScaler("cpu", enabled={half} is torch.float16)
for step in range(8):
    for part in range({parts}):
        x, y = batch(step * 10 + part)
        if step in {overflowing}:
            x = x * 1e8
        with torch.autocast("cpu", {half}):
            loss = F.cross_entropy(net(x), y) / {parts}
        scaler.scale(loss).backward()
        print(step, loss.item())
    scaler.unscale_(optimizer)
    print("norm", nn.utils.clip_grad_norm_(net.parameters(), 0.5).item())
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    if scaler.get_scale() >= before:
        scheduler.step()
    optimizer.zero_grad()
    print("rate", scheduler.get_last_lr())
print(digest(net, optimizer))
"""


def both(scripts, half, parts=1, overflowing=()):
    """Paths of the unmodified script and of the one that has amp written into it."""
    words = {"half": HALVES[half], "parts": parts, "overflowing": set(overflowing) or "()"}
    return scripts.write(UNMODIFIED.format(**words)), scripts.write(BY_HAND.format(**words), "by_hand.py")


@pytest.mark.parametrize(
    ("half", "parts", "overflowing"), [("bf16", 1, ()), ("bf16", 3, ()), ("fp16", 1, (2, 5)), ("fp16", 2, (0, 1, 4))]
)
def test_o1_equals_autocast_and_gradscaler_by_hand_bit_for_bit(scripts, half, parts, overflowing):
    path, by_hand = both(scripts, half, parts, overflowing)
    wanted, code = scripts.run_plain(by_hand)
    assert code == 0, wanted
    out, ran = scripts.run(path, precision=choose("O1", half))
    assert ran.error is None, ran.error
    assert out == wanted
    assert ran.result.precision == f"O1 {HALVES[half].removeprefix('torch.')}"
    assert ran.result.num_steps == 8 - len(overflowing)


@pytest.mark.parametrize(("half", "overflowing"), [("bf16", ()), ("fp16", (0, 3))])
def test_o1_under_a_budget_equals_plain_autocast_bit_for_bit_and_stays_within_it(scripts, half, overflowing):
    path, by_hand = both(scripts, half, overflowing=overflowing)
    wanted, _ = scripts.run_plain(by_hand)
    budget = scripts.budget(0.75, by_hand)  # of what plain autocast needs
    out, ran = scripts.run(path, budget=budget, precision=choose("O1", half))
    assert ran.error is None, ran.error
    assert out == wanted
    assert ran.result.peak_bytes <= budget
    assert ran.result.certificate.num_restored > 0
    assert ran.result.certificate.verdict == "equal"
    assert ran.result.allow == "approximate"


def test_without_precision_the_same_script_trains_in_float32(scripts):
    """The comparison above could not tell O1 from doing nothing if bfloat16 gave float32's numbers."""
    path, by_hand = both(scripts, "bf16")
    assert scripts.run_plain(path)[0] != scripts.run_plain(by_hand)[0]


def test_two_optimizers_of_one_loss_share_one_scale_as_by_hand(scripts):
    source = """
from helper import Net, batch, digest
torch.manual_seed(0)
one, two = Net(depth=1), Net(depth=1)
optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9), torch.optim.Adam(two.parameters(), lr=1e-2)]
{make}
for step in range(5):
    x, y = batch(step)
    x = x * (1e8 if step == 2 else 1)
    {autocast}
        loss = F.cross_entropy(one(x) + two(x), y)
    {backward}
    {step}
    for each in optimizers:
        each.zero_grad()
    print(loss.item())
print(digest(one, two, *optimizers))
"""
    plain = source.format(make="", autocast="if True:", backward="loss.backward()", step="[each.step() for each in optimizers]")
    by_hand = source.format(
        make="scaler = torch.amp.GradScaler('cpu')",
        autocast="with torch.autocast('cpu', torch.float16):",
        backward="scaler.scale(loss).backward()",
        step="[scaler.step(each) for each in optimizers]; scaler.update()",
    )
    wanted, code = scripts.run_plain(scripts.write(by_hand, "by_hand.py"))
    assert code == 0
    out, ran = scripts.run(scripts.write(plain), precision=choose("O1", "fp16"))
    assert ran.error is None, ran.error
    assert out == wanted


def test_a_scheduler_that_steps_once_an_epoch_advances_although_one_step_was_held_back(scripts):
    source = """
from helper import Net, batch
net = Net(depth=1)
optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
for epoch in range(3):
    for step in range(3):
        x, y = batch(step)
        x = x * (1e8 if step == 2 and epoch == 1 else 1)  # the last step of the second epoch
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    scheduler.step()
    print(scheduler.get_last_lr())
"""
    out, ran = scripts.run(scripts.write(source), precision=choose("O1", "fp16"))
    assert ran.error is None, ran.error
    assert out == "[0.5]\n[0.25]\n[0.125]\n"
    assert ran.result.num_steps == 8


def test_a_scheduler_does_not_advance_and_does_not_warn_when_the_first_steps_are_held_back(scripts):
    """Warnings are errors here; PyTorch warns of `lr_scheduler.step()` before `optimizer.step()`."""
    source = """
from helper import Net, batch
net = Net(depth=1)
optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
scheduler = torch.optim.lr_scheduler.SequentialLR(
    optimizer, [torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=2), torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)], [2])
for step in range(5):
    x, y = batch(step)
    optimizer.zero_grad()
    F.cross_entropy(net(x * (1e8 if step < 2 else 1)), y).backward()
    optimizer.step()
    scheduler.step()
    print(scheduler.get_last_lr())
"""
    out, ran = scripts.run(scripts.write(source), precision=choose("O1", "fp16"))
    assert ran.error is None, ran.error
    assert out == "[0.5]\n[0.5]\n[0.75]\n[1.0]\n[0.5]\n"


AMP_INSIDE = {
    "uses torch.autocast itself": """
with torch.autocast("cpu", torch.bfloat16):
    loss = F.cross_entropy(net(x), y)
loss.backward()
""",
    "makes a GradScaler itself": """
scaler = torch.amp.GradScaler("cpu")
scaler.scale(F.cross_entropy(net(x), y)).backward()
""",
    "made the weights of its Net bfloat16 itself": """
net.bfloat16()
F.cross_entropy(net(x.bfloat16()), y).backward()
""",
}


@pytest.mark.parametrize("does", AMP_INSIDE)
def test_a_script_that_uses_amp_is_left_alone_and_told_so(scripts, does):
    source = f"""
from helper import Net, batch, digest
torch.manual_seed(0)
net = Net(depth=1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
x, y = batch(1)
{AMP_INSIDE[does]}
optimizer.step()
print(digest(net))
"""
    path = scripts.write(source)
    plain, _ = scripts.run_plain(path)
    out, ran = scripts.run(path, precision=choose("O1", "fp16"))
    assert ran.error is None, ran.error
    assert out == plain
    assert ran.result.precision == ""
    assert ran.result.messages[0] == f"precision O1 was not applied: the program {does}, so it is left alone."


def test_o0_changes_nothing_and_says_so(scripts):
    path, _ = both(scripts, "bf16")
    plain, _ = scripts.run_plain(path)
    out, ran = scripts.run(path, precision=choose("O0"))
    assert out == plain
    assert "precision O0: pure float32, as the program is written; nothing was changed." in ran.result.messages


def test_everything_is_taken_off_afterwards(scripts):
    names = [
        (torch.nn.Module, "__call__"), (torch.Tensor, "backward"), (torch.autograd, "backward"), (torch.autograd, "grad"),
        (torch.amp.GradScaler, "__init__"), (torch.optim.Optimizer, "__init__"), (torch.optim.AdamW, "step"), (torch.optim.Adam, "step"),
        (torch.optim.lr_scheduler.LRScheduler, "__init__"), (torch.optim.lr_scheduler.LRScheduler, "step"),
    ]  # fmt: skip
    torch.optim.AdamW([torch.zeros(1)])  # PyTorch wraps `step` itself when the first one is made
    before = [getattr(owner, name) for owner, name in names]
    path, _ = both(scripts, "fp16")
    _, ran = scripts.run(path, precision=choose("O1", "fp16"))
    assert ran.result.num_steps == 8
    assert [getattr(owner, name) for owner, name in names] == before
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(
    ("level", "make", "words"),
    [
        ("O2", "net = nn.Linear(8, 4).half()", "O2 keeps float32 master weights, but this SGD was built on parameters that are float16 already"),
        ("O1", "net = nn.Linear(8, 4); net.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))", "its parameter phase is complex"),
        (
            "O2",
            "net = nn.Linear(8, 4); net.codes = nn.Parameter(torch.zeros(3, dtype=torch.int32), requires_grad=False)",
            "the parameter codes of Linear holds integers (torch.int32)",
        ),
    ],
)  # fmt: skip
def test_parameters_a_level_cannot_take_are_refused_in_a_sentence(scripts, level, make, words):
    source = f"""
{make}
optimizer = torch.optim.SGD([net.weight, net.bias], lr=0.1)
net(torch.randn(2, 8)).sum().backward()
optimizer.step()
"""
    _, ran = scripts.run(scripts.write(source), precision=choose(level, "fp16"))
    assert isinstance(ran.error, PrecisionError)
    assert words in str(ran.error)
    assert ran.exit_code == 2


def test_o1_leaves_integer_parameters_alone_and_says_so(scripts):
    source = """
net = nn.Linear(8, 4)
net.codes = nn.Parameter(torch.arange(3), requires_grad=False)
optimizer = torch.optim.SGD([net.weight, net.bias], lr=0.1)
net(torch.randn(2, 8)).sum().backward()
optimizer.step()
print(net.codes)
"""
    out, ran = scripts.run(scripts.write(source), precision=choose("O1", "bf16"))
    assert ran.error is None, ran.error
    assert "tensor([0, 1, 2])" in out
    assert "The integer parameters of Linear are left as they are." in ran.result.messages


def test_lbfgs_is_refused_in_float16_and_trains_in_bfloat16(scripts):
    source = """
from helper import batch
torch.manual_seed(0)
net = nn.Linear(8, 4)
optimizer = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=4)
x, y = batch(1, 64)
def closure():
    optimizer.zero_grad()
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    return loss
first = optimizer.step(closure)
print(first.item() > optimizer.step(closure).item())
"""
    path = scripts.write(source)
    _, ran = scripts.run(path, precision=choose("O1", "fp16"))
    assert isinstance(ran.error, PrecisionError)
    assert "LBFGS runs forward and backward inside its step" in str(ran.error)
    out, ran = scripts.run(path, precision=choose("O1", "bf16"))
    assert (out, ran.error) == ("True\n", None)


def test_a_closure_of_another_optimizer_is_run_before_the_step_that_may_be_held_back(scripts):
    source = """
from helper import Net, batch, digest
torch.manual_seed(0)
net = Net(depth=1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(4):
    x, y = batch(step)
    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x * (1e8 if step == 1 else 1)), y)
        loss.backward()
        return loss
    print(optimizer.step(closure).item())
print([bool(torch.isfinite(p).all()) for p in net.parameters()].count(False))
"""
    out, ran = scripts.run(scripts.write(source), precision=choose("O1", "fp16"))
    assert ran.error is None, ran.error
    assert out.splitlines()[-1] == "0"
    assert len(out.splitlines()) == 5
    assert ran.result.num_steps == 3


def test_an_evaluation_that_fills_the_scripts_own_autocast_cache_is_a_finding(scripts):
    """Six weights of 64 x 64: their half copies, 48 KiB, are held until the region ends; without the cache nothing is."""
    source = """
net = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(6)])
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
x = torch.randn(4, 64)
with torch.autocast("cpu", torch.bfloat16, cache_enabled={cache}):
    with torch.no_grad():
        net(x)
        net(x)
    net(x).float().sum().backward()
optimizer.step()
"""
    path = scripts.write(source.format(cache=True))
    _, ran = scripts.run(path, precision=choose("O1", "bf16"))
    assert ran.error is None, ran.error
    left_alone, found = ran.result.messages[:2]
    assert "uses torch.autocast itself" in left_alone
    line = 4 + source.splitlines().index("        net(x)")
    assert found.startswith(
        f"{path}:{line}: MF611 A forward pass of Sequential without gradients leaves 48.00 KiB of cast weights"
    )
    _, ran = scripts.run(scripts.write(source.format(cache=False)), precision=choose("O1", "bf16"))
    assert not any("MF611" in message for message in ran.result.messages)
    one_by_one = source.format(cache=True).replace("        net(x)\n        net(x)", "        [layer(x) for layer in net]")
    _, ran = scripts.run(scripts.write(one_by_one), precision=choose("O1", "bf16"))
    (found,) = (message for message in ran.result.messages if "MF611" in message)
    assert "MF611 6 forward passes (Linear) without gradients leave 48.00 KiB of cast weights" in found


def test_what_autocast_keeps_is_told_in_the_report(scripts):
    path, _ = both(scripts, "bf16")
    _, ran = scripts.run(path, precision=choose("O1", "bf16"))
    told = [message for message in ran.result.messages if message.startswith("autocast keeps ")]
    assert len(told) == 1
    assert "parameters, gradients and optimizer state stay float32" in told[0]


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_the_levels_without_lists_compose_with_a_budget_bit_for_bit(scripts, level):
    """Also where half copies of weights are calls of the tape that may be evicted and cast again."""
    path, _ = both(scripts, "bf16")
    choice = choose(level, "bf16")
    wanted, ran = scripts.run(path, precision=choice)
    assert ran.error is None, ran.error
    elsewhere = live_bytes()
    peak = replay(api.trace_script(path, [], None, choice)).peak_bytes
    budget = int(0.75 * (peak - elsewhere)) + live_bytes()
    out, ran = scripts.run(path, budget=budget, precision=choice)
    assert ran.error is None, ran.error
    assert out == wanted
    assert ran.result.peak_bytes <= budget
    assert ran.result.certificate.verdict == "equal"


def test_a_step_left_out_makes_the_next_forward_pass_the_steps_first_again():
    """A plan names places by section, and sections count backward passes since the last step: the second would be unplanned."""
    net = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Session(None, None, model=net, optimizer=optimizer) as session:
        sections = []
        for left_out in (False, True, False):
            net(torch.ones(2, 4)).sum().backward()
            sections.append(session._tape.places.section)
            if left_out:
                session.leave_out_step()
        optimizer.step()
    assert sections == [0, 1, 0]
    assert len(session.traces) == 1
    assert {call.place.partition("|")[0] for call in session.traces[0].calls} == {"0"}  # what was left out is not in it
