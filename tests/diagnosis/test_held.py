"""What something other than a variable holds at the peak for nothing: one program for each kind of holder, and those that are right."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from memfit import api
from memfit.core.trace import Storage, Trace
from memfit.diagnosis.collecting import find_idle_calls
from memfit.diagnosis.held import find_held
from memfit.measurement.collecting import EmptyingWatch

HEAD = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 2048), nn.Tanh(), nn.Linear(2048, 1))
"""
STEP = """
    loss = out.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
KIB = 1 << 10


pytestmark = pytest.mark.usefixtures("one_thread")


def find(folder: Path, source: str) -> list:
    (folder / "train.py").write_text(source)
    return api.find_measured(str(folder / "train.py"), [])


# Each holds x in another width: 16 KiB times 20, 30, 40, ...
HOLDERS = """
class Log:
    def __init__(self):
        self.data = {}

def remember(x):
    wide = x.repeat(1, 40)  # of a closure
    return lambda: wide.shape

def keep(module, inputs, output):
    keep.last = inputs[0].repeat(1, 50)  # on a function

def watch(module):
    kept = []
    def look(module, inputs, output):
        kept[:] = [inputs[0].repeat(1, 60)]  # of a hook
    module.register_forward_hook(look)

def fail(x):
    wide = x.repeat(1, 70)  # of a traceback
    raise ValueError(wide.shape)

log, seen, errors = Log(), [None, None], []
model[0].register_forward_hook(keep)
watch(model[0])
old = nn.Linear(16, 2048)
optimizer = torch.optim.SGD([*model.parameters(), *old.parameters()], lr=0.1)
old = nn.Linear(1, 1)
for step in range(4):
    x = torch.randn(256, 16)
    model.seen = x.repeat(1, 20)  # an attribute
    seen[1] = x.repeat(1, 30)  # an element
    log.data["wide"] = x.repeat(1, 80)  # in a dict
    shape = remember(x)
    try:
        fail(x)
    except ValueError as error:
        errors[:] = [error]
    out = model(x)
"""


def test_a_holder_of_each_kind_is_named_with_its_bytes_and_line(tmp_path) -> None:
    source = HEAD + HOLDERS + STEP
    found = find(tmp_path, source)
    lines = {number: text.partition("  # ")[2] for number, text in enumerate(source.splitlines(), 1)}
    shown = {
        (
            finding.code,
            lines[finding.line],
            finding.num_bytes // KIB,
            re.sub(r"\d+", "N", finding.message.partition(" holds at")[0]),
        )
        for finding in found
    }
    assert shown == {
        ("MF204", "an attribute", 320, "`model.seen` in __main__"),
        ("MF204", "an element", 480, "`seen[N]` in __main__"),
        ("MF204", "of a closure", 640, "`shape` in __main__ -> function <lambda> -> its closure -> cell"),
        ("MF204", "on a function", 800, "`keep.last` in __main__"),
        ("MF204", "of a hook", 960, "`model.N._forward_hooks[N]` in __main__ -> function look -> its closure -> cell[N]"),
        ("MF111", "of a traceback", 1120, "`errors[N]` in __main__ -> ValueError's traceback -> next -> frame fail() -> local `wide`"),
        ("MF204", "in a dict", 1280, "`log.data['wide']` in __main__"),
        ("MF205", "", 128, "`optimizer.param_groups[N]['params'][N]` in __main__"),
    }  # fmt: skip
    assert all(finding.measured and "the peak falls by" in finding.remedy for finding in found)


QUIET = """
class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.state = torch.zeros(256, 256)
    def forward(self, x):
        self.state = (self.state * 0.9 + x.repeat(1, 16)).detach()  # carried over to the next step
        return self.state.mean()

cell = Cell()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = {"x": [torch.randn(256, 16) for _ in range(4)], "later": torch.randn(256, 1024)}
average = [parameter.detach().clone() for parameter in model.parameters()]
buffer = [torch.zeros(256, 256) for _ in range(4)]
teacher = nn.Linear(16, 2048)
for step in range(4):
    x = data["x"][step]
    model.out = model(x)
    buffer[step] = x.repeat(1, 16)
    out = model.out * cell(x) + buffer[step - 1].mean()
    model.read_later = x.repeat(1, 32)
"""
AFTER = """
    print(model.read_later.mean().item())
    for mean, parameter in zip(average, model.parameters()):
        mean.lerp_(parameter.detach(), 0.1)
"""


def test_what_is_read_later_or_was_there_before_is_not_called_held_for_nothing(tmp_path) -> None:
    assert find(tmp_path, HEAD + QUIET + STEP + AFTER) == []


DELETES = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
cache = {}
def train(x):
    wide = x.repeat(1, 64)
    cache["last"] = wide[:, :1]  # a view
    alone = x.repeat(1, 64)
    same = wide
    scale = wide.mean() + alone.mean()
    del wide, alone
    hidden = model[0](x)
    out = model[2](model[1](hidden)) * scale
    del hidden
    loss = out.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return same.mean().item()

for step in range(4):
    train(torch.randn(256, 16))
"""


def test_a_del_that_frees_nothing_says_who_holds_the_storage(tmp_path) -> None:
    found = find(tmp_path, HEAD + DELETES)
    (finding,) = (each for each in found if each.code == "MF804")
    assert finding.message == (
        "`del wide` of train frees nothing: `same` in train() holds the same storage, also at the peak in backward"
    )
    assert (finding.num_bytes, (HEAD + DELETES).splitlines()[finding.line - 1]) == (1024 * KIB, "    del wide, alone")


def row(storage: int, when: str, last_use: int, **given) -> dict:
    plain = {"kind": "attribute", "name": "net.last in __main__", "chain": "`net.last` in __main__", "is_old": False}
    return {"storage": storage, "when": when, "last_use": last_use, **plain, **given}


@pytest.mark.parametrize(
    ("rows", "num_bytes"),
    [
        ([row(1, "peak", 4)], None),  # it lives on, and nothing says that the next step will not read it
        ([row(0, "start", -1), row(1, "peak", 4)], 2 << 20),
        ([row(0, "start", 7), row(1, "peak", 4)], None),  # what stood there before was read in this step
        ([row(0, "start", -1), row(1, "peak", 9)], None),  # read after the peak
        ([row(0, "start", -1, name="another"), row(1, "peak", 4)], None),
        ([row(2, "start", -1)], 4 << 20),
        ([row(2, "start", -1, is_old=True)], None),
        ([row(2, "start", -1, is_old=True, kind="traceback")], 4 << 20),
        ([row(2, "start", 5)], None),
    ],
)
def test_when_a_holder_holds_for_nothing(rows: list, num_bytes: int | None) -> None:
    storages = tuple(Storage(size << 20, "temporary", location="a.py:7") for size in (1, 2, 4))
    events = (
        ("alloc", 0), ("alloc", 2), ("phase", 0), ("alloc", 1), ("phase", 1), ("release", 0), ("phase", 2), ("spike", 8 << 20), ("phase", 4),
    )  # fmt: skip
    found = find_held(Trace("cpu", storages, (), (), (), events, meta={"held": rows}))
    assert [finding.num_bytes for finding in found] == ([] if num_bytes is None else [num_bytes])


def test_an_emptied_cache_that_gives_nothing_back_is_told_with_its_time(monkeypatch) -> None:
    taken = [64 << 20, 64 << 20, 64 << 20, 32 << 20]
    called = []
    monkeypatch.setattr(torch.cuda, "empty_cache", real := lambda: called.append(1))
    watch = EmptyingWatch(lambda: taken[len(watch.seen) + len(called)])
    watch.start()
    torch.cuda.empty_cache()
    torch.cuda.empty_cache()
    watch.stop()
    assert torch.cuda.empty_cache is real
    assert [each.freed_bytes for each in watch.seen] == [0, 32 << 20]
    assert watch.seen[0].location.startswith(__file__)
    rows = [
        {"location": f"train.py:{line}", "seconds": 0.01, "freed_bytes": num} for line, num in ((5, 0), (5, 0), (9, 1 << 20))
    ]
    meta = {"step": 2, "measured_peak_bytes": 8 << 20, "emptyings": rows}
    (finding,) = find_idle_calls(Trace("cuda", (), (), (), (), (), step_seconds=0.1, meta=meta))
    assert (finding.code, finding.line) == ("MF801", 5)
    assert finding.message == "empty_cache() runs 2 times in the step: 20 ms, 20% of the step, and gave back 0 B"
