"""Programs run under a growth watch."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from memfit import api
from memfit.core.growth import Growth, GrowthReport

PREAMBLE = "import gc\nimport torch\nfrom torch import nn\ntorch.manual_seed(0)\n"


@dataclass
class Program:
    """A program that was watched. `line(text)`: the line of the program that holds the text."""

    source: str
    report: GrowthReport
    exit_code: int
    error: BaseException | None

    def line(self, text: str) -> int:
        [line] = [number for number, each in enumerate(self.source.splitlines(), start=1) if text in each]
        return line

    @property
    def found(self) -> list[Growth]:
        here = str(Path("program.py").absolute())  # caches and cycles of other tests' programs may still be alive
        return [each for each in self.report.growths if each.is_material and each.path == here]


@pytest.fixture
def watch(tmp_path, monkeypatch):
    """Runs a program under the watch; gives what was seen."""
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def run(source: str, **options) -> Program:
        text = PREAMBLE + textwrap.dedent(source)
        Path("program.py").write_text(text)
        return Program(text, *api.watch_script("program.py", [], **options))

    yield run
    torch.set_num_threads(threads)
