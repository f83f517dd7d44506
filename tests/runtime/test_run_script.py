"""A script runs as `python path args…` would run it, and leaves this process as it was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import memfit
from memfit import api
from memfit.core.errors import BudgetError, MemfitError, PlanError, TraceError, UnsupportedError
from memfit.core.plan import Plan
from memfit.core.replay import replay
from memfit.core.result import Result
from memfit.core.trace import Trace
from memfit.runtime.script import execute, exit_code_of
from runtime.conftest import live_bytes
from runtime.test_scripts import END, PLAIN, SETUP, STEP

BUDGET = 1 << 30
OPTIMIZERS = sys.modules["torch.optim.optimizer"]  # torch.optim deletes the name

# Everything a script can ask about itself; the same words under python and under memfit.
ASKS = """
import atexit, inspect, json, os, pickle, sys, threading, traceback
class Thing:
    pass
def at_exit():
    print(sys.argv, sys.modules["__main__"].Thing is Thing, os.path.basename(os.getcwd()), sys.path[0] == directory)
directory = sys.path[0]
print(__name__, __file__, __doc__, __package__, __spec__, __builtins__ is not None)
print(sys.argv, sys.path[0], os.getcwd())
print(sys.modules["__main__"].__dict__ is globals(), type(pickle.loads(pickle.dumps(Thing()))) is Thing)
print(inspect.getsource(Thing).splitlines()[0])
print(traceback.extract_stack()[-1].filename, sys._getframe().f_code.co_filename)
print(sorted(name for name in globals() if not name.startswith("__")))
atexit.register(at_exit)
os.chdir("below")
threading.Thread(target=lambda: print(len(sys.modules["__main__"].at_exit.__name__))).start()
sys.argv.append("own")
sys.exit({code})
"""


def run(*words: str, cwd: Path, **options) -> subprocess.CompletedProcess:
    source = str(Path(memfit.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source, "COLUMNS": "80", **options.pop("env", {})}
    return subprocess.run(
        [sys.executable, *words], cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=120, **options
    )


@pytest.mark.parametrize(("code", "number", "words"), [("3", 3, ""), ("None", 0, ""), ("'no data'", 1, "no data\n")])
def test_a_script_finds_the_world_it_finds_under_python(tmp_path, code, number, words):
    (tmp_path / "below").mkdir()
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "train.py").write_text("'''Words.'''\n" + ASKS.replace("{code}", code))
    (tmp_path / "train.py").symlink_to(tmp_path / "real" / "train.py")
    args = ["train.py", "--epochs", "3", "--", "-v", "--help"]
    plain = run(*args, cwd=tmp_path)
    ours = run("-m", "memfit", "run", "--budget", "1GiB", *args, cwd=tmp_path)
    assert (plain.returncode, plain.stderr) == (number, words)
    assert (ours.returncode, ours.stdout) == (number, plain.stdout)
    assert len(plain.stdout.splitlines()) == 8
    assert words in ours.stderr


def test_an_uncaught_exception_ends_with_1_and_pythons_traceback(tmp_path):
    (tmp_path / "train.py").write_text("import torch\ntorch.ones(2, requires_grad=True) @ torch.ones(3)\n")
    plain = run("train.py", cwd=tmp_path)
    ours = run("-m", "memfit", "run", "--budget", "1GiB", "train.py", cwd=tmp_path)
    assert ours.returncode == plain.returncode == 1
    assert plain.stderr.strip() in ours.stderr


def test_ctrl_c_reaches_the_script_and_ends_with_130(tmp_path):
    (tmp_path / "train.py").write_text(
        "import time\nprint('ready', flush=True)\ntry:\n    time.sleep(60)\n"
        "except KeyboardInterrupt:\n    print('saved', flush=True)\n    raise\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(memfit.__file__).parents[1])}
    words = [sys.executable, "-m", "memfit", "run", "--budget", "1GiB", "--json", "out.json", "train.py"]
    with subprocess.Popen(
        words, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as ours:
        assert ours.stdout.readline() == "ready\n"
        time.sleep(0.1)
        ours.send_signal(signal.SIGINT)
        out, err = ours.communicate(timeout=60)
    assert (ours.returncode, out) == (130, "saved\n")
    assert err.endswith("KeyboardInterrupt\n")
    result = Result.load(tmp_path / "out.json")
    assert (result.exit_reason, result.exit_code) == ("interrupted", 130)


def test_spawned_workers_find_the_scripts_classes(tmp_path):
    (tmp_path / "train.py").write_text(
        "import torch\nclass Rows(torch.utils.data.Dataset):\n    def __len__(self):\n        return 4\n"
        "    def __getitem__(self, index):\n        return index * torch.ones(2)\n"
        "if __name__ == '__main__':\n"
        "    loader = torch.utils.data.DataLoader(Rows(), 2, num_workers=1, multiprocessing_context='spawn')\n"
        "    print([batch.tolist() for batch in loader])\n"
    )
    plain = run("train.py", cwd=tmp_path)
    ours = run("-m", "memfit", "run", "--budget", "1GiB", "train.py", cwd=tmp_path)
    assert plain.returncode == 0, plain.stderr
    assert (ours.returncode, ours.stdout) == (0, plain.stdout)


def test_the_command_trains_in_the_budget_and_keeps_standard_output_clean(scripts, tmp_path):
    path = scripts.write(PLAIN)
    plain, _ = scripts.run_plain(path)
    budget = scripts.budget(0.7, path, in_this_process=False)
    ours = run(
        "-m",
        "memfit",
        "run",
        "--budget",
        str(budget),
        "--json",
        "out.json",
        "train.py",
        cwd=tmp_path,
        env={"OMP_NUM_THREADS": "1"},
    )
    assert (ours.returncode, ours.stdout) == (0, plain)
    assert "yes, bit for bit" in ours.stderr
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["within_budget"]
    assert (data["program"], data["num_steps"], data["exit_reason"]) == ("train.py", 6, "finished")
    assert data["versions"]["memfit"] == memfit.__version__


def test_trace_plan_and_run_hand_their_files_on(scripts, tmp_path):
    scripts.write(PLAIN + "print('never reached by trace')\n")
    environment = {"OMP_NUM_THREADS": "1"}
    traced = run("-m", "memfit", "trace", "train.py", "-o", "trace.json", cwd=tmp_path, env=environment)
    assert (traced.returncode, traced.stdout) == (0, "")
    peak = Trace.load(tmp_path / "trace.json").meta["measured_peak_bytes"]
    budget = str(int(0.7 * peak))
    planned = run("-m", "memfit", "plan", "trace.json", "--budget", budget, "-o", "plan.json", cwd=tmp_path)
    assert planned.returncode == 0, planned.stderr
    plain = run("train.py", cwd=tmp_path, env=environment)
    # A step of 1.3 MiB may take some KiB more than predicted; with that much room it is not planned again.
    words = ["--budget", str(int(1.05 * int(budget))), "--plan", "plan.json", "--json", "out.json"]
    ours = run("-m", "memfit", "run", *words, "train.py", cwd=tmp_path, env=environment)
    assert (ours.returncode, ours.stdout) == (0, plain.stdout)
    result = Result.load(tmp_path / "out.json")
    assert result.num_planned_steps == 6  # the first one too
    assert result.messages == ()
    assert result.moves == Plan.load(tmp_path / "plan.json").moves
    assert result.within_budget


# ---- in this process ---------------------------------------------------------------------------------------------------


def test_everything_is_put_back(scripts, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    path = scripts.write(
        "import os, sys\nfrom torch.nn.modules import module\nos.chdir('elsewhere')\nsys.path.append('x')\nsys.argv = ['y']\nsys.path = []\n"
    )

    def world():
        hooks = torch.nn.modules.module
        return (
            list(sys.argv), list(sys.path), sys.modules["__main__"], os.getcwd(), torch.optim.Optimizer.__init__,
            dict(hooks._global_forward_pre_hooks), dict(hooks._global_forward_hooks), torch._C._len_torch_function_stack(),
            torch._C._len_torch_dispatch_stack(), torch._C._autograd._top_saved_tensors_default_hooks(True),
            dict(OPTIMIZERS._global_optimizer_pre_hooks), dict(OPTIMIZERS._global_optimizer_post_hooks),
        )  # fmt: skip

    before = world()
    for source in (None, PLAIN, PLAIN + "1 / 0", "raise SystemExit(3)"):
        _, ran = scripts.run(path if source is None else scripts.write(source, "other.py"), budget=BUDGET)
        assert world() == before
        assert ran.exit_code == {None: 0, PLAIN: 0, "raise SystemExit(3)": 3}.get(source, 1)


def test_a_script_may_be_empty_or_broken(scripts):
    assert scripts.run(scripts.write(""), budget=BUDGET)[1].error is None
    _, ran = scripts.run(scripts.write("def f(:\n"), budget=BUDGET)
    assert isinstance(ran.error, SyntaxError)
    assert (ran.exit_code, ran.result.exit_reason, ran.result.num_steps) == (1, "exception", 0)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (None, 0), (SystemExit(), 0), (SystemExit(0), 0), (SystemExit(True), 1), (SystemExit(5), 5), (SystemExit("x"), 1),
        (KeyboardInterrupt(), 130), (BudgetError("x"), 2), (ValueError(), 1),
    ],
)  # fmt: skip
def test_exit_codes_are_pythons(error, code):
    assert exit_code_of(error) == code


def test_a_script_that_never_trains_is_run_and_says_so(scripts):
    out, ran = scripts.run(scripts.write("print('nothing to do')\n"), budget=BUDGET)
    assert (out, ran.exit_code, ran.result.num_steps, ran.result.peak_bytes) == ("nothing to do\n", 0, 0, None)


def test_a_script_that_never_trains_has_no_trace(scripts):
    with pytest.raises(TraceError, match=r"train\.py ended without a training step, so there is nothing to trace"):
        api.trace_script(scripts.write("print('nothing')\n"), [])


def test_a_script_that_ends_with_an_error_before_it_trains_is_no_trace_error(scripts):
    with pytest.raises(SystemExit, match="2"):
        api.trace_script(scripts.write("import argparse\nargparse.ArgumentParser().parse_args()\n"), ["--wrong"])
    with pytest.raises(ZeroDivisionError):
        api.trace_script(scripts.write("1 / 0\n"), [])


def test_a_trace_is_of_the_second_step_and_stops_the_script_there(scripts):
    path = scripts.write(SETUP + "try:\n  for i in range(6):\n    print('step', i)" + STEP + "finally:\n    print('closed')\n")
    trace = api.trace_script(path, [])
    assert scripts.capsys.readouterr().out == "step 0\nstep 1\nclosed\n"
    assert trace.meta["step"] == 2
    assert trace.meta["program"] == path
    assert "note" not in trace.meta


def test_a_script_that_swallows_everything_is_stopped_all_the_same(scripts):
    source = SETUP + "for i in range(6):\n  try:\n    print('step', i)" + STEP + "  except:\n    pass\n"
    api.trace_script(scripts.write(source), [])
    assert scripts.capsys.readouterr().out.count("step") == 6  # it goes on, and no further step is made
    assert not OPTIMIZERS._global_optimizer_pre_hooks


def test_the_trace_of_a_single_step_says_so(scripts):
    trace = api.trace_script(scripts.write(SETUP + "for i in range(1):" + STEP + END), [])
    assert trace.meta["step"] == 1
    assert trace.meta["note"].startswith("The script made a single training step")


def test_a_script_that_dies_in_its_second_step_is_traced_up_to_there(scripts):
    source = SETUP + "for i in range(6):\n    if i == 1:\n        raise ValueError('no more data')" + STEP
    ran = api.trace_run(scripts.write(source), [])
    trace = ran.so_far()
    assert (ran.num_steps, str(ran.error)) == (1, "no more data")
    assert trace.meta["step"] == 1
    assert trace.meta["note"].startswith(
        "The script ended in its second step (ValueError: no more data). This is the first one"
    )
    with pytest.raises(ValueError, match="no more data"):
        ran.whole()


def test_a_script_that_is_interrupted_in_its_first_step_is_traced_up_to_there(scripts):
    source = SETUP + "for i in range(6):" + STEP.replace("    optimizer.step()", "    raise KeyboardInterrupt")
    ran = api.trace_run(scripts.write(source), [])
    trace = ran.so_far()
    assert (ran.num_steps, type(ran.error)) == (0, KeyboardInterrupt)
    assert trace.meta["note"] == "The script ended before its first step did (KeyboardInterrupt). This is what ran until then."
    assert replay(trace).peak_bytes > 0
    assert api.trace_run(scripts.write("raise KeyboardInterrupt\n"), []).so_far() is None


def test_what_the_measured_steps_show_by_the_way_is_in_the_result(scripts):
    late = STEP.replace("    optimizer.zero_grad()\n", "").replace(
        "    loss.backward()", "    optimizer.zero_grad()\n    loss.backward()"
    )
    path = scripts.write(SETUP.replace("Net()", "Net(width=512)") + "for i in range(4):" + late)
    _, ran = scripts.run(path, budget=BUDGET)
    [finding] = ran.result.findings
    [line] = [number for number, text in enumerate(Path(path).read_text().splitlines(), start=1) if "zero_grad" in text]
    assert (finding.code, finding.path, finding.line, finding.measured) == ("MF401", path, line, True)
    assert finding.num_bytes > 0
    assert Result.from_json(ran.result.to_json()) == ran.result
    on_time = scripts.write(
        SETUP.replace("Net()", "Net(width=512)")
        + "for i in range(4):"
        + STEP.replace("zero_grad()\n", "zero_grad()\n    logits = model(x)\n")
    )
    assert scripts.run(on_time, budget=BUDGET)[1].result.findings == ()


# ---- refused in a sentence ---------------------------------------------------------------------------------------------


def refusal(scripts, source: str, kind: type[MemfitError], match: str, **options) -> Result:
    """Run it; memfit must refuse, and no optimizer may have stepped."""
    _, ran = scripts.run(scripts.write(source), **{"budget": BUDGET, **options})
    assert isinstance(ran.error, kind), ran.error
    assert (ran.exit_code, ran.result.num_steps) == (2, 0)
    with pytest.raises(kind, match=match):
        raise ran.error
    assert str(ran.error).count("\n") == 0
    assert not torch.nn.modules.module._global_forward_pre_hooks
    return ran.result


def test_a_budget_below_parameters_and_optimizer_state_is_refused_before_the_first_forward(scripts):
    source = SETUP + "print('made')\nfor i in range(3):" + STEP
    result = refusal(
        scripts, source, BudgetError, r"parameters \(.*\), their gradients and the optimizer's state hold", budget=40_000
    )
    assert result.exit_reason == "budget"
    assert scripts.capsys.readouterr().out == ""


def test_a_budget_no_plan_can_meet_is_refused_before_a_parameter_changed(scripts):
    source = (
        SETUP + "before = digest(model)\ntry:\n  for i in range(3):" + STEP + "finally:\n  print(before == digest(model))\n"
    )
    path = scripts.write(source.replace("digest(model)", "[p.sum().item() for p in model.parameters()]"))
    budget = scripts.budget(0.3, path)
    out, ran = scripts.run(path, budget=budget)
    assert isinstance(ran.error, BudgetError)
    assert ran.error.needed_bytes > budget
    assert out == "True\n"


def test_a_script_that_catches_the_refusal_cannot_train_past_its_budget(scripts):
    source = SETUP.replace("optimizer =", "try:\n  optimizer =") + (
        "except Exception:\n  optimizer = torch.optim.SGD(model.parameters())\nfor i in range(3):\n  try:" + STEP.replace("    ", "      ")
        + "  except Exception as error:\n    print(type(error).__name__)\n"
    )  # fmt: skip
    out, ran = scripts.run(scripts.write(source), budget=40_000)
    assert out == "BudgetError\n" * 3
    assert (ran.exit_code, ran.result.num_steps, ran.result.exit_reason) == (2, 0, "budget")


def test_a_compiled_model_is_refused(scripts):
    for line in ("model = torch.compile(model)", "model.compile()", "model.forward = torch.compile(model.forward)"):
        source = SETUP + f"import warnings\nwarnings.simplefilter('ignore')\n{line}\nfor i in range(3):" + STEP
        refusal(scripts, source, UnsupportedError, r"^The program runs torch\.compile, .* Leave torch\.compile out")


def test_a_compiled_loss_is_refused(scripts):
    source = SETUP + "loss_of = torch.compile(F.cross_entropy)\nfor i in range(3):" + STEP.replace("F.cross_entropy", "loss_of")
    refusal(scripts, source, UnsupportedError, r"^The program runs torch\.compile")


def test_data_parallel_is_refused(scripts):
    source = SETUP + "model = nn.DataParallel(model)\nmodel.device_ids = [0, 1]\nfor i in range(3):" + STEP
    refusal(
        scripts, source, UnsupportedError, "^The model uses DataParallel, .* Use DistributedDataParallel, or a single device"
    )


def test_a_model_on_several_devices_is_refused(scripts):
    source = SETUP.replace("model = Net()", "model = Net()\nmodel.last.to('meta')")
    refusal(scripts, source, UnsupportedError, r"lies on several devices \(cpu, meta\)")


def test_training_in_a_thread_is_refused(scripts):
    source = SETUP + (
        "import threading\ndef work():\n  try:\n    i = 0" + STEP + "  except Exception as error:\n    print(type(error).__name__)\n"
        "thread = threading.Thread(target=work)\nthread.start()\nthread.join()\n"
    )  # fmt: skip
    refusal(scripts, source, UnsupportedError, "trains in a thread of its own")


def test_a_script_that_uses_memfit_itself_is_refused(scripts):
    source = SETUP + "import memfit\nwith memfit.fit(model, optimizer, '1GiB'):\n  for i in range(3):" + STEP
    _, ran = scripts.run(scripts.write(source), budget=BUDGET)
    assert isinstance(ran.error, UnsupportedError)
    assert "at work in this process already" in str(ran.error)


def test_an_out_of_memory_error_tells_what_was_planned_and_seen_and_leaves_no_hooks(scripts):
    source = (
        SETUP + "for i in range(6):" + STEP + "    if i == 4: raise torch.OutOfMemoryError('CUDA out of memory. Tried 2 GiB')\n"
    )
    path = scripts.write(source)
    budget = scripts.budget(0.7, path)
    _, ran = scripts.run(path, budget=budget)
    assert (ran.exit_code, ran.result.exit_reason) == (1, "out of memory")
    assert ran.result.error == "OutOfMemoryError: CUDA out of memory. Tried 2 GiB"
    assert "step 6: the device ran out of memory all the same; the plan was to peak at" in ran.result.messages[-1]
    assert "were seen in the measured steps" in ran.result.messages[-1]
    assert not torch.nn.modules.module._global_forward_pre_hooks
    assert torch._C._len_torch_function_stack() == torch._C._len_torch_dispatch_stack() == 0


def test_a_plan_for_another_model_is_refused_before_a_parameter_changed(scripts):
    path = scripts.write(PLAIN.replace("Net()", "Net(16)"))
    plan = api.plan(api.trace_script(path, []), scripts.budget(0.8, path))
    refusal(scripts, PLAIN, PlanError, "The plan was made for another model: .* No parameter was changed", plan=plan)


def test_a_plan_whose_places_never_occur_is_replaced(scripts):
    other = PLAIN.replace("model(x)", "again(x)").replace("for i in", "again = nn.Sequential(model)\nfor i in")
    path = scripts.write(other)
    plan = api.plan(api.trace_script(path, []), scripts.budget(0.7, path))
    path = scripts.write(PLAIN)
    plain, _ = scripts.run_plain(path)
    out, ran = scripts.run(path, budget=scripts.budget(0.75, path), plan=plan)
    result = ran.result
    assert out == plain
    assert result.messages[1:3] == (
        "step 1: the plan was not enough; 10 more saved tensors were let go of.",
        "step 1: nothing of what the plan names was there, so it was made for another program; measured and planned anew from here.",
    )
    assert result.num_planned_steps >= 3
    assert result.moves != plan.moves


def test_a_plan_that_needs_more_than_the_budget_is_refused_at_once(scripts):
    plan = Plan(budget_bytes=4096, eager_peak_bytes=8192, predicted_peak_bytes=4000, floor_bytes=3000)
    with pytest.raises(PlanError, match=r"The plan peaks at 3.91 KiB, more than the budget of 2.00 KiB"):
        api.run_script(scripts.write("print('never')"), [], budget=2048, plan=plan)


@pytest.mark.parametrize("verify", [0, -1, "often", True, None, "1.5"])
def test_fit_refuses_what_is_no_number_of_verified_steps(verify):
    with pytest.raises(MemfitError, match=f"verify={verify} is no number of steps"):
        memfit.fit(budget="1GiB", verify=verify)


def test_fit_refuses_an_unknown_exactness():
    with pytest.raises(MemfitError, match=r"allow='exact' is no exactness\. Give one of 'bitwise', 'reordered', 'approximate'"):
        memfit.fit(budget="1GiB", allow="exact")


def test_fit_reports_as_text():
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memfit.fit(model, optimizer, budget="1GiB", verify=5) as session:
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    report = session.report()
    assert report.startswith("memfit: the run fits into 1.00 GiB as it is; nothing was changed\n")
    assert max(map(len, report.splitlines())) <= 80
    assert f"memfit {memfit.__version__}" in report


def test_execute_runs_a_script_without_any_session(scripts):
    execute(scripts.write("print(__name__)"), [])
    assert scripts.capsys.readouterr().out == "__main__\n"


def test_a_refused_run_and_one_that_fails_hold_no_tensor_afterwards(scripts):
    path = scripts.write(SETUP + "for i in range(3):" + STEP)
    failing = scripts.write(SETUP + "for i in range(3):" + STEP + "    loss = model(x)\n    1 / 0\n", "failing.py")
    scripts.run(path, budget=BUDGET)  # what is imported on the way stays
    budget = scripts.budget(0.3, path)
    before = live_bytes()
    assert isinstance(scripts.run(path, budget=budget)[1].error, BudgetError)
    assert isinstance(scripts.run(failing, budget=BUDGET)[1].error, ZeroDivisionError)
    assert live_bytes() == before
