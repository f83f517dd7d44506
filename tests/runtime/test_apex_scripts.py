"""Scripts that say `from apex import amp`, under memfit, where apex is not installed."""

from __future__ import annotations

import sys

import pytest

from memfit.core.errors import PrecisionError
from memfit.core.precision import choose
from memfit.integrations.apex import standing_in

TRAIN = """
from helper import Net, batch, digest
torch.manual_seed(0)
net = Net(depth=3)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
{initialize}
for step in range(4):
    x, y = batch(step)
    {autocast}
        loss = F.cross_entropy(net(x), y)
    {backward}
    nn.utils.clip_grad_norm_(net.parameters(), 0.5)
    {step}
    optimizer.zero_grad()
    print(loss.item())
print(digest(net, optimizer))
"""
APEX = TRAIN.format(
    initialize="net, optimizer = amp.initialize(net, optimizer, opt_level='O1', verbosity=0)",
    autocast="if True:",
    backward="with amp.scale_loss(loss, optimizer) as scaled_loss:\n        scaled_loss.backward()",
    step="optimizer.step()",
)
BY_HAND = TRAIN.format(
    initialize="scaler = torch.amp.GradScaler('cpu')",
    autocast="with torch.autocast('cpu', torch.float16):",
    backward="scaler.scale(loss).backward(); scaler.unscale_(optimizer)",
    step="scaler.step(optimizer); scaler.update()",
)


@pytest.fixture(autouse=True)
def without_apex():
    assert "apex" not in sys.modules
    yield
    assert not [name for name in sys.modules if name == "apex" or name.startswith("apex.")]


@pytest.mark.parametrize(
    "imports",
    [
        "from apex import amp",
        "import apex\namp = apex.amp",
        "import apex.amp\namp = apex.amp",
        "from apex.amp import initialize\nfrom apex import amp",
    ],
)
def test_a_script_written_for_apex_equals_amp_by_hand_within_a_budget(scripts, imports):
    wanted, code = scripts.run_plain(scripts.write(BY_HAND, "by_hand.py"))
    assert code == 0
    budget = scripts.budget(0.75, scripts.write(BY_HAND, "by_hand.py"))
    out, ran = scripts.run(scripts.write(f"{imports}\n{APEX}"), budget=budget)
    assert ran.error is None, ran.error
    assert out == wanted
    assert ran.result.peak_bytes <= budget
    assert ran.result.certificate.verdict == "equal"
    assert ran.result.messages[0] == (
        "apex.amp is not installed; what train.py imports from apex is memfit's (memfit explain precision)."
    )


def test_without_memfit_the_same_script_does_not_start(scripts):
    path = scripts.write(f"from apex import amp\n{APEX}")
    assert scripts.run_plain(path) == ("", 1)


def test_an_import_that_the_script_guards_fails_as_it_would_without_memfit(scripts):
    source = """
try:
    from apex.normalization import FusedLayerNorm as Norm
except ImportError:
    from torch.nn import LayerNorm as Norm
    print("fallback")
import importlib.util
print(importlib.util.find_spec("apex"))
net = nn.Sequential(nn.Linear(4, 4), Norm(4))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
net(torch.ones(2, 4)).sum().backward()
optimizer.step()
"""
    out, ran = scripts.run(scripts.write(source), budget=1 << 40)
    assert ran.error is None, ran.error
    assert out == "fallback\nNone\n"
    assert not any("apex" in message for message in ran.result.messages)


def test_a_part_of_apex_that_memfit_does_not_stand_in_for_is_named(scripts):
    _, ran = scripts.run(scripts.write("from apex.contrib.multihead_attn import SelfMultiheadAttn\n"), budget=1 << 40)
    assert isinstance(ran.error, ModuleNotFoundError)
    assert "No module named 'apex.contrib'. apex is not installed, and memfit stands in for apex.amp, apex.optimizers" in str(
        ran.error
    )


def test_scale_loss_before_initialize_is_a_sentence_and_exit_code_2(scripts):
    source = """
from apex import amp
net = nn.Linear(4, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
with amp.scale_loss(net(torch.ones(2, 4)).sum(), optimizer) as scaled_loss:
    scaled_loss.backward()
"""
    _, ran = scripts.run(scripts.write(source), budget=1 << 40)
    assert isinstance(ran.error, PrecisionError)
    assert str(ran.error).startswith("amp.scale_loss was called before amp.initialize")
    assert ran.exit_code == 2


def test_a_script_for_apex_is_left_alone_by_precision(scripts):
    path = scripts.write(f"from apex import amp\n{APEX}")
    wanted, ran = scripts.run(path, budget=1 << 40)
    assert ran.error is None
    out, ran = scripts.run(path, precision=choose("O3", "bf16"))
    assert ran.error is None, ran.error
    assert out == wanted
    assert "precision O3 was not applied: the program calls apex's amp.initialize, so it is left alone." in ran.result.messages


def test_an_apex_that_is_installed_without_amp_keeps_its_own_parts(tmp_path, monkeypatch):
    package = tmp_path / "apex"
    package.mkdir()
    (package / "__init__.py").write_text("ours = False\n")
    (package / "optimizers.py").write_text("FusedAdam = 'the real one'\n")
    program = tmp_path / "program.py"
    program.write_text("from apex import optimizers\nfrom apex import amp\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with standing_in() as messages:
        names: dict = {}
        exec(compile(program.read_text(), str(program), "exec"), names)
        assert names["optimizers"].FusedAdam == "the real one"
        assert names["amp"].initialize.__module__ == "memfit.integrations.apex.amp"
    assert len(messages) == 1
    del sys.modules["apex.optimizers"], sys.modules["apex"]
