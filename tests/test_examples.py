"""The examples train for real, as anybody would start them: without memfit, from any folder, every time the same."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
# Options that make it small.
SMALL = {
    "bert_qa.py": ["--epochs", "2", "--steps", "6", "--hidden", "64", "--layers", "1"],
    "bert_2019.py": ["--epochs", "2", "--steps", "6", "--hidden", "64", "--layers", "1"],
    "char_gpt.py": ["--steps", "6", "--width", "48", "--layers", "1"],
    "digits_cnn.py": ["--epochs", "2", "--channels", "8", "--blocks", "1"],
    "lstm_text.py": ["--epochs", "1", "--steps", "6", "--width", "32"],
}


def run_example(name: str, folder: Path) -> tuple[str, list[float]]:
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:__main__", str(EXAMPLES / name), *SMALL[name]],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # two busy-waiting threads crawl where a core is shared
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, [float(loss) for loss in re.findall(r"loss ([0-9.]+)", done.stdout)]


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_example_learns_and_repeats_itself_to_the_last_digit(name: str, tmp_path: Path) -> None:
    output, losses = run_example(name, tmp_path)
    assert losses[-1] < losses[0]
    assert run_example(name, tmp_path)[0] == output


def test_no_example_knows_of_memfit() -> None:
    scripts = sorted(EXAMPLES.glob("*.py"))
    assert {path.name for path in scripts} == {*SMALL, "squad.py"}
    assert not [path.name for path in scripts if "memfit" in path.read_text(encoding="utf-8")]


def test_every_answer_of_the_questions_stands_where_the_file_says() -> None:
    articles = json.loads((EXAMPLES / "data" / "squad_small.json").read_text(encoding="utf-8"))["data"]
    questions = [
        (paragraph["context"], qa) for article in articles for paragraph in article["paragraphs"] for qa in paragraph["qas"]
    ]
    assert (len(articles), len(questions), len({qa["id"] for _, qa in questions})) == (40, 120, 120)
    for context, qa in questions:
        (answer,) = qa["answers"]
        assert context[answer["answer_start"] :].startswith(answer["text"]), qa["id"]
