"""The mended copy: what is changed for which growth, and when a change is taken back. Runs of programs are stood in for."""

from __future__ import annotations

import textwrap

import pytest
import torch

from memfit.core.growth import CONTAINER, CYCLE, GRAPH, Growth, GrowthReport
from memfit.core.proof import growth_per_step
from memfit.diagnosis.mending import mend_growth
from memfit.diagnosis.proving import Ran, prove
from memfit.diagnosis.values import ValueLog

SUMS = """
    import torch

    def train(model, optimizer, batches):
        total = 0
        for x in batches:
            loss = model(x).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss / 8
        {end}
"""
SAFE, DOUBTFUL = SUMS.format(end="print(total)"), SUMS.format(end="return total")


@pytest.fixture
def program(tmp_path):
    """Writes a program; gives a growth at the line that holds the text."""

    def write(source, text, kind=GRAPH, **more):
        path = tmp_path / "program.py"
        path.write_text(textwrap.dedent(source))
        [line] = [number for number, each in enumerate(path.read_text().splitlines(), start=1) if text in each]
        return Growth(kind, str(path), line, num_bytes=512, nodes_per_step=3, **more)

    return write


def changed_lines(mended):
    return [line for line in mended.diff.splitlines() if line.startswith("+") and not line.startswith("+++")]


def test_a_sum_that_nobody_reads_with_its_graph_is_mended_by_the_static_rule(program):
    [mended], unmended = mend_growth([program(SAFE, "total +=")], only_safe=True)
    assert changed_lines(mended) == ["+        total += loss.detach() / 8"]
    assert (mended.codes, mended.num_safe, mended.num_tried, unmended) == (("MF102",), 1, 0, ())


def test_a_sum_that_is_returned_is_mended_only_where_changes_are_tried(program):
    growth = program(DOUBTFUL, "total +=")
    assert mend_growth([growth], only_safe=True) == ((), (growth,))
    [mended], unmended = mend_growth([growth], only_safe=False)
    assert changed_lines(mended) == ["+        total += loss.detach() / 8"]
    assert (mended.codes, mended.num_safe, mended.num_tried, unmended) == ((), 0, 1, ())


@pytest.mark.parametrize(
    ("source", "text", "more", "expected"),
    [
        ("self.state = 0.9 * self.state + mean", "self", {}, ["+self.state = (0.9 * self.state + mean).detach()"]),
        ("log[name].append(out)", "log", {"kind": CONTAINER, "is_attached": True}, ["+log[name].append(out.detach())"]),
        ("seen.insert(0, out)", "seen", {"kind": CONTAINER, "is_attached": True}, ["+seen.insert(0, out.detach())"]),
        ("seen.append(out[:, 0])", "seen", {"kind": CONTAINER, "used_bytes": 8}, ["+seen.append(out[:, 0].clone())"]),
        (
            "import torch\nfor x in batches:\n    total += net(x)",
            "total",
            {"is_backwarded": False, "loop": "program.py:2"},
            ["+with torch.no_grad():", "+    for x in batches:", "+        total += net(x)"],
        ),
        ("seen.append(out)", "seen", {"kind": CONTAINER}, None),  # data without a graph: only its reader knows when it may go
        ("seen.append({'out': out})", "seen", {"kind": CONTAINER, "is_attached": True}, None),
        ("loss.backward(retain_graph=True)", "loss", {}, None),
        ("self.me = self", "self", {"kind": CYCLE}, None),
    ],
)
def test_the_remedy_of_a_growth_is_tried_at_its_line(program, source, text, more, expected):
    growth = program(f"# torch\n{source}\n" if "import torch" not in source else source, text, **more)
    mended, unmended = mend_growth([growth], only_safe=False)
    assert [changed_lines(each) for each in mended] == ([expected] if expected else [])
    assert unmended == (() if expected else (growth,))


def test_files_that_are_not_the_users_or_not_there_are_left_alone(tmp_path):
    installed = tmp_path / "site-packages" / "lib.py"
    installed.parent.mkdir()
    installed.write_text(textwrap.dedent(DOUBTFUL))
    growths = [Growth(GRAPH, str(installed), 11, num_bytes=512), Growth(GRAPH, str(tmp_path / "gone.py"), 1, num_bytes=512)]
    assert mend_growth(growths, only_safe=False) == ((), tuple(growths))


def report(*growths):
    return GrowthReport("program.py", growths, num_steps=9)


def test_a_copy_that_computes_the_same_and_does_not_grow_is_the_proof(program):
    growth = program(DOUBTFUL, "total +=")
    texts = []

    def run(mended):
        texts.append(dict(mended))
        return Ran(report(), (1, 2), (3,), exit_code=1)  # it measured itself: no result of its training

    proof = prove(Ran(report(growth), (1, 2), (3,)), run)
    assert proof.is_flat
    assert proof.compared is not None
    assert (proof.compared.is_equal, proof.compared.num_outputs, proof.compared.num_gradients) == (True, 2, 1)
    assert (growth_per_step(proof.before), growth_per_step(report())) == ((512, 3), (0, 0))
    assert [list(each) for each in texts] == [[growth.path]]
    assert "loss.detach() / 8" in texts[0][growth.path]


@pytest.mark.parametrize("other", [Ran(report(), (1, 2), (4,)), Ran(report(), (1, 2), (3,), "RuntimeError"), Ran(None)])
def test_a_change_that_was_tried_and_changes_results_is_taken_back(program, other):
    growth = program(DOUBTFUL, "total +=")
    first = Ran(report(growth), (1, 2), (3,))
    proof = prove(first, lambda texts: other if texts else first)
    assert (proof.after, proof.mended, proof.unmended) == (None, (), (growth,))
    assert len(proof.rejected) == 1
    assert "+        total += loss.detach() / 8" in proof.rejected[0]


def test_a_program_that_computes_something_else_each_time_is_not_called_equal_or_different(program):
    numbers = iter(range(9))
    proof = prove(Ran(report(program(DOUBTFUL, "total +=")), (7,)), lambda _: Ran(report(), (next(numbers),)))
    assert proof.is_flat
    assert proof.compared is not None
    assert proof.compared.is_equal is None


def test_a_value_log_is_the_same_for_the_same_values_and_another_for_another_gradient():
    def log(factor):
        values, was_quiet = ValueLog(), []

        class Quiet:
            def __enter__(self):
                was_quiet.append(True)

            def __exit__(self, *_):
                pass

        values.start(Quiet)
        model = torch.nn.Linear(3, 3)
        try:
            for _ in range(3):
                loss = (model(torch.randn(2, 3)) * factor).sum()
                loss.register_hook(lambda _: values.note_backward())
                loss.backward()
        finally:
            values.stop()
        assert was_quiet == [True] * 6
        assert len(values.outputs) == len(values.gradients) == 3
        return values

    first, same, other = log(1.0), log(1.0), log(1.0000001)
    assert (first.outputs, first.gradients) == (same.outputs, same.gradients)
    assert first.outputs == other.outputs
    assert first.gradients != other.gradients
    assert len(set(first.outputs)) == len(set(first.gradients)) == 3
