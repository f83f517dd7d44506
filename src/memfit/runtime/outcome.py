"""What has come of a run: its steps' seconds and peaks as they are noted, and the Result they add up to."""

from __future__ import annotations

import platform
import statistics
import time
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from memfit.core import result as core
from memfit.core.breakdown import bytes_by
from memfit.core.errors import BudgetError
from memfit.core.plan import Plan
from memfit.core.replay import replay
from memfit.core.sizes import format_size
from memfit.core.trace import Trace
from memfit.engine.observing import Counts
from memfit.measurement.recorder import Recorder

# What a Result says about one program; the rest is about the whole run.
_OF_A_PROGRAM = (
    "planned_peak_bytes", "eager_peak_bytes", "predicted_peak_bytes", "floor_bytes", "step_seconds", "eager_step_seconds",
    "predicted_step_seconds", "moves", "eager_bytes_by_kind",
)  # fmt: skip


class InForce(NamedTuple):
    """What a session has in hand at the moment a Result is asked for. trace: of the last measured step. label: see Result.precision."""

    trace: Trace | None
    plan: Plan | None
    counts: Counts
    device: torch.device
    label: str


@dataclass
class Outcome:
    """Filled by the session as it goes.

    budget_bytes: None where the run is only measured. facts: fields of the Result that the caller knows. messages: whole sentences.
    ending: the exit reason, and the error in words. No exception that was raised is kept: its traceback leads to tensors, they through
    autograd's graph (which no garbage collector sees) to the tape, and the tape to the session.
    planned_peak_bytes: measured under the plan in force, beside its prediction. ever_installed: whether a plan with moves was.
    """

    budget_bytes: int | None
    facts: dict[str, Any]
    messages: list[str] = field(default_factory=list)
    ending: tuple[str, str] = (core.FINISHED, "")
    num_steps: int = 0
    num_measured: int = 0
    num_planned: int = 0
    num_verified: int = 0
    planned_peak_bytes: int | None = None
    ever_installed: bool = False
    peak_bytes: int = 0
    _peak_phase: str = ""
    _peak_step: int | None = None
    _peak_by_kind: dict[str, int] = field(default_factory=dict)
    _planned_seconds: list[float] = field(default_factory=list)
    _free_seconds: list[float] = field(default_factory=list)
    _eager_seconds: list[float] = field(default_factory=list)  # of planned steps, less what restoring took
    _step_start: float = 0.0
    _restored_before: float = 0.0
    _past: core.Result | None = None

    def begin_step(self, restore_seconds: float | None = None) -> None:
        """The clock runs from here. restore_seconds: what restoring has taken so far, where a whole step begins."""
        self._step_start = time.perf_counter()
        if restore_seconds is not None:
            self._restored_before = restore_seconds

    def seconds_so_far(self) -> float:
        """Of the step that runs."""
        return time.perf_counter() - self._step_start

    def note_planned_step(self, seconds: float, restore_seconds: float) -> None:
        """A step under a plan has ended. restore_seconds: what restoring has taken so far."""
        self._planned_seconds.append(seconds)
        self._eager_seconds.append(seconds - (restore_seconds - self._restored_before))

    def note_free_step(self, seconds: float) -> None:
        """A step with nothing installed has ended."""
        self._free_seconds.append(seconds)

    def note_peak(self, recorder: Recorder | None, step: int) -> None:
        """What the recorder has seen of the step, if it is the highest so far."""
        if recorder is not None and recorder.ledger.peak_bytes > self.peak_bytes:
            self.peak_bytes = recorder.ledger.peak_bytes
            self._peak_phase = recorder.ledger.peak_phase
            self._peak_step = step
            self._peak_by_kind = recorder.ledger.peak_bytes_by_kind

    def end_program(self, in_force: InForce) -> None:
        """Another program begins in the same run: of several the largest is told."""
        mine = self._own_result(in_force)
        if self._past is None or (self._past.eager_peak_bytes or 0) <= (mine.eager_peak_bytes or 0):
            self._past = mine
        self.planned_peak_bytes = None
        self._planned_seconds.clear()
        self._free_seconds.clear()
        self._eager_seconds.clear()

    def result(self, in_force: InForce, told: list[str]) -> core.Result:
        """The run so far. told: what else there is to say, before the messages."""
        mine, past = self._own_result(in_force, told), self._past
        if past is None or (past.eager_peak_bytes or 0) <= (mine.eager_peak_bytes or 0):
            return mine
        return replace(mine, **{name: getattr(past, name) for name in _OF_A_PROGRAM})

    def _own_result(self, in_force: InForce, told: list[str] | None = None) -> core.Result:
        trace, plan, counts, device, label = in_force
        is_measured = self.num_steps > 0 or self.ending[0] == core.BUDGET  # else what was seen was no step
        eager = replay(trace) if trace is not None else None
        is_timed = bool(self._eager_seconds) and device.type == "cpu"  # elsewhere work goes on behind the clock's back
        eager_seconds = statistics.median(self._eager_seconds) if is_timed else None
        seconds = self._planned_seconds or self._free_seconds
        return core.Result(
            budget_bytes=self.budget_bytes or 0,
            peak_bytes=self.peak_bytes if is_measured and self.peak_bytes else None,
            peak_source=(
                f"live storages and operation workspaces, in {self.num_measured} measured step{'s' * (self.num_measured != 1)}"
                if self.num_measured
                else ""
            ),
            peak_phase=self._peak_phase if is_measured else "",
            peak_step=self._peak_step if is_measured else None,
            planned_peak_bytes=self.planned_peak_bytes,
            eager_peak_bytes=eager.peak_bytes if eager is not None else None,
            predicted_peak_bytes=plan.predicted_peak_bytes if plan is not None else None,
            floor_bytes=plan.floor_bytes if plan is not None else None,
            step_seconds=statistics.median(seconds) if seconds else None,
            eager_step_seconds=eager_seconds,
            predicted_step_seconds=eager_seconds + plan.extra_seconds if plan and eager_seconds else None,
            num_steps=self.num_steps,
            num_measured_steps=self.num_measured,
            num_planned_steps=self.num_planned,
            installed=self.ever_installed,
            moves=plan.moves if plan is not None else (),
            certificate=core.Certificate(
                num_evicted=counts.num_evicted,
                num_restored=counts.num_restored,
                num_verified=counts.num_verified,
                num_mismatched=counts.num_mismatched,
                num_sources_checked=counts.num_sources_checked,
                sources_equal=counts.num_sources_changed == 0 if counts.num_sources_checked else None,
                generators_equal=counts.num_generators_moved == 0 if counts.num_generator_checks else None,
                verified_steps=self.num_verified,
                mismatched_places=tuple(counts.mismatched_places),
            ),
            eager_bytes_by_kind=bytes_by(trace, eager, "kind") if trace is not None and eager is not None else {},
            bytes_by_kind=self._peak_by_kind if is_measured else {},
            messages=(*(told or ()), *self.messages, *_about_overwriting(counts)),
            exit_reason=self.ending[0],
            error=self.ending[1],
            device=device.type,
            precision=label,
            **{
                **self.facts,
                "versions": {
                    "torch": torch.__version__,
                    "python": platform.python_version(),
                    **self.facts.get("versions", {}),
                },
            },
        )

    def end(self, error: BaseException | None, plan: Plan | None, recorder: Recorder | None) -> None:
        """The run is over, by an error or without one."""
        words = f"{type(error).__name__}: {error}" if error is not None else ""
        self.ending = (_exit_reason(error), words)
        if self.ending[0] == core.OUT_OF_MEMORY:
            self.messages.append(self._about_memory(plan, recorder))
        self.note_peak(recorder, self.num_steps + 1)

    def _about_memory(self, plan: Plan | None, recorder: Recorder | None) -> str:
        """Planned and seen, for an error that should not have been."""
        planned = (
            f"the plan was to peak at {format_size(plan.predicted_peak_bytes)} of a budget of {format_size(plan.budget_bytes)}"
            if plan is not None
            else "nothing was planned yet"
        )
        seen = max(self.peak_bytes, recorder.ledger.peak_bytes if recorder is not None else 0)
        return (
            f"step {self.num_steps + 1}: the device ran out of memory all the same; {planned}, and at most {format_size(seen)} "
            "were seen in the measured steps. Something else on the device takes memory, or this step was larger than those: "
            "give a smaller budget, or a smaller batch."
        )


def _about_overwriting(counts: Counts) -> list[str]:
    if not counts.num_overwritten + counts.num_not_overwritten:
        return []
    refused = (
        f"; {counts.num_not_overwritten} could not at that moment and ran as written" if counts.num_not_overwritten else ""
    )
    calls = "1 call" if counts.num_overwritten == 1 else f"{counts.num_overwritten} calls"
    return [f"{calls} wrote the result over the input{refused}."]


def _exit_reason(error: BaseException | None) -> str:
    if error is None:
        return core.FINISHED
    if isinstance(error, BudgetError):
        return core.BUDGET
    if isinstance(error, KeyboardInterrupt):
        return core.INTERRUPTED
    if isinstance(error, SystemExit):
        return core.EXITED if error.code else core.FINISHED
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "DefaultCPUAllocator: can't allocate memory" in str(error):
        return core.OUT_OF_MEMORY
    return core.EXCEPTION
