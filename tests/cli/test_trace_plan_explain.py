"""`memfit trace`, `memfit plan`, `memfit explain`, `memfit --version`, and what none of them needs."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import memfit as package
from cli.conftest import PLAN, TRACE
from memfit.cli.explain import list_topics, read_text
from memfit.core.errors import BudgetError, TraceError
from memfit.core.plan import Plan
from memfit.core.trace import Call, Cell, Storage, Trace
from memfit.diagnosis.codes import CODES
from memfit.runtime.script import TraceRun
from report.examples import TRACE as TRACE_OF_A_CALL

IN_PLACE = Trace(
    "cpu",
    (Storage(10, "input"), Storage(10, "activation")),
    (Cell(0), Cell(1, 0, "out0", evictable=True)),
    (),
    (Call("0|act#0/0:relu", "relu", "act", "net.py:3", 0.1, (0,), (1,), in_place="its input is a view"),),
    (("alloc", 0), ("begin", 0), ("alloc", 1), ("end", 0)),
)


@pytest.mark.parametrize(
    ("words", "args", "output"),
    [
        (["train.py", "-o", "trace.json"], [], "trace.json"),
        (["-o", "trace.json", "train.py"], [], "trace.json"),
        (["train.py", "--epochs", "3", "--output", "trace.json"], ["--epochs", "3"], "trace.json"),
        (["train.py", "--epochs", "3", "--output=trace.json"], ["--epochs", "3"], "trace.json"),
        (["-o", "trace.json", "train.py", "-o", "model.pt"], ["-o", "model.pt"], "trace.json"),
        (["train.py", "-o", "model.pt", "--epochs", "3"], ["-o", "model.pt", "--epochs", "3"], None),
        (["train.py", "--", "-o", "model.pt"], ["--", "-o", "model.pt"], None),
        (["train.py", "--help"], ["--help"], None),
        (["train.py", "-o"], ["-o"], None),
        (["train.py"], [], None),
    ],
)
def test_the_output_of_trace_stands_before_the_script_or_ends_the_line(memfit, api, tmp_path, words, args, output):
    code, out, err = memfit("trace", *words)
    assert (code, out, api.calls) == (0, "", [("train.py", args)])
    assert err.startswith("memfit trace: the step peaks at 1000 B in other\n")
    assert sorted(path.name for path in tmp_path.glob("*")) == sorted(filter(None, ["train.py", output]))
    if output:
        assert Trace.load(output) == TRACE
        assert err.endswith("\nSaved. Next: memfit plan trace.json --budget SIZE\n")
    else:
        assert err.endswith("\nNot saved. End the line with `-o trace.json` to keep the trace.\n")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nope.py", "-o", "trace.json"], "memfit: There is no script nope.py."),
        (["train.py", "-o", "nowhere/trace.json"], "there is no directory"),
    ],
)
def test_bad_input_of_trace_is_refused_before_anything_runs(memfit, api, words, sentence):
    code, _, err = memfit("trace", *words)
    assert (code, api.calls) == (2, [])
    assert sentence in err


def test_a_script_that_never_trains_is_refused_in_a_sentence(memfit, api):
    api.traced = TraceError("train.py made no step.")
    assert memfit("trace", "train.py") == (2, "", "memfit: TraceError: train.py made no step.\n")


def test_an_exception_of_a_traced_script_is_shown_and_exit_code_1(memfit, api):
    api.traced = ValueError("too hot")
    code, _, err = memfit("trace", "train.py")
    assert code == 1
    assert err.endswith("ValueError: too hot\n")


@pytest.mark.parametrize(
    ("error", "exit_code", "end"),
    [(KeyboardInterrupt(), 130, "KeyboardInterrupt\n"), (ValueError("too hot"), 1, "ValueError: too hot\n")],
)
def test_what_ran_before_the_script_ended_is_reported_and_saved_before_its_exception(
    memfit, api, tmp_path, error, exit_code, end
):
    api.traced = TraceRun("train.py", TRACE_OF_A_CALL, 1, error)
    code, _, err = memfit("trace", "train.py", "-o", "trace.json")
    assert code == exit_code
    assert " ".join(err.split()).startswith("memfit trace: train.py peaks at 4.48 KiB in forward")
    assert f"The script ended in its second step ({end.strip()}). This is the first one" in " ".join(err.split())
    assert err.endswith(end)
    assert Trace.load("trace.json").calls == TRACE_OF_A_CALL.calls


def test_plan_prints_the_plan_and_writes_it(memfit, api, tmp_path):
    TRACE.save(tmp_path / "trace.json")
    code, out, err = memfit("plan", "trace.json", "--budget", "3 KiB", "-o", "my plan.json")
    assert (code, api.calls) == (0, [(TRACE, 3072)])
    assert out.startswith("memfit plan: the step fits into 2.93 KiB as it is; nothing to do\n")
    assert out.endswith("\nSaved. Next: memfit run --budget '3 KiB' --plan 'my plan.json' SCRIPT\n")
    assert err == "memfit: planning ...\n" or err.startswith("memfit: planning ...\nmemfit: sweeping ... (planning: ")
    assert Plan.load("my plan.json") == PLAN


def test_a_plan_in_lower_precision_says_so_and_how_to_run_it(memfit, api, tmp_path):
    TRACE.save(tmp_path / "trace.json")
    lower = replace(TRACE, meta={"precision": "O1 bfloat16"})
    lower.save(tmp_path / "o1.json")
    api.planned = replace(PLAN, precision="O1 bfloat16", device="cpu", notes=("Trains in O1 bfloat16.",))
    code, out, _ = memfit("plan", "trace.json", "--lower", "o1.json", "--budget", "3KiB", "-o", "plan.json")
    assert (code, api.calls) == (0, [(TRACE, 3072, lower)])
    assert "Trains in O1 bfloat16." in out
    assert "cpu, O1 bfloat16" in out
    assert out.endswith("\nSaved. Next: memfit run --budget 3KiB --plan plan.json --allow approximate SCRIPT\n")
    assert Plan.load("plan.json").precision == "O1 bfloat16"


def test_a_plan_that_cannot_be_found_is_refused_and_nothing_is_written(memfit, api, tmp_path):
    TRACE.save(tmp_path / "trace.json")
    api.planned = BudgetError("1 B is too small.")
    code, out, err = memfit("plan", "trace.json", "--budget", "1", "-o", "plan.json")
    assert (code, out) == (2, "")
    assert err.endswith("memfit: BudgetError: 1 B is too small.\n")
    assert not (tmp_path / "plan.json").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["none.json", "--budget", "3G"], "memfit: TraceError: none.json cannot be read: No such file or directory."),
        (["train.py", "--budget", "3G"], "memfit: TraceError: train.py is not JSON"),
        (["plan.json", "--budget", "3G"], "memfit: TraceError: plan.json is no memfit-trace file"),
        (["trace.json", "--budget", "much"], "memfit: BudgetError: 'much' is not a size"),
        (["trace.json"], "Missing option '--budget'"),
    ],
)
def test_bad_input_of_plan_is_refused(memfit, api, tmp_path, words, sentence):
    TRACE.save(tmp_path / "trace.json")
    PLAN.save(tmp_path / "plan.json")
    code, _, err = memfit("plan", *words)
    assert (code, api.calls) == (2, [])
    assert sentence in err


def test_explain_lists_its_topics_with_a_line_each(memfit):
    code, out, _ = memfit("explain")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == [*list_topics(), *CODES]
    assert {"recompute", "guard", "certificate", "budget", "exactness", "measuring"} <= set(list_topics())
    assert all(len(line) <= 80 and len(line.split()) > 3 for line in out.splitlines())


@pytest.mark.parametrize("topic", list_topics())
def test_a_text_begins_with_its_name_and_fits_into_79_columns(memfit, topic):
    code, out, _ = memfit("explain", topic.upper())
    assert (code, out) == (0, read_text(topic))
    assert out.startswith(f"# {topic}: ")
    assert max(map(len, out.splitlines())) <= 79


@pytest.mark.parametrize(
    ("topic", "sentence"),
    [
        ("recompte", "There is no text about 'recompte'. Did you mean recompute?"),
        ("zebra", "There is no text about 'zebra'. There are: budget, certificate,"),
        ("../app", "There is no text about '../app'."),
    ],
)
def test_an_unknown_topic_gets_the_nearest_ones(memfit, topic, sentence):
    code, out, err = memfit("explain", topic)
    assert (code, out) == (2, "")
    assert err.startswith(f"memfit: {sentence}")


def test_explain_says_of_the_places_in_a_trace_whether_they_may_be_in_place(memfit, tmp_path):
    IN_PLACE.save(tmp_path / "trace.json")
    code, out, _ = memfit("explain", "inplace", "--trace", "trace.json", "--place", "act")
    assert code == 0
    assert out.startswith("In place: no call may write over its input\n")
    assert "relu      act" in out
    assert "its input is a view" in out
    code, out, _ = memfit("explain", "inplace", "--trace", "trace.json", "--place", "elsewhere")
    assert "No call of this trace with 'elsewhere' in its module, function or line has an in-place form." in " ".join(
        out.split()
    )


def test_explain_has_nothing_to_say_about_a_trace_but_for_inplace(memfit, tmp_path):
    IN_PLACE.save(tmp_path / "trace.json")
    code, out, err = memfit("explain", "recompute", "--trace", "trace.json")
    assert (code, out) == (2, "")
    assert (
        err == "memfit: 'recompute' has nothing to say about one trace. Only `memfit explain inplace --trace trace.json` has.\n"
    )


def test_trace_prints_what_may_be_in_place(memfit, api):
    api.traced = IN_PLACE
    code, _, err = memfit("trace", "train.py")
    assert code == 0
    assert "\nIn place: no call may write over its input\n" in err
    assert "Not so       1 call, see `memfit explain inplace --trace`" in err


@pytest.mark.parametrize("verb", ["run", "trace", "plan", "explain"])
def test_every_verb_explains_itself(memfit, verb):
    code, out, _ = memfit(verb, "--help")
    assert code == 0
    assert out.startswith(f"Usage: memfit {verb} [OPTIONS]")


def test_the_version_is_that_of_the_package(memfit):
    code, out, _ = memfit("--version")
    assert code == 0
    assert out.startswith(f"memfit {package.__version__} (torch ")


def test_without_a_verb_the_verbs_are_listed(memfit):
    code, out, err = memfit()
    assert code == 2
    assert [word in out + err for word in ("run", "trace", "plan", "explain")] == [True] * 4


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["explain", "recompute"], ["plan", "TRACE", "--budget", "1G"]])
def test_what_needs_no_torch_does_not_import_it(words, tmp_path):
    TRACE.save(tmp_path / "trace.json")
    program = (
        "import sys\n"
        "sys.modules['torch'] = None\n"  # importing it raises
        "from memfit.cli import main\n"
        "main()\n"
    )
    words = [str(tmp_path / "trace.json") if word == "TRACE" else word for word in words]
    source = str(Path(package.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, env={"PYTHONPATH": source, "PATH": ""}
    )
    assert done.returncode == 0, done.stderr
