"""`memfit check`: what it prints, how it exits, what it does with bad input, notebooks and --fix; and `memfit explain CODE`."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from memfit.cli.explain import _TEXTS, read_text
from memfit.core import growth
from memfit.core.trace import Call, Cell, Handle, Storage, Trace
from memfit.diagnosis import collecting, dead, held
from memfit.diagnosis.codes import CODES, MEASURED_ONLY, expand_codes
from memfit.diagnosis.lints import source
from memfit.runtime import autocast_cache

LEAK = """import torch

def fit(net, loader):
    total = 0
    for x in loader:
        loss = net(x).mean()
        loss.backward()
        total += loss
"""
CLEAN = "import torch\n\ndef f(x):\n    return x + 1\n"
MESSAGE = (
    "MF102 `total` keeps the graph nodes of every step: `loss` still has its graph after backward. "
    "That is host memory, a few nodes a step; the saved tensors are already freed.\n"
    "    help: Add the number: `.item()`, or `.detach()`.\n"
)


@pytest.fixture
def leak(tmp_path):
    (tmp_path / "leak.py").write_text(LEAK)
    return tmp_path / "leak.py"


def test_a_finding_is_one_line_with_its_place_and_exit_code_1(memfit, leak):
    assert memfit("check", "leak.py") == (
        1,
        f"leak.py:8:9 {MESSAGE}1 finding in 1 file, 1 file checked. `memfit explain MF102` says more.\n",
        "",
    )


def test_nothing_found_is_exit_code_0(memfit, tmp_path):
    (tmp_path / "clean.py").write_text(CLEAN)
    assert memfit("check", "clean.py", "train.py") == (0, "No findings, 2 files checked.\n", "")


def test_directories_are_walked_and_hidden_and_built_ones_left_out(memfit, tmp_path):
    for name in ("a/b/leak.py", "a/.hidden/leak.py", "a/build/leak.py", "a/__pycache__/leak.py", "a/notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(LEAK)
    code, out, err = memfit("check", "a", "a/b/leak.py")
    assert (code, err) == (1, "")
    assert out.startswith("a/b/leak.py:8:9 MF102 ")
    assert "1 finding in 1 file, 1 file checked." in out


def test_json_is_a_list_of_findings_and_nothing_else(memfit, leak):
    code, out, err = memfit("check", "--format", "json", "leak.py")
    (finding,) = json.loads(out)
    assert (code, err) == (1, "")
    assert (finding["path"], finding["line"], finding["column"], finding["code"]) == ("leak.py", 8, 9, "MF102")
    assert finding["measured"] is False
    assert finding["num_bytes"] is None


def test_github_gets_a_warning_on_the_line(memfit, leak):
    code, out, _ = memfit("check", "--format", "github", "leak.py")
    assert code == 1
    assert out.startswith("::warning file=leak.py,line=8,col=9,title=MF102::`total` keeps the graph nodes")
    assert out.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--select", "MF1"], 1),
        (["--select", "mf102,MF9"], 1),
        (["--select", "MF2"], 0),
        (["--ignore", "MF102"], 0),
        (["--ignore", "MF1"], 0),
        (["--select", "MF1", "--ignore", "MF102"], 0),
        (["--ignore", "MF101"], 1),
    ],
)
def test_codes_and_beginnings_of_codes_are_selected_and_ignored(memfit, leak, options, code):
    assert memfit("check", *options, "leak.py")[0] == code


@pytest.mark.parametrize(
    ("comment", "code"),
    [
        ("# memfit: ignore[MF102]", 0),
        ("# memfit: ignore[MF201, MF1]  because it is short", 0),
        ("# memfit: ignore", 0),
        ("# memfit:ignore[MF102]", 0),
        ("# memfit: ignore[MF101]", 1),
        ("; note = '# memfit: ignore'", 1),
    ],
)
def test_a_comment_on_the_line_silences_its_codes(memfit, leak, comment, code):
    leak.write_text(LEAK.rstrip() + f"  {comment}\n")
    assert memfit("check", "leak.py")[0] == code


def test_a_file_that_cannot_be_parsed_is_said_and_the_others_are_checked(memfit, leak, tmp_path):
    (tmp_path / "broken.py").write_text("import torch\ndef f(:\n")
    (tmp_path / "binary.py").write_bytes(b"import torch\n\xff\xfe")
    code, out, err = memfit("check", "broken.py", "binary.py", "leak.py")
    assert code == 1
    assert "leak.py:8:9 MF102" in out
    first, second = err.splitlines()
    assert first == "memfit: broken.py:2 could not be parsed: invalid syntax."
    assert second.startswith("memfit: binary.py could not be")


def test_only_broken_files_are_bad_input(memfit, tmp_path):
    (tmp_path / "broken.py").write_text("import torch\ndef f(:\n")
    assert memfit("check", "broken.py")[0] == 2


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nope.py"], "There is no file or directory nope.py."),
        (["empty"], "empty holds no Python file and no notebook. Give the script, or the directory it is in."),
        (["--format", "xml", "train.py"], "--format xml is not known. There are text, json, github."),
        (["--yes", "train.py"], "--yes writes what --fix shows. Give both, or look at the diff with --fix alone."),
        (
            ["--select", "MF77", "train.py"],
            "--select: 'MF77' is no code of a finding and no beginning of one, like MF101 or MF1. `memfit explain` lists them.",
        ),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(memfit, tmp_path, words, sentence):
    (tmp_path / "empty").mkdir()
    assert memfit("check", *words) == (2, "", f"memfit: {sentence}\n")


def test_files_that_are_not_about_training_are_not_even_parsed(memfit, tmp_path, monkeypatch):
    (tmp_path / "other.py").write_text("total = 0\nfor loss in [1, 2]:\n    total += loss\n")
    monkeypatch.setattr(source.ast, "parse", None)
    assert memfit("check", "other.py")[:2] == (0, "No findings, 1 file checked.\n")


def test_ctrl_c_reports_what_was_found_so_far(memfit, leak, tmp_path, monkeypatch):
    from memfit.diagnosis.lints import check

    def interrupted(path, chosen):
        if path.name == "second.py":
            raise KeyboardInterrupt
        return real(path, chosen)

    real = check.check_file
    monkeypatch.setattr(check, "check_file", interrupted)
    (tmp_path / "second.py").write_text(LEAK)
    code, out, err = memfit("check", "leak.py", "second.py", "train.py")
    assert code == 130
    assert out.startswith("leak.py:8:9 MF102 ")
    assert "1 finding in 1 file, 1 file checked." in out
    assert err == "memfit: interrupted\n"


def test_many_files_are_shared_out_and_come_back_in_order(memfit, tmp_path):
    for number in range(70):
        (tmp_path / f"a{number:02}.py").write_text(LEAK if number % 2 else CLEAN)
    code, out, _ = memfit("check", ".")
    assert code == 1
    places = [line.partition(":")[0] for line in out.splitlines() if " MF102 " in line]
    assert places == [f"a{number:02}.py" for number in range(1, 70, 2)]
    assert "35 findings in 35 files, 71 files checked." in out


def notebook(*cells):
    made = [{"cell_type": kind, "source": text.splitlines(keepends=True), "metadata": {}} for kind, text in cells]
    return json.dumps({"cells": made, "nbformat": 4, "nbformat_minor": 5, "metadata": {}})


def test_cells_of_a_notebook_are_one_program_and_magics_are_passed_over(memfit, tmp_path):
    cells = (
        ("markdown", "# Training\ntorch"),
        ("code", "%matplotlib inline\n!pip install torch\nimport torch\nnet = torch.nn.Linear(4, 4)\ntotal = 0\nnet?"),
        ("code", "%%bash\necho 'for x in y: total += loss'"),
        ("code", "def broken(:\n    pass"),
        (
            "code",
            "files = !ls\nfor x in torch.randn(3, 2, 4):\n    loss = net(x).mean()\n    loss.backward()\n    total += loss",
        ),
    )
    (tmp_path / "work.ipynb").write_text(notebook(*cells))
    code, out, err = memfit("check", "work.ipynb")
    assert code == 1
    assert out.startswith(f"work.ipynb:cell 5:5:5 {MESSAGE}")
    assert err == "memfit: work.ipynb:cell 4:1 could not be parsed (invalid syntax); the other cells were.\n"
    assert memfit("check", "--format", "github", "work.ipynb")[1].startswith(
        "::warning file=work.ipynb,title=MF102::cell 5, line 5: `total` keeps"
    )


def test_lines_in_a_message_are_lines_of_the_cell(memfit, tmp_path):
    cells = (
        ("code", "import torch\nfrom torch import nn\nnet = nn.Linear(4, 4)\nopt = torch.optim.SGD(net.parameters(), 0.1)"),
        ("code", "out = net(torch.zeros(2, 4))\na, b = out.mean(), out.std()\na.backward(retain_graph=True)\nopt.step()"),
        ("code", "print(a)\nb.backward()"),
    )
    (tmp_path / "gan.ipynb").write_text(notebook(*cells))
    code, out, _ = memfit("check", "--select", "MF405", "gan.ipynb")
    assert code == 1
    assert out.startswith(
        "gan.ipynb:cell 2:4:1 MF405 This step writes the weights of `net` in place, and the backward on line 2 of cell 3"
    )


def test_what_calls_itself_a_notebook_and_is_none_is_bad_input(memfit, tmp_path):
    (tmp_path / "no.ipynb").write_text("[1, 2]")
    code, _, err = memfit("check", "no.ipynb")
    assert code == 2
    assert err.startswith("memfit: no.ipynb could not be read: it is no notebook of format 4 (TypeError:")


NOTEBOOK = """{
 "cells": [
  {
   "cell_type": "code",
   "execution_count": 3,
   "id": "a1",
   "metadata": {"tags": ["é"]},
   "outputs": [{"name": "stdout", "output_type": "stream", "text": ["1\\n"]}],
   "source": [
    "%matplotlib inline\\n",
    "import torch\\n",
    "from torch.nn import functional as F\\n",
    "net = torch.nn.Linear(400, 400)"
   ]
  },
  {
   "cell_type": "code",
   "source": %s
  }
 ],
 "nbformat": 4
}
"""
CELL = """%%time
def fit(loader, optimizer):
    total = 0
    for x, y in loader:
        files = !ls
        logits = net(x)  # (B, C)
        loss = F.cross_entropy(logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        %time total += loss
        total += loss
for x, y in []:
    logits = net(x)
    loss = F.cross_entropy(logits, y)
    loss.backward()
"""


def test_fix_changes_the_sources_of_cells_in_place_and_nothing_else_of_a_notebook(memfit, tmp_path):
    path = tmp_path / "work.ipynb"
    data = json.loads(NOTEBOOK.replace("%s", json.dumps(CELL)))
    path.write_text(text := json.dumps(data, indent=1, ensure_ascii=False) + "\n")
    code, out, err = memfit("check", "--fix", "work.ipynb")
    assert (code, path.read_text()) == (1, text)
    assert out.splitlines()[:2] == ["--- a/work.ipynb:cell 2", "+++ b/work.ipynb:cell 2"]
    assert err == "memfit: 2 changes in 1 file. Nothing is written yet: add --yes.\n"
    assert memfit("check", "--fix", "--yes", "work.ipynb")[2] == "memfit: 2 changes in 1 file written.\n"
    # `logits` goes in the function and stays in the notebook itself; a magic reads `total` and `loss`, so their sum stays.
    mended = CELL.replace("(logits, y)\n", "(logits, y)\n        del logits\n", 1)
    mended = mended.replace("        optimizer.zero_grad()\n", "")
    mended = mended.replace("        logits = net(x)  #", "        optimizer.zero_grad()\n        logits = net(x)  #")
    assert json.loads(path.read_text())["cells"][1]["source"] == mended
    data["cells"][1]["source"] = mended
    assert path.read_text() == json.dumps(data, indent=1, ensure_ascii=False) + "\n"
    assert memfit("check", "--fix", "--yes", "work.ipynb")[2] == "memfit: 0 changes in 0 files.\n"


def test_a_magic_inside_a_loop_that_is_wrapped_moves_with_it(memfit, tmp_path):
    cell = (
        "import torch\nnet = torch.nn.Linear(4, 4)\ndef validate(loader):\n    net.eval()\n    hits = 0\n    for x in loader:\n"
    )
    body = "        hits += net(x).sum().item()\n        !nvidia-smi -q\n"
    (tmp_path / "eval.ipynb").write_text(notebook(("code", f"{cell}{body}    return hits")))
    assert memfit("check", "--fix", "--yes", "eval.ipynb")[2] == "memfit: 1 change in 1 file written.\n"
    (source,) = (each["source"] for each in json.loads((tmp_path / "eval.ipynb").read_text())["cells"])
    wrapped = "    with torch.no_grad():\n        for x in loader:\n" + "".join(f"    {line}\n" for line in body.splitlines())
    assert "".join(source) == cell.replace("    for x in loader:\n", wrapped) + "    return hits"


def test_a_notebook_with_a_cell_that_cannot_be_read_is_not_mended(memfit, tmp_path):
    (tmp_path / "work.ipynb").write_text(text := notebook(("code", LEAK), ("code", "def broken(:")))
    code, out, err = memfit("check", "--fix", "--yes", "work.ipynb")
    assert (code, (tmp_path / "work.ipynb").read_text()) == (1, text)
    assert out.startswith("work.ipynb:cell 1:8:9 MF102")
    assert err.startswith("memfit: work.ipynb is not mended: a cell could not be parsed, and it may read anything.\n")


def test_a_trace_tells_what_each_change_is_worth(memfit, leak, tmp_path):
    """`total` adds the mean of net(x), whose call saved 1 KiB that autograd still holds at the step's end."""
    place, made = str(tmp_path / "leak.py"), ("activation", "")
    storages = (Storage(1024, *made, location=f"{place}:6"), Storage(4, *made, location=f"{place}:8"))
    cells = (Cell(0, 0, "out0", evictable=True), Cell(1, 1, "out0", evictable=True))
    calls = (
        Call("0|net#0/0:mul", "mul", "net", f"{place}:6", 0.1, (), (0,)),
        Call("0|#0/0:add", "add", "", f"{place}:8", 0.1, (0,), (1,)),
    )
    events = (
        ("phase", 0), ("begin", 0), ("alloc", 0), ("end", 0), ("save", 0), ("release", 0), ("begin", 1), ("alloc", 1), ("end", 1),
    )  # fmt: skip
    Trace("cpu", storages, cells, (Handle(0, 0),), calls, events).save(tmp_path / "t.json")
    code, out, err = memfit("check", "--fix", "--trace", "t.json", "leak.py")
    assert code == 1
    assert "+        total += loss.detach()\n" in out
    assert err == (
        "leak.py:8 MF102 .detach(): -1.00 KiB a step\nmemfit: 1 change in 1 file. Nothing is written yet: add --yes.\n"
    )
    code, out, err = memfit("check", "--format", "json", "--trace", "t.json", "leak.py")
    (finding,) = json.loads(out)
    assert (finding["num_bytes"], finding["per_step"], finding["measured"]) == (1024, True, True)
    assert err == ""
    (tmp_path / "other.py").write_text(LEAK)
    assert memfit("check", "--fix", "--trace", "t.json", "other.py")[2].startswith(
        "memfit: other.py changed after t.json was taken, so bytes may be told of the wrong line. Take the trace again.\n"
        "other.py:8 MF102 .detach(): not in the traced step\n"
    )


def test_fix_shows_a_diff_and_writes_nothing(memfit, leak):
    code, out, err = memfit("check", "--fix", "leak.py")
    assert (code, leak.read_text()) == (1, LEAK)
    assert out.splitlines()[:2] == ["--- a/leak.py", "+++ b/leak.py"]
    assert "-        total += loss\n+        total += loss.detach()\n" in out
    assert err == "memfit: 1 change in 1 file. Nothing is written yet: add --yes.\n"


def test_fix_yes_writes_and_a_second_run_has_nothing_to_do(memfit, leak):
    leak.chmod(0o755)
    code, out, err = memfit("check", "--fix", "--yes", "leak.py")
    assert code == 0
    assert out.endswith("No findings, 1 file checked.\n")
    assert err == "memfit: 1 change in 1 file written.\n"
    assert leak.read_text() == LEAK.replace("+= loss", "+= loss.detach()")
    assert leak.stat().st_mode & 0o777 == 0o755
    assert sorted(path.name for path in leak.parent.iterdir()) == ["leak.py", "train.py"]
    assert memfit("check", "--fix", "--yes", "leak.py") == (
        0,
        "No findings, 1 file checked.\n",
        "memfit: 0 changes in 0 files.\n",
    )


def test_fix_heeds_ignored_lines_and_selected_codes(memfit, leak):
    assert memfit("check", "--fix", "--select", "MF2", "leak.py")[2] == "memfit: 0 changes in 0 files.\n"
    leak.write_text(LEAK.rstrip() + "  # memfit: ignore[MF102]\n")
    assert memfit("check", "--fix", "leak.py")[2] == "memfit: 0 changes in 0 files.\n"


def test_every_code_has_a_line_and_a_text_that_explain_prints(memfit):
    sections = re.findall(
        r"^## (\w+)$", "".join(path.read_text() for path in sorted((_TEXTS / "codes").glob("*.md"))), re.MULTILINE
    )
    assert sections == list(CODES)
    for code, line in CODES.items():
        title, blank, body = read_text(code.lower()).split("\n", 2)
        assert (title, blank) == (f"# {code}: {line}", "")
        assert len(body) > 100, code
        assert max(map(len, body.splitlines())) < 80, code
    code, out, _ = memfit("explain", "MF101")
    assert code == 0
    assert out == read_text("MF101")
    assert "MF922        batch norm sees parts of the batch\n" in memfit("explain")[1]
    assert memfit("explain", "MF929")[2].startswith("memfit: There is no text about 'MF929'. Did you mean mf9")


def test_every_code_that_only_a_run_can_report_is_named_by_the_code_that_reports_it():
    reported = {*growth.CODES.values(), dead.DEAD_NAME, held.HELD, held.ORPHANS, collecting.IDLE_DEL, autocast_cache.CODE}
    assert reported == set(MEASURED_ONLY)
    for code, verb in MEASURED_ONLY.items():
        assert f"`memfit {verb}`" in " ".join(read_text(code).split()), code


def test_every_code_that_a_rule_can_report_is_in_the_table():
    rules = Path(source.__file__).with_name("rules")
    reported = {code for path in rules.glob("*.py") for code in re.findall(r'"(MF\d{3})"', path.read_text())}
    assert reported <= set(CODES)


def test_codes_are_read_in_small_letters_and_with_blanks():
    assert expand_codes(" mf1, MF201 ,") == ("MF1", "MF201")
    with pytest.raises(ValueError, match="'LEAK' is no code"):
        expand_codes("MF1,leak")


def test_check_and_fix_load_no_torch(leak):
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from memfit import cli\n"
        "try: cli.main(['check', '--fix', sys.argv[1]])\n"
        "except SystemExit as left: sys.exit(left.code)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(leak)], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "+        total += loss.detach()" in done.stdout
