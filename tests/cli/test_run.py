"""`memfit run`: whose option is whose, what is refused before the script starts, how it ends."""

import json
import os
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from cli.conftest import PLAN, RESULT
from memfit.cli.script import show_exception
from memfit.core.errors import BudgetError, MemfitError
from memfit.core.result import Result

DEFAULTS = {"budget": None, "allow": "bitwise", "plan": None, "verify": "3", "precision": None}


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["--epochs", "3"],
        ["--help"],
        ["-v", "--budget", "1"],
        ["--", "x"],
        ["a", "--", "--json"],
        ["--report=x"],
        ["-h"],
    ],
)
def test_every_word_after_the_script_is_the_scripts(memfit, api, args):
    code, _, _ = memfit("run", "train.py", *args)
    assert code == 0
    assert api.calls == [("train.py", args, DEFAULTS)]


def test_options_before_the_script_are_memfits(memfit, api, tmp_path):
    PLAN.save(tmp_path / "plan.json")
    options = ["--budget", "3 GiB", "--allow", "reordered", "--plan", "plan.json", "--verify", "always", "-v"]
    memfit("run", *options, "train.py", "--budget", "4")
    wanted = {"budget": 3 * 1024**3, "allow": "reordered", "plan": PLAN, "verify": "always", "precision": None}
    assert api.calls == [("train.py", ["--budget", "4"], wanted)]


def test_the_report_goes_to_standard_error_and_nothing_to_standard_output(memfit):
    _, out, err = memfit("run", "train.py")
    assert out == ""
    assert "memfit: train.py fits into 3.00 GiB as it is; nothing was changed" in err


def test_progress_is_silent_in_a_pipe_unless_asked_for(memfit):
    assert "measuring step 1" not in memfit("run", "train.py")[2]
    assert "memfit: measuring step 1 ...\n" in memfit("run", "-v", "train.py")[2]


def test_result_and_report_are_written_where_the_command_was_started(memfit, api, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    def change_directory():
        os.chdir(elsewhere)
        return SimpleNamespace(result=RESULT, exit_code=0, error=None)

    api.ran = change_directory
    assert memfit("run", "--json", "out.json", "--report", "out.txt", "train.py")[0] == 0
    assert Result.load(tmp_path / "out.json") == RESULT
    assert json.loads((tmp_path / "out.json").read_text())["format"] == "memfit-result"
    assert (tmp_path / "out.txt").read_text().startswith("memfit: train.py fits into 3.00 GiB")
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["nope.py"], "memfit: There is no script nope.py. memfit's own options stand before the script"),
        (["trian.py"], "memfit: There is no script trian.py. Did you mean train.py?"),
        (["nowhere/train.py"], "There is no directory nowhere either."),
        (["."], "memfit: . is a directory, not a script."),
        (["package"], "Give package/__main__.py."),
        (["notes.txt"], "memfit: notes.txt is not Python (line 1: "),
        (["picture.png"], "memfit: picture.png is not Python ("),
        (["nulls.py"], "memfit: nulls.py is not Python ("),
        (["book.ipynb"], "memfit: book.ipynb is a notebook, not a script."),
        (["--budget", "3 XB", "train.py"], "memfit: BudgetError: '3 XB' is not a size"),
        (["--budget", "0", "train.py"], "memfit: BudgetError: '0' is 0 bytes"),
        (["--verify", "0", "train.py"], "memfit: --verify 0 is no number of steps."),
        (["--verify", "some", "train.py"], "memfit: --verify some is no number of steps."),
        (["--plan", "none.json", "train.py"], "memfit: PlanError: none.json cannot be read"),
        (["--json", "nowhere/out.json", "train.py"], "there is no directory"),
        (["--report", ".", "train.py"], "is a directory. Give the name of a file in it."),
        (["--allow", "anything", "train.py"], "'anything' is not one of 'bitwise', 'reordered', 'approximate'"),
        (["--budgt", "3", "train.py"], "No such option: --budgt"),
        ([], "Missing argument 'SCRIPT'"),
    ],
)
def test_bad_input_is_refused_in_a_sentence_before_anything_runs(memfit, api, tmp_path, args, words):
    (tmp_path / "notes.txt").write_text("Dear diary\n")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\xff\xfe")
    (tmp_path / "nulls.py").write_bytes(b"print(1)\0\n")
    (tmp_path / "book.ipynb").write_text("{}")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text("")
    code, out, err = memfit("run", *args)
    assert (code, out, api.calls) == (2, "", [])
    assert words in " ".join(err.split())
    assert "Traceback" not in err


def test_a_script_with_a_syntax_error_is_handed_on_to_fail_as_in_python(memfit, api, tmp_path):
    (tmp_path / "broken.py").write_text("def f(:\n")
    memfit("run", "broken.py")
    assert [call[0] for call in api.calls] == ["broken.py"]


def test_a_refused_budget_is_one_line_and_exit_code_2(memfit, api):
    api.ran = BudgetError("1.00 GiB is too small. " + "The best plan found needs 2.00 GiB. " * 5)
    code, out, err = memfit("run", "--budget", "1G", "train.py")
    assert (code, out) == (2, "")
    assert err == "memfit: BudgetError: 1.00 GiB is too small. " + "The best plan found needs 2.00 GiB. " * 5 + "\n"


def test_a_refusal_shows_its_traceback_with_v(memfit, api):
    api.ran = BudgetError("1.00 GiB is too small.")
    code, _, err = memfit("run", "-v", "train.py")
    assert code == 2
    assert "Traceback (most recent call last):" in err
    assert err.endswith("memfit: BudgetError: 1.00 GiB is too small.\n")


def test_a_refusal_in_the_middle_of_the_run_is_reported_with_its_result(memfit, api):
    result = replace(RESULT, exit_reason="budget", error="BudgetError: too small")
    api.ran = SimpleNamespace(result=result, exit_code=1, error=BudgetError("too small."))
    code, _, err = memfit("run", "--json", "out.json", "train.py")
    assert code == 2
    assert "stopped in step 3: 3.00 GiB is too small" in err
    assert err.endswith("memfit: BudgetError: too small.\n")
    assert Result.load("out.json") == result


@pytest.mark.parametrize("code", [0, 1, 3, 77])
def test_the_scripts_exit_code_is_the_commands(memfit, api, code):
    api.ran = SimpleNamespace(result=RESULT, exit_code=code, error=SystemExit(code) if code else None)
    assert memfit("run", "train.py")[0] == code


def test_sys_exit_with_words_prints_them_and_is_1(memfit, api):
    api.ran = SimpleNamespace(result=None, exit_code=1, error=SystemExit("no data [here]"))
    assert memfit("run", "train.py") == (1, "", "no data [here]\n")


def raised_in(script, source, **names):
    """The exception that running `source` as `script` raises, with the frames that lie between."""
    script.write_text(source)
    try:
        exec(compile(source, str(script), "exec"), {"__name__": "__main__", **names})
    except BaseException as error:
        return error
    raise AssertionError("the script raised nothing")


def test_an_uncaught_exception_is_shown_as_python_shows_it(memfit, api, tmp_path):
    error = raised_in(tmp_path / "train.py", "def step():\n    raise ValueError('too hot')\n\nstep()\n")
    api.ran = SimpleNamespace(result=None, exit_code=1, error=error)
    code, out, err = memfit("run", "train.py")
    lines = [line for line in err.splitlines() if set(line.strip()) != {"^"}]
    script = tmp_path / "train.py"
    assert (code, out) == (1, "")
    assert lines == [
        "Traceback (most recent call last):",
        f'  File "{script}", line 4, in <module>',
        "    step()",
        f'  File "{script}", line 2, in step',
        "    raise ValueError('too hot')",
        "ValueError: too hot",
    ]


def test_ctrl_c_ends_with_130_and_the_place_in_the_script(memfit, api, tmp_path):
    error = raised_in(tmp_path / "train.py", "raise KeyboardInterrupt\n")
    api.ran = SimpleNamespace(result=RESULT, exit_code=130, error=error)
    code, _, err = memfit("run", "train.py")
    assert code == 130
    assert err.endswith("KeyboardInterrupt\n")
    assert f'File "{tmp_path / "train.py"}", line 1' in err


def test_ctrl_c_outside_of_the_script_ends_with_130_and_a_word(memfit, api):
    api.ran = KeyboardInterrupt()
    assert memfit("run", "train.py") == (130, "", "memfit: interrupted\n")


def test_a_syntax_error_is_shown_with_its_line_and_without_frames(tmp_path, capsys):
    script = tmp_path / "broken.py"
    show_exception(raised_in(script, "def f(:\n"), str(script))
    err = capsys.readouterr().err
    assert err.startswith(f'  File "{script}", line 1\n    def f(:\n')
    assert err.endswith("SyntaxError: invalid syntax\n")


def test_an_error_before_the_script_began_keeps_its_traceback(tmp_path, capsys):
    try:
        raise RuntimeError("a mistake of memfit")
    except RuntimeError as error:
        show_exception(error, str(tmp_path / "train.py"))
    assert "in test_an_error_before_the_script_began" in capsys.readouterr().err


def through_memfit(code, file="engine/tape.py"):
    """A function made of `code`, with its lines in a file inside the package."""
    import linecache

    import memfit

    path = os.path.join(os.path.dirname(memfit.__file__), "imaginary", file)
    linecache.cache[path] = (len(code), None, code.splitlines(keepends=True), path)
    names = {}
    exec(compile(code, path, "exec"), names)
    return names["call"]


def test_frames_of_memfit_around_a_call_of_the_script_are_left_out(tmp_path, capsys):
    script = tmp_path / "train.py"
    call = through_memfit("def call(func, *args):\n    return func(*args)\n")
    show_exception(raised_in(script, "call(int, 'x')\n", call=call), str(script))  # int() is C: no frame of its own
    err = capsys.readouterr().err
    assert "imaginary" not in err
    assert f'File "{script}", line 1' in err
    assert err.endswith("ValueError: invalid literal for int() with base 10: 'x'\n")


def test_frames_of_memfit_stay_where_memfit_itself_failed(tmp_path, capsys):
    script = tmp_path / "train.py"
    call = through_memfit("def call():\n    raise KeyError('a mistake of memfit')\n", "engine/wrong.py")
    show_exception(raised_in(script, "call()\n", call=call), str(script))
    err = capsys.readouterr().err
    assert "wrong.py" in err
    assert f'File "{script}", line 1' in err


def test_frames_of_memfit_are_left_out_of_the_cause_too(tmp_path, capsys):
    script = tmp_path / "train.py"
    call = through_memfit("def call(func, *args):\n    return func(*args)\n")
    source = "try:\n    call(int, 'x')\nexcept ValueError as error:\n    raise RuntimeError('outer') from error\n"
    show_exception(raised_in(script, source, call=call), str(script))
    err = capsys.readouterr().err
    assert "imaginary" not in err
    assert "The above exception was the direct cause" in err


def test_the_scripts_own_excepthook_gets_the_exception_from_the_scripts_first_frame_on(tmp_path, capsys, monkeypatch):
    script = tmp_path / "train.py"
    got = []
    monkeypatch.setattr(sys, "excepthook", lambda *args: got.append(args))
    error = raised_in(script, "1 / 0\n")
    show_exception(error, str(script))
    [(kind, value, trace)] = got
    assert (kind, value) == (ZeroDivisionError, error)
    assert trace.tb_frame.f_code.co_filename == str(script)
    assert capsys.readouterr().err == ""


def test_the_command_leaves_the_excepthook_alone(memfit):
    before = sys.excepthook
    memfit("run", "train.py")
    assert sys.excepthook is before


def test_a_result_that_cannot_be_written_is_said_after_the_report(memfit, api, tmp_path):
    def remove_directory():
        (tmp_path / "out").rmdir()
        return SimpleNamespace(result=RESULT, exit_code=0, error=None)

    (tmp_path / "out").mkdir()
    api.ran = remove_directory
    code, _, err = memfit("run", "--json", "out/result.json", "train.py")
    assert code == 2
    assert "fits into 3.00 GiB" in err
    assert "result.json could not be written: No such file or directory." in err


def test_a_plain_memfit_error_is_said_without_its_class(memfit, api):
    api.ran = MemfitError("Something is odd.")
    assert memfit("run", "train.py")[2] == "memfit: Something is odd.\n"
