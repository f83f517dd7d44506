"""Names let go in running programs: what goes, what stays, what the program can notice (nothing), and what it is worth."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import weakref
from pathlib import Path

import pytest
import torch

import memfit
from memfit.techniques import release
from memfit.techniques.release import KEEP, NOTE, RELEASE, let_go, load_code, releases

MIB = 1 << 20


@pytest.fixture
def on():
    """Releases at work, as `memfit run` has them."""
    end = releases.start(RELEASE)
    releases.stopped_by = ""
    releases.mode = RELEASE  # also where the tests themselves run under a tracer
    yield
    end()


def load(source: str, path: Path | str = "program.py") -> dict:
    """The globals of the program after it ran with its releases."""
    names = {"torch": torch, **release.NAMES, "__name__": "__main__"}
    exec(load_code(textwrap.dedent(source).encode(), str(path), is_main=True), names)
    return names


def live_in(source: str) -> list[str]:
    """Runs `f(ask)`; the names of the tensors still alive at each call of `ask()`."""
    refs: dict[str, weakref.ref[torch.UntypedStorage]] = {}

    def mark(name: str, *size: int) -> torch.Tensor:
        tensor = torch.ones(*size or (4,))
        refs[name] = weakref.ref(tensor.untyped_storage())
        return tensor

    seen: list[str] = []
    program = load(source)
    program["f"](mark, lambda: seen.append(" ".join(name for name, ref in refs.items() if ref() is not None)))
    return seen


@pytest.mark.parametrize("is_on", [True, False])
def test_a_tensor_dies_where_it_is_read_last(on, is_on: bool) -> None:
    if not is_on:
        releases.mode = NOTE
    seen = live_in("""
        def f(mark, ask):
            a = mark("a")
            b = mark("b")
            total = a.sum()
            ask()
            total = total + b.sum()
            ask()
            return total
    """)
    assert seen == (["b", ""] if is_on else ["a b", "a b"])


def test_containers_and_outputs_of_models_go_whole(on) -> None:
    seen = live_in("""
        from collections import OrderedDict, namedtuple
        Pair = namedtuple("Pair", "x y")
        class Output(OrderedDict):
            def __init__(self, **given):
                super().__init__(given)
                self.__dict__.update(given)
        def f(mark, ask):
            xs = [mark("a"), (mark("b"), 3, "text")]
            first = xs[0].sum()
            ask()
            pair = Pair(mark("c"), None)
            output = Output(logits=mark("d"), hidden={1: [mark("e")]})
            first = first + pair.x.sum() + output.logits.sum()
            ask()
            return first
    """)
    assert seen == ["", ""]


def test_what_something_watches_die_stays(on) -> None:
    seen = live_in("""
        import tempfile, weakref
        class Own(list):
            def __del__(self):
                pass
        class Thing:
            def __init__(self, held):
                self.held = held
        def f(mark, ask):
            watched = mark("watched")
            ref = weakref.ref(watched)
            own = Own([mark("own")])
            thing = Thing(mark("thing"))
            marked = mark("marked")
            marked.note = Thing(1)
            mixed = [mark("mixed"), Thing(2)]
            lazy = iter([mark("lazy")])
            total = watched.sum() + own[0].sum() + thing.held.sum() + marked.sum() + mixed[0].sum() + next(lazy).sum()
            ask()
            return total, ref() is not None
    """)
    assert seen == ["watched own thing marked mixed lazy"]


def test_a_resource_whose_number_alone_is_read_on_stays_open(on) -> None:
    program = load("""
        class File:
            def __init__(self):
                self.state = [True]
            def __del__(self):
                self.state[0] = False
        def f():
            file = File()
            state = file.state
            done = torch.ones(1).sum()
            return state[0]
        found = f()
    """)
    assert program["found"] is True


def test_the_previous_loss_does_not_outlive_its_step(on) -> None:
    source = """
        def f(mark, ask):
            for i in range(3):
                ask()
                loss = mark(f"loss{i}")
            ask()
            return loss
    """
    assert live_in(source) == ["", "", "", "loss2"]
    releases.mode = KEEP
    assert live_in(source) == ["", "loss0", "loss1", "loss2"]


def test_views_and_graphs_keep_what_they_need(on) -> None:
    program = load("""
        def f(x):
            hidden = x * 2
            flat = hidden.view(-1)
            loss = flat.square().sum()
            loss.backward()
            kept = flat[:2]
            return kept, loss.item()
    """)
    x = torch.ones(2, 2, requires_grad=True)
    kept, loss = program["f"](x)
    assert (kept.tolist(), loss, x.grad.tolist()) == ([2.0, 2.0], 16.0, [[8.0, 8.0], [8.0, 8.0]])


@pytest.mark.parametrize(
    ("name", "reads"),
    [
        ("a debugger", "def look():\n    breakpoint()\n"),
        ("a frame", "import sys\ndef look():\n    return sys._getframe(1).f_locals['big'].sum().item()\n"),
        (
            "a traceback",
            "def look():\n    try:\n        1 / 0\n    except ZeroDivisionError as error:\n        error.__traceback__.tb_frame\n",
        ),
        ("an address", "import ctypes\ndef look():\n    pass\n"),
    ],
)
def test_where_somebody_may_read_frames_nothing_goes(on, name: str, reads: str) -> None:
    source = reads + "def f():\n    big = torch.ones(2)\n    big.sum()\n    return torch.zeros(1)\n"
    program = load(source)
    assert program["f"]().item() == 0
    assert releases.mode == KEEP
    assert releases.stopped_by.startswith("program.py, line ")
    assert release.NAME not in program["f"].__code__.co_names


def test_a_debugger_at_a_breakpoint_finds_every_variable(on, monkeypatch) -> None:
    found = {}
    monkeypatch.setattr(sys, "breakpointhook", lambda: found.update(sys._getframe(1).f_back.f_locals))
    load("""
        def look():
            breakpoint()
        def f():
            big = torch.ones(2)
            other = big.sum()
            print(other)
            look()
        f()
    """)
    assert sorted(found) == ["big", "other"]
    assert all(isinstance(value, torch.Tensor) for value in found.values())


def test_under_a_tracer_nothing_goes() -> None:
    before = sys.gettrace()
    sys.settrace(lambda *_: None)
    try:
        releases.start(RELEASE)
        assert releases.mode == KEEP
        assert releases.stopped_by == "a debugger or tracer is at work"
    finally:
        sys.settrace(before)


def test_tracebacks_name_the_same_lines(on, tmp_path) -> None:
    path = tmp_path / "program.py"
    source = "def f(x):\n    y = x * 2\n    z = (y +\n         1)\n\n    return z.reshape(7)\n\n\nf(torch.ones(2))\n"
    path.write_text(source)
    shown = []
    for mode in (KEEP, RELEASE):
        releases.mode = mode
        with pytest.raises(RuntimeError, match=r"shape '.7.' is invalid") as caught:
            load(source, path)
        shown.append([(entry.name, entry.lineno, str(entry.statement).strip()) for entry in caught.traceback[-2:]])
    assert shown[0] == shown[1]
    assert shown[0][-1][:2] == ("f", 5)  # from 0
    releases.mode = KEEP
    plain = load_code(source.encode(), str(path), is_main=True).co_consts[0]
    releases.mode = RELEASE
    released = load_code(source.encode(), str(path), is_main=True).co_consts[0]
    assert release.NAME in released.co_names
    # No line that a tracer or coverage would not have seen; `(y +` ends in line 4, after which y is let go.
    assert {line for *_, line in released.co_lines()} == {line for *_, line in plain.co_lines()}


def test_a_program_at_pythons_limits_is_left_as_it_is(on) -> None:
    deep = "def f(xs):\n" + "".join("    " * (depth + 1) + f"for i{depth} in xs:\n" for depth in range(20))
    deep += "    " * 21 + "print(y) if i0 else None\n" + "    " * 21 + "y = torch.ones(1)\n" + "    " * 21 + "z = y\n"
    compile(deep, "deep.py", "exec")
    assert release.NAME not in load(deep)["f"].__code__.co_names
    chain = "def f(x):\n    y = x * 2\n    print(y)\n    if x == 0:\n        pass\n"
    chain += "".join(f"    elif x == {number}:\n        pass\n" for number in range(1, 300))
    assert load(chain + "    return x\n")["f"](torch.ones(1)).item() == 1


def test_a_compiled_function_stays_one_graph(on) -> None:
    program = load("""
        def f(x):
            a = x * 2
            b = a + 1
            for _ in range(2):
                c = b + a  # may be unbound after the loop
            with torch.no_grad():
                d = a + 1
            e = d.sum()
            return b.sum() + c.sum() + e - e
    """)
    assert release.NAME in program["f"].__code__.co_names
    compiled = torch.compile(program["f"], backend="eager", fullgraph=True)
    assert release.MAY in program["f"].__code__.co_names
    assert compiled(torch.ones(2)).item() == program["f"](torch.ones(2)).item() == 16
    torch._dynamo.reset()


def test_values_are_only_looked_at_and_cost_a_microsecond(on) -> None:
    import timeit

    tensor, number = torch.ones(2), 3
    empty = min(timeit.repeat(lambda: None, number=2000, repeat=5))
    for value, limit in ((number, 1e-6), (tensor, 5e-6)):
        seconds = (min(timeit.repeat(lambda value=value: let_go(value, 0), number=2000, repeat=5)) - empty) / 2000
        assert seconds < limit, (value, seconds)


# ---- whole programs, each in a process of its own ----------------------------------------------------------------------------------

# Shaped like the report this technique is known from: large intermediates of several stages in one function, one small result each.
GUIDE = """
import json, sys
import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
encoder = nn.Linear(8, 16)
optimizer = torch.optim.Adam(encoder.parameters(), lr=0.01)


@torch.no_grad()
def features(x):
    answers_types_emb_all = x.repeat(1, 2048)        # (B, 8) -> (B, 16384), 1 MiB with B = 16
    answers = answers_types_emb_all.mean(1)
    questions_emb_all = x.repeat(1, 2048)
    questions = questions_emb_all.amax(1)
    passages_emb_all = x.repeat(1, 2048)
    passages = passages_emb_all.amin(1)
    tables_emb_all = x.repeat(1, 2048)
    tables = tables_emb_all.std(1)
    return torch.stack([answers, questions, passages, tables], 1)


losses = []
for step in range(5):
    x = torch.randn(16, 8)
    out = encoder(x).mean(1) * features(x).sum(1)
    loss = out.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(json.dumps([losses, [p.tolist() for p in encoder.parameters()]]))
"""

PEAKS = """
import json, sys
from memfit import api
from memfit.core.dead import dead_in, let_go_early
from memfit.core.replay import replay
from memfit.runtime.script import run_script, trace_run

what, path = sys.argv[1:]
if what == "trace":
    trace = trace_run(path, []).whole()
    names = [[each.name.name, trace.storages[each.storage].nbytes] for each in dead_in(trace)]
    print(json.dumps([replay(trace).peak_bytes, replay(let_go_early(trace, dead_in(trace))).peak_bytes, names]))
else:
    session = api.fit(None, None, 1 << 30)
    ran = run_script(path, [], session, release=what == "release")
    if ran.error:
        raise ran.error
    print(json.dumps([[replay(each).peak_bytes for each in session.traces], ran.result.messages, ran.result.let_go]))
"""


def python(folder: Path, *words: str) -> str:
    source = str(Path(memfit.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def peaks(folder: Path, source: str) -> tuple[dict, dict[str, str]]:
    """What PEAKS prints for 'trace', 'keep' and 'release', and what the program prints in each."""
    (folder / "peaks.py").write_text(PEAKS)
    (folder / "train.py").write_text(source)
    numbers, outs = {}, {"python": python(folder, "train.py")}
    for what in ("trace", "keep", "release"):
        *out, last = python(folder, "peaks.py", what, "train.py").splitlines(keepends=True)
        numbers[what], outs[what] = json.loads(last), "".join(out)
    return numbers, outs


def test_del_at_its_best_takes_three_of_four_stages_off_the_peak(tmp_path) -> None:
    numbers, outs = peaks(tmp_path, GUIDE)
    assert outs["keep"] == outs["release"] == outs["python"]  # losses and parameters to the last bit
    (_, plain), _, nothing = numbers["keep"]
    (_, released), messages, let_go = numbers["release"]
    # Four stages of 1 MiB are alive when the results are stacked; released, the peak is at the last stage's end, with only that
    # stage, and without the stack (4 x 16 floats). Last step's `out` (16 floats) and `loss` (1) are not alive either.
    assert plain - released == 3 * MIB + (4 * 16 + 16 + 1) * 4
    assert released < 0.3 * plain
    assert (nothing, messages) == ({}, [])
    assert let_go["`answers_types_emb_all` (train.py:15)"] == MIB
    assert numbers["trace"][:2] == [plain, released]


TRAINS = """
import json
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
torch.set_num_threads(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(16, 64), nn.Linear(64, 1024)

    def forward(self, x):
        hidden = self.first(x)
        wide = hidden.repeat(1, 4)
        gate = wide.sigmoid()
        hidden = hidden * gate[:, :64]
        return self.head(hidden)


def main():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        x, y = torch.randn(128, 16), torch.randint(1024, (128,))
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(loss.item(), [p.double().sum().item() for p in model.parameters()])


main()
"""


def test_a_trace_of_the_plain_step_foretells_the_released_peak_to_the_byte(tmp_path) -> None:
    numbers, outs = peaks(tmp_path, TRAINS)
    assert outs["keep"] == outs["release"] == outs["python"]
    plain, foretold, names = numbers["trace"]
    assert plain == numbers["keep"][0][-1]
    assert foretold == numbers["release"][0][-1]
    # The logits, which cross entropy keeps in another form, through backward; and the targets once nll_loss's backward is done.
    assert plain - foretold == 128 * 1024 * 4 + 128 * 8
    assert ["logits", 128 * 1024 * 4] in names


def test_modules_beside_the_script_are_released_and_installed_ones_are_not(tmp_path) -> None:
    for folder in ("parts", "env/site-packages"):
        (tmp_path / folder).mkdir(parents=True)
    body = "import torch\ndef f():\n    big = torch.ones(4)\n    total = big.sum()\n    return total\n"
    (tmp_path / "own.py").write_text(body)
    (tmp_path / "parts" / "__init__.py").write_text("")
    (tmp_path / "parts" / "inner.py").write_text("# -*- coding: latin-1 -*-\n" + body)
    (tmp_path / "env" / "site-packages" / "installed.py").write_text(body)
    (tmp_path / "train.py").write_text(
        "import inspect, sys\nsys.path.append(sys.path[0] + '/env/site-packages')\n"
        "import installed, own\nfrom parts import inner\n"
        "for each in (own, inner, installed):\n"
        f"    print(each.__name__, {release.NAME!r} in each.f.__code__.co_names, len(inspect.getsource(each.f).splitlines()))\n"
        "print(sorted(name for name in globals() if not name.startswith('__')))\n"
    )
    out = python(tmp_path, "-m", "memfit", "run", "--budget", "1GiB", "train.py")
    assert out.splitlines() == [
        "own True 4",
        "parts.inner True 4",
        "installed False 4",
        "['each', 'inner', 'inspect', 'installed', 'own', 'sys']",
    ]
    plain = python(tmp_path, "-m", "memfit", "run", "--no-release", "--budget", "1GiB", "train.py")
    assert plain.splitlines()[:2] == ["own False 4", "parts.inner False 4"]
    assert python(tmp_path, "train.py").splitlines()[:2] == ["own False 4", "parts.inner False 4"]  # no .pyc has them


def test_a_module_that_reads_frames_ends_all_releases(tmp_path) -> None:
    (tmp_path / "look.py").write_text("import sys\ndef names():\n    return sorted(sys._getframe(1).f_locals)\n")
    (tmp_path / "train.py").write_text(
        "import torch\nimport look\n"
        "def f():\n    big = torch.ones(4)\n    total = big.sum()\n    found = look.names()\n    return found, total\n"
        "print(f())\n"
    )
    (tmp_path / "peaks.py").write_text(PEAKS)
    out = python(tmp_path, "peaks.py", "release", "train.py").splitlines()
    assert out[0] == python(tmp_path, "train.py").strip()
    (message,) = json.loads(out[-1])[1]
    assert message.startswith("no variable is let go, since the program may read some without naming them (")
    assert message.endswith("look.py, line 3: f_locals).")
