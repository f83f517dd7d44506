"""What mends are worth: foretold from a trace of the plain script, and measured on the script that was really mended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from memfit import api
from memfit.core.replay import replay
from memfit.core.trace import Trace
from memfit.diagnosis.lints.fix import Fixed, Made, fix_text
from memfit.diagnosis.lints.worth import Worth, peak_with_all, weigh

HEADER = "import torch\nfrom torch import nn\nfrom torch.nn import functional as F\n"

TRAIN = """
def train(model, data, optimizer):
    total, hits = 0.0, 0.0
    for x, y in data:
        hidden = model[:2](x)
        logits = model[2](hidden)
        loss = F.cross_entropy(logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        {after}
    print(total / 3, hits)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), {middle}, nn.Linear(256, {classes}))
data = [(torch.randn({batch}, 64), torch.randint({classes}, ({batch},))) for _ in range(3)]
train(model, data, torch.optim.SGD(model.parameters(), lr=0.1))
"""

FLAT, DEEP = "nn.Tanh()", "nn.Sequential(*[layer for _ in range(5) for layer in (nn.Linear(256, 256), nn.Tanh())])"
READS = "total += loss.item()"
SUMS = "accuracy = (hidden.tanh() * hidden).mean(); hits += accuracy\n        total += loss"


pytestmark = pytest.mark.usefixtures("one_thread")


def trace(folder: Path, source: str) -> Trace:
    (folder / "train.py").write_text(source)
    return api.trace_script(str(folder / "train.py"), [])


def mended(folder: Path, source: str) -> Fixed:
    return fix_text(source, str(folder / "train.py"))


def one_by_code(fixed: Fixed) -> dict[str, Made]:
    return {each.finding.code: each for each in fixed.made}


def test_each_mend_and_all_of_them_are_worth_what_the_mended_scripts_measure(tmp_path) -> None:
    source = HEADER + TRAIN.format(middle=FLAT, batch=64, classes=4096, after=READS)
    before = trace(tmp_path, source)
    fixed = mended(tmp_path, source)
    assert [each.action for each in fixed.made] == ["del logits", "moved to line 8"]
    deleted = source.replace("(logits, y)\n", "(logits, y)\n        del logits\n")
    peaks = [replay(trace(tmp_path, each)).peak_bytes for each in (source, deleted, clear_first(source), fixed.text)]
    worths = [weigh(one_by_code(fixed)[code], before) for code in ("MF201", "MF401")]
    assert worths == [Worth(peaks[0], peaks[1]), Worth(peaks[0], peaks[2])]
    assert peak_with_all(fixed.made, before) == peaks[3]
    # Alone each leaves a moment that is about as high as the peak, with logits or with old gradients; together the logits are gained.
    assert [peaks[0] - peak for peak in peaks] == [0, 0, 1028, 64 * 4096 * 4 + 1028]


def clear_first(source: str) -> str:
    without = source.replace("        optimizer.zero_grad()\n", "")
    return without.replace("        hidden =", "        optimizer.zero_grad()\n        hidden =")


def test_an_earlier_zero_grad_is_worth_what_the_mended_script_measures(tmp_path) -> None:
    source = HEADER + TRAIN.format(middle=DEEP, batch=256, classes=512, after=READS)
    before = trace(tmp_path, source)
    worth = weigh(one_by_code(mended(tmp_path, source))["MF401"], before)
    assert worth == Worth(replay(before).peak_bytes, replay(trace(tmp_path, clear_first(source))).peak_bytes)
    assert worth.text == "-840.0 KiB at the peak (6.33 MiB -> 5.51 MiB)"


def test_a_detached_sum_is_worth_the_growth_of_the_plain_script(tmp_path) -> None:
    source = HEADER + TRAIN.format(middle=FLAT, batch=128, classes=1024, after=SUMS)
    before = trace(tmp_path, source)
    fixed = one_by_code(mended(tmp_path, source))
    # tanh's output and hidden, which the multiplication saved, (128 x 256) each; the loss's graph was freed by backward.
    assert weigh(fixed["MF101"], before).text == "-256.0 KiB a step"
    assert weigh(fixed["MF102"], before).text == "0 B a step"
    for fix, growth in ((False, 2 * 128 * 256 * 4), (True, 0)):
        peaks = [replay(api.trace(summing_step(fix=fix), num_steps)).peak_bytes for num_steps in (2, 3)]
        assert peaks[1] - peaks[0] == growth


def summing_step(*, fix: bool) -> Callable[[], None]:
    """One turn of TRAIN's loop as a function."""
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y, hits = torch.randn(128, 64), torch.randint(64, (128,)), torch.zeros(())

    def step() -> None:
        nonlocal hits
        hidden = model[:2](x)
        loss = nn.functional.cross_entropy(model[2](hidden), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        accuracy = (hidden.tanh() * hidden).mean()
        hits = hits + (accuracy.detach() if fix else accuracy)

    return step


EVALUATES = """
def evaluate(model, batches):
    model.eval()
    total = 0.0
    for x in batches:
        total += model(x).square().mean().item()
    return total

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model.train()
    loss = model(torch.randn(16, 64)).square().mean()
    loss.backward()
    optimizer.step()
    print({evaluate})
"""


def test_no_grad_around_an_evaluation_between_steps(tmp_path) -> None:
    source = HEADER + EVALUATES.format(evaluate="evaluate(model, [torch.randn(512, 64) for _ in range(2)])")
    before = trace(tmp_path, source)
    (made,) = mended(tmp_path, source).made
    assert (made.finding.code, made.action) == ("MF301", "with torch.no_grad()")
    after = trace(tmp_path, mended(tmp_path, source).text)
    assert weigh(made, before) == Worth(replay(before).peak_bytes, replay(after).peak_bytes)
    assert replay(after).peak_bytes < replay(before).peak_bytes
    elsewhere = replace(made, first_line=made.last_line + 1, last_line=made.last_line + 2)
    assert weigh(elsewhere, before) is None  # the traced step did not come there


def test_a_name_beside_which_another_holds_the_tensor_is_worth_nothing(tmp_path) -> None:
    plain = HEADER + TRAIN.format(middle=FLAT, batch=128, classes=1024, after=READS)
    made = one_by_code(mended(tmp_path, plain))["MF201"]
    before = trace(tmp_path, plain.replace("logits = model[2](hidden)", "logits = model.last = model[2](hidden)"))
    worth = weigh(made, before)
    assert worth == Worth(replay(before).peak_bytes, replay(before).peak_bytes)
    assert worth.text == "0 B at the peak (3.42 MiB before and after)"
