"""What is dead and held at the peak: names, places and bytes in small programs whose cure was measured, and silence where there is none."""

from __future__ import annotations

import gc
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import oracle
from memfit import api
from memfit.core.dead import Dead, dead_in, freed_bytes, let_go_early
from memfit.core.liveness import DeadName
from memfit.core.replay import replay
from memfit.core.trace import Cell, Handle, Storage, Trace
from memfit.diagnosis.dead import DEAD_NAME, LATE_ZERO_GRAD, find_dead, peak_without_dead

KIB, MIB = 1 << 10, 1 << 20
NAME = DeadName("train.py", "f", "big", 4, (3,))


pytestmark = pytest.mark.usefixtures("one_thread")


def find(tmp_path: Path, source: str) -> list:
    path = tmp_path / "train.py"
    path.write_text(
        "import torch\nfrom torch import nn\nfrom torch.nn import functional as F\n" + textwrap.dedent(source).lstrip("\n")
    )
    return api.find_measured(str(path), [])


def shown(findings: list) -> list[tuple[str, int, int]]:
    return [(finding.code, finding.line, finding.num_bytes) for finding in findings]


LOGITS = """
    def step(head, hidden, targets):
        logits = head(hidden)
        loss = F.cross_entropy(logits, targets){cure}
        loss.backward()
        return loss.item()
    print(step(nn.Linear(16, 1024), torch.randn(128, 16, requires_grad=True), torch.randint(1024, (128,))))
"""


def test_logits_that_outlive_the_loss(tmp_path) -> None:
    (finding,) = find(tmp_path, LOGITS.format(cure=""))
    assert (finding.code, finding.line, finding.num_bytes, finding.measured) == (DEAD_NAME, 6, 128 * 1024 * 4, True)
    assert finding.message == "`logits` of step, bound in line 5, is dead after line 6 and yet held at the peak in backward"
    assert finding.remedy == "`del logits` after line 6: the peak falls by 512.0 KiB."
    assert finding.path == str(tmp_path / "train.py")
    assert find(tmp_path, LOGITS.format(cure="; del logits")) == []


OUTPUTS = """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.head = nn.Linear(16, 32), nn.Linear(32, 1024)
        def forward(self, x, y):
            logits = self.head(self.first(x).tanh())  # of three dimensions: a view of what the matrix product made
            return {{"loss": F.cross_entropy(logits.view(-1, 1024), y.view(-1)), "logits": logits}}
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        outputs = model(torch.randn(4, 32, 16), torch.randint(1024, (4, 32)))
        loss = outputs["loss"]{cure}
        loss.backward()
        optimizer.step()
"""


def test_the_outputs_of_a_model_kept_for_the_loss_in_them(tmp_path) -> None:
    (finding,) = find(tmp_path, OUTPUTS.format(cure=""))
    assert shown([finding]) == [(DEAD_NAME, 16, 4 * 32 * 1024 * 4)]
    assert finding.message == "`outputs`, bound in line 15, is dead after line 16 and yet held at the peak in backward"
    assert find(tmp_path, OUTPUTS.format(cure="; del outputs")) == []


PREVIOUS = """
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1))
    def steps():
        for _ in range(4):
            loss = model(torch.randn(256, 64)).square().mean(){cure}
        return {result}
    steps()
"""


def test_the_loss_of_the_turn_before_counts_with_its_graph(tmp_path) -> None:
    (finding,) = find(tmp_path, PREVIOUS.format(cure="", result="loss"))
    # Its graph saves the input (256 x 64), two outputs of tanh (256 x 256), the last output (256 x 1) and the loss's own.
    assert shown([finding]) == [(DEAD_NAME, 7, (256 * 64 + 2 * 256 * 256 + 256 + 1) * 4)]
    assert "`loss` of steps still holds what line 7 bound, which nobody reads" in finding.message
    assert "before control comes to line 6 again" in finding.remedy
    assert find(tmp_path, PREVIOUS.format(cure="; del loss", result="None")) == []


ZERO_GRAD = """
    layers = [layer for _ in range(10) for layer in (nn.Linear(128, 128), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(128, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        {early}
        loss = model(torch.randn(256, 128)).square().mean()
        {late}
        loss.backward()
        optimizer.step()
"""


def test_gradients_that_are_cleared_after_the_forward(tmp_path) -> None:
    (finding,) = find(tmp_path, ZERO_GRAD.format(early="pass", late="optimizer.zero_grad()"))
    parameters = 10 * (128 * 128 + 128) + 128 + 1
    assert shown([finding]) == [(LATE_ZERO_GRAD, 10, parameters * 4)]
    assert "the peak falls by 517.0 KiB, to where another moment of the step is as high." in finding.remedy
    assert find(tmp_path, ZERO_GRAD.format(early="optimizer.zero_grad()", late="pass")) == []


def test_gradients_that_add_up_are_not_called_dead(tmp_path) -> None:
    source = ZERO_GRAD.format(early="pass", late="pass").replace("optimizer.step()", "optimizer.step() if _ % 2 else None")
    assert find(tmp_path, source) == []


QUIET = {
    "everything is read": """
        model = nn.Linear(64, 512)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen = 0.0
        for _ in range(3):
            x = torch.randn(256, 64)
            out = model(x)
            loss = out.square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen += out.detach().mean().item() + x.mean().item()
    """,
    "a list holds it too": """
        model = nn.Linear(64, 512)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            kept = []
            out = model(torch.randn(256, 64))
            kept.append(out)
            loss = out.square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(kept[0].shape)
    """,
    "a closure may read it": """
        model = nn.Linear(64, 512)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        def step():
            out = model(torch.randn(256, 64))
            def report():
                return out.shape
            loss = out.square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return report
        for _ in range(3):
            step()()
    """,
    "it is small": """
        model = nn.Sequential(nn.Linear(64, 2048), nn.Tanh(), nn.Linear(2048, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            out = model(torch.randn(256, 64))
            loss = out.square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    """,
    "no tensor anywhere": "names = [1, 2]\nprint(names)\n",
}


@pytest.mark.parametrize("source", QUIET.values(), ids=QUIET.keys())
def test_nothing_is_said_where_nothing_is_held_for_nothing(tmp_path, source: str) -> None:
    assert find(tmp_path, source) == []


COLLECTS = """
    import gc
    class Node:
        pass
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.randn(256, 64)).square().mean()
        loss.backward()
        optimizer.step()
        {body}
        gc.collect()
"""


def test_a_collection_in_every_step_that_frees_nothing_is_told_with_its_time(tmp_path) -> None:
    gc.unfreeze()  # so that a collection takes its time, as in a program that has imported much
    (finding,) = find(tmp_path, COLLECTS.format(body="seen.append(loss.item())"))
    assert (finding.code, finding.line, finding.num_bytes) == ("MF802", 16, None)
    assert finding.message.startswith("gc.collect() runs in the step: ")
    assert finding.message.endswith(" and gave back 0 B")
    assert 0 < int(finding.message.split()[5]) < 10_000  # ms: a look at every object of this process
    circle = "node = Node(); node.own, node.tensor = node, torch.empty(1 << 18); del node"
    found = find(tmp_path, COLLECTS.format(body=circle))  # here it frees what only a collection can
    assert "MF802" not in {finding.code for finding in found}
    assert not [each for each in gc.callbacks if "memfit" in type(getattr(each, "__self__", None)).__module__]


def test_a_script_that_dies_in_its_first_step_is_told_what_was_found_up_to_there(tmp_path) -> None:
    assert shown(find(tmp_path, LOGITS.format(cure="") + "    raise RuntimeError('no data')\n")) == [(DEAD_NAME, 6, 512 * KIB)]


def test_what_is_found_is_what_the_allocator_sees() -> None:
    """The cure of the finding, measured by the allocator's own events."""
    peaks = []
    for cure in ("", "; del logits"):
        source = textwrap.dedent(LOGITS.format(cure=cure)).replace("print(step(", "run = lambda: (step(")
        names: dict = {"torch": torch, "nn": nn, "F": F}
        exec(source, names)
        memory = oracle.measure_step(names["run"])[1]
        peaks.append(memory.peak_bytes - memory.baseline_bytes)
    assert peaks[0] - peaks[1] == 512 * KIB


# ---- on traces alone ---------------------------------------------------------------------------------------------------------------


def test_autograds_other_holds_stay_when_a_name_goes() -> None:
    storages = tuple(Storage(size * MIB, "activation") for size in (4, 2, 1))
    cells, handles = (Cell(0), Cell(1)), (Handle(0), Handle(1))
    # 0: saved by a graph that lives on. 1: saved by the graph that goes with the name of 2.
    events = (
        ("phase", 0), ("alloc", 0), ("save", 0), ("alloc", 1), ("save", 1), ("release", 1), ("alloc", 2),
        ("phase", 2), ("release", 0), ("drop", 0), ("phase", 4), ("drop", 1), ("release", 2),
    )  # fmt: skip
    trace = Trace("cpu", storages, cells, handles, (), events)
    early = let_go_early(trace, [Dead(NAME, 0, 7), Dead(NAME, 2, 7)])
    assert early.events[7:10] == (("release", 0), ("drop", 1), ("release", 2))
    assert replay(early).live_bytes[6:12] == [7 * MIB, 7 * MIB, 5 * MIB, 4 * MIB, 4 * MIB, 0]
    assert sorted(early.events) == sorted(trace.events)
    assert let_go_early(trace, []) == trace


def test_what_is_alive_at_the_steps_end_can_die_too() -> None:
    events = (("alloc", 0), ("phase", 0), ("phase", 2), ("phase", 3))
    trace = Trace("cpu", (Storage(8, "temporary"),), (), (), (), events)
    assert let_go_early(trace, [Dead(NAME, 0, 3)]).events == (*events[:3], ("release", 0), ("phase", 3))


def test_what_is_dead_when_the_step_begins_is_gone_before_it() -> None:
    events = (("alloc", 0), ("alloc", 1), ("phase", 0), ("phase", 2), ("release", 1))
    trace = Trace("cpu", (Storage(8, "temporary"), Storage(4, "temporary")), (), (), (), events)
    assert replay(let_go_early(trace, [Dead(NAME, 0, 3)])).peak_bytes == 4
    assert let_go_early(trace, [Dead(NAME, 0, 3), Dead(NAME, 1, 3)]).events == (("phase", 0), ("phase", 2))


def test_what_would_not_lower_the_peak_is_not_told() -> None:
    row = {
        "event": 2,
        "storage": 0,
        "path": "a.py",
        "function": "f",
        "name": "x",
        "line": 4,
        "bound_lines": (2,),
        "at_start": False,
        "is_unsaved": True,
    }
    rise, peak = ("spike", 8 * MIB), ("spike", 9 * MIB)
    events = (("alloc", 0), ("phase", 0), rise, ("release", 0), peak)  # 9 MiB in the end with it, and 9 MiB without
    trace = Trace("cpu", (Storage(MIB, "temporary"),), (), (), (), events, meta={"dead_names": [row]})
    assert find_dead(trace) == []
    assert peak_without_dead(trace) == replay(trace).peak_bytes == 9 * MIB
    lower = replace(trace, events=(*events[:-1], ("spike", 8 * MIB + 1)))
    assert [finding.remedy for finding in find_dead(lower)] == [
        "`del x` after line 4: the peak falls by 1024.0 KiB, to where another moment of the step is as high."
    ]


def test_notes_survive_the_file(tmp_path) -> None:
    row = {
        "event": 3,
        "storage": 0,
        "path": "a.py",
        "function": "f",
        "name": "x",
        "line": 4,
        "bound_lines": (2, 3),
        "at_start": True,
        "is_unsaved": True,
    }
    events = (("alloc", 0), ("phase", 0), ("spike", 8 * MIB), ("phase", 2), ("release", 0))
    trace = Trace("cpu", (Storage(MIB, "temporary"),), (), (), (), events, meta={"dead_names": [row]})
    trace.save(tmp_path / "trace.json")
    loaded = Trace.load(tmp_path / "trace.json")
    assert freed_bytes(loaded) == {DeadName("a.py", "f", "x", 4, (2, 3), True): MIB}
    assert freed_bytes(replace(trace, meta={"dead_names": [{**row, "is_unsaved": False}]})) == {}
    assert dead_in(loaded) == dead_in(trace) == [Dead(DeadName("a.py", "f", "x", 4, (2, 3), True), 0, 3)]
    assert find_dead(loaded) == []  # it was alive when the step was at its highest
    assert peak_without_dead(loaded) == 9 * MIB
    early = Trace.load(tmp_path / "trace.json")
    early.meta["dead_names"][0]["event"] = 2
    assert [(finding.line, finding.num_bytes) for finding in find_dead(early)] == [(3, MIB)]
    assert peak_without_dead(early) == 8 * MIB
