"""`--precision` and `--half` of `memfit run` and `memfit trace`."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from cli.conftest import RESULT
from memfit.core.precision import LEVELS, choose

SOURCE = str(Path(__file__).parents[2] / "src")

TRAIN = """
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(4):
    out = net(torch.ones(256, 64))
    out.float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print(out.dtype)
"""


@pytest.mark.parametrize("level", LEVELS)
def test_the_level_and_the_half_reach_the_run(memfit, api, level):
    memfit("run", "--precision", level, "--half", "fp16", "train.py", "--precision", "theirs")
    ((_, args, options),) = api.calls
    assert args == ["--precision", "theirs"]
    assert options["precision"] == choose(level, "fp16")
    assert options["precision"].level.name == level


def test_without_half_pytorch_chooses(memfit, api):
    memfit("run", "--precision", "O1", "train.py")
    assert api.calls[0][2]["precision"].half is None


@pytest.mark.parametrize("verb", ["run", "trace"])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["--precision", "O4"],
            "'O4' is no opt level. There are O0 (pure float32), O1 (mixed by operator lists, float32 weights), O2 (",
        ),
        (["--precision", "01"], "'01' is no opt level. The O is a letter, not a zero. There are O0"),
        (["--precision", "o1"], "'o1' is no opt level."),
        (["--precision", "O1", "--half", "int8"], "'int8' is no half precision. Give 'bf16' or 'fp16'."),
        (["--half", "bf16"], "--half bf16 says nothing without an opt level. Add --precision O1, or leave it out."),
    ],
)
def test_unknown_words_are_refused_in_a_sentence_before_anything_runs(memfit, api, verb, options, words):
    code, out, err = memfit(verb, *options, "train.py")
    assert (code, out, api.calls) == (2, "", [])
    assert f"memfit: PrecisionError: {words}" in " ".join(err.split())


def test_the_report_says_what_the_run_trained_in(memfit, api):
    api.ran = SimpleNamespace(result=replace(RESULT, precision="O1 bfloat16", allow="approximate"), exit_code=0, error=None)
    _, _, err = memfit("run", "--precision", "O1", "train.py")
    text = " ".join(err.split())
    assert "train.py fits into 3.00 GiB in O1 bfloat16; nothing more was changed" in text
    assert "cpu, approximate, O1 bfloat16" in text


def run_command(directory: Path, *args: str) -> subprocess.CompletedProcess[str]:
    (directory / "train.py").write_text(TRAIN)
    environment = {**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", "COLUMNS": "400"}
    return subprocess.run(
        [sys.executable, "-m", "memfit", *args],
        capture_output=True,
        text=True,
        check=False,
        cwd=directory,
        env=environment,
        timeout=300,
    )


def test_the_command_trains_in_bfloat16_on_cpu_without_a_budget(tmp_path):
    done = run_command(tmp_path, "run", "--precision", "O1", "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "torch.bfloat16\n"
    assert "in O1 bfloat16; nothing more was changed" in done.stderr
    assert "this machine's memory" in done.stderr


def test_trace_measures_both_precisions_and_says_what_changed(tmp_path):
    done = run_command(tmp_path, "trace", "--precision", "O1", "-o", "trace.json", "train.py")
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stderr.split())
    assert "O1: peak " in text
    # The second linear's weight and the batch; the first linear's input needs no gradient.
    assert "Of it 512 B are half copies of weights and 32.00 KiB half copies of float32 inputs" in text
    assert (tmp_path / "trace.json").exists()
