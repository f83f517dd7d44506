"""A fake `memfit.api`: the verbs are tested here, what they call is tested elsewhere."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from memfit import cli
from memfit.core.plan import Plan
from memfit.core.result import Result
from memfit.core.trace import Cell, Storage, Trace
from memfit.runtime.script import TraceRun

RESULT = Result(budget_bytes=3 * 1024**3, peak_bytes=2 * 1024**3, num_steps=2, num_measured_steps=2, program="train.py")
TRACE = Trace("cpu", (Storage(1000, "parameter", persistent=True),), (Cell(0),), (), (), (("alloc", 0),))
PLAN = Plan(3000, 4000, 2990, 1000)


class FakeApi:
    """Remembers what it was called with and answers with what the test put in; an exception is raised."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.ran: object = SimpleNamespace(result=RESULT, exit_code=0, error=None)
        self.traced: object = TRACE
        self.planned: object = PLAN

    def run_script(self, path, args, *, budget, allow, plan, verify, release, precision, on_progress):
        self.calls.append(
            (path, args, {"budget": budget, "allow": allow, "plan": plan, "verify": verify, "precision": precision})
        )
        on_progress("measuring step 1", 0, None)
        return self._answer(self.ran)

    def trace_run(self, path, args, on_progress=None, precision=None):
        self.calls.append((path, args))
        if isinstance(self.traced, TraceRun):
            return self.traced
        if isinstance(self.traced, Exception):
            return TraceRun(path, None, 0, self.traced)
        return TraceRun(path, self.traced, 2, None)

    def plan(self, trace, budget, on_progress=None, *, lower=None):
        self.calls.append((trace, budget) if lower is None else (trace, budget, lower))
        on_progress("sweeping")
        return self._answer(self.planned)

    @staticmethod
    def _answer(answer):
        if callable(answer):
            answer = answer()
        if isinstance(answer, BaseException):
            raise answer
        return answer


@pytest.fixture
def api(monkeypatch):
    fake = FakeApi()
    monkeypatch.setitem(sys.modules, "memfit.api", fake)
    monkeypatch.setattr("memfit.api", fake)
    return fake


@pytest.fixture
def memfit(api, tmp_path, monkeypatch, capsys):
    """Calls the command in a directory that holds train.py; gives (exit code, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "train.py").write_text("print('training')\n")

    def call(*args: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:  # the command ends no other way
            cli.main(list(args))
        out, err = capsys.readouterr()
        return int(left.value.code or 0), out, err

    return call
