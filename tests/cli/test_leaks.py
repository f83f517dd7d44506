"""`memfit leaks`: output, exit codes and refusals; the script's own words stay its own."""

from __future__ import annotations

import json

import pytest

from memfit import cli

LEAK = """import sys
import torch
model = torch.nn.Linear(16, 16)
kept = []
for step in range(8):
    out = model(torch.randn(8, 16))
    out.sum().backward()
    kept.append(out)
{end}
"""


@pytest.fixture
def memfit(tmp_path, monkeypatch, capsys):
    """Calls the command in a directory of its own; gives (exit code, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)

    def call(*args: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            cli.main(list(args))
        out, err = capsys.readouterr()
        return int(left.value.code or 0), out, err

    return call


def test_the_report_goes_to_standard_error_with_line_holder_bytes_and_fix(memfit, tmp_path):
    (tmp_path / "train.py").write_text(LEAK.format(end="print(sys.argv[1:])"))
    code, out, err = memfit("leaks", "--budget", "1MiB", "--json", "out.json", "train.py", "--steps", "3")
    assert (code, out) == (0, "['--steps', '3']\n")
    words = " ".join(err.split())
    assert "memfit leaks: train.py grows by 512 B a step" in words
    assert "8 watched; a step is a backward pass in the loop at train.py:5" in words
    assert "train.py:8 MF131 kept.append(out) 512 B" in words
    assert "held by `kept[2]` in __main__." in words
    assert "Made at train.py:6 in Linear (512 B)." in words
    assert "Fix: Keep `.detach().cpu()`" in words
    assert "more steps: 1.00 MiB" in words
    assert max(map(len, err.splitlines())) <= 80
    document = json.loads((tmp_path / "out.json").read_text())
    assert [(each["line"], each["num_bytes"]) for each in document["findings"]] == [(8, 512)]


def test_an_exception_of_the_script_is_shown_as_python_shows_it_after_the_report(memfit, tmp_path):
    (tmp_path / "train.py").write_text(LEAK.format(end="raise ValueError('no more data')"))
    code, _, err = memfit("leaks", "train.py")
    assert code == 1
    assert err.index("grows by 512 B a step") < err.index("Traceback (most recent call last):")
    assert err.endswith("ValueError: no more data\n")
    assert "/memfit/" not in err


def test_a_script_that_dies_in_its_second_step_is_told_that_growth_needs_more(memfit, tmp_path):
    source = LEAK.replace(
        "    kept.append(out)", "    kept.append(out)\n    if step == 1:\n        raise ValueError('no more data')"
    )
    (tmp_path / "train.py").write_text(source.format(end=""))
    code, _, err = memfit("leaks", "train.py")
    assert code == 1
    words = " ".join(err.split())
    assert "Steps 2 watched" in words
    assert "Too few growth shows from the fourth step on" in words
    assert err.endswith("ValueError: no more data\n")


def test_ctrl_c_gives_the_report_so_far_and_130(memfit, tmp_path):
    (tmp_path / "train.py").write_text(LEAK.format(end="raise KeyboardInterrupt"))
    code, _, err = memfit("leaks", "train.py")
    assert code == 130
    assert "grows by 512 B a step" in err


def test_the_scripts_exit_code_is_the_commands(memfit, tmp_path):
    (tmp_path / "train.py").write_text("import sys\nsys.exit(7)\n")
    code, _, err = memfit("leaks", "train.py")
    assert code == 7
    assert "train.py was over before a loop had gone around" in " ".join(err.split())


def test_steps_stops_the_script(memfit, tmp_path):
    (tmp_path / "train.py").write_text(LEAK.replace("range(8)", "range(100000)").format(end="print('end')"))
    code, out, err = memfit("leaks", "--steps", "5", "train.py")
    assert (code, out) == (0, "")
    assert "grows by 512 B a step" in err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["nope.py"], "memfit: There is no script nope.py."),
        (["--steps", "3", "train.py"], "memfit: --steps 3 is too few: growth shows from the fourth step on."),
        (["--steps", "0", "train.py"], "memfit: --steps 0 is too few"),
        (["--budget", "1 XB", "train.py"], "memfit: BudgetError: '1 XB' is not a size"),
        (["--json", "nowhere/out.json", "train.py"], "there is no directory"),
    ],
)
def test_bad_input_is_refused_in_a_sentence_before_anything_runs(memfit, tmp_path, args, words):
    (tmp_path / "train.py").write_text("print('ran')\n")
    code, out, err = memfit("leaks", *args)
    assert (code, out) == (2, "")
    assert words in " ".join(err.split())


def test_prove_runs_a_mended_copy_with_the_scripts_own_imports_and_files_and_writes_none_of_them(memfit, tmp_path):
    (tmp_path / "numbers.txt").write_text("8")
    (tmp_path / "sums.py").write_text(
        "total = 0\ndef join(loss):\n    global total\n    total = total + loss\n    return total\n"
    )
    (tmp_path / "train.py").write_text(
        "from pathlib import Path\nimport torch\nimport sums\nmodel = torch.nn.Linear(16, 16)\nkept = []\n"
        "for step in range(int(Path('numbers.txt').read_text())):\n    loss = model(torch.randn(8, 16)).tanh().mean()\n"
        "    loss.backward()\n    sums.join(loss)\n    kept.append(loss)\nprint('once')\n"
    )
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    code, out, err = memfit("leaks", "--prove", "--json", "out.json", "train.py")
    assert (code, out) == (0, "once\n")
    assert "\n+    total = (total + loss).detach()\n" in err
    assert "\n+    kept.append(loss.detach())\n" in err
    words = " ".join(err.split())
    assert "After flat: 0 B and 0 graph nodes a step, over 8 steps" in words
    assert "Equal yes, bit for bit: 8 outputs of modules and the gradients of 8 backward passes" in words
    proof = json.loads((tmp_path / "out.json").read_text())["proof"]
    assert (proof["is_flat"], proof["after"], proof["before"][1] > 0) == (True, [0, 0], True)
    assert {name: (tmp_path / name).read_bytes() for name in before} == before


def test_prove_says_that_nothing_grows(memfit, tmp_path):
    (tmp_path / "train.py").write_text(LEAK.replace("    kept.append(out)", "    del out").format(end=""))
    code, _, err = memfit("leaks", "--prove", "train.py")
    assert code == 0
    assert "Nothing grows, so there is nothing to mend." in err
