"""A session: one training run held to a budget, from its first step on.

    step 1   measured, under the guard     -> Trace -> Plan (optimizer state counted before it exists)
    step 2   planned, measured             -> steady Trace; prediction against measurement; Plan again if they part
    step 3…  planned, at full speed; or, where everything fits, nothing installed at all

A step ends when the optimizer that ended the first one has stepped again, so several optimizers make one step together.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memfit.core import result as core
from memfit.core.breakdown import bytes_by
from memfit.core.errors import BudgetError, UnsupportedError
from memfit.core.plan import Plan
from memfit.core.replay import replay
from memfit.core.sizes import format_size
from memfit.core.steady import steady
from memfit.core.trace import Trace
from memfit.engine.private import is_on_top
from memfit.engine.tape import Tape
from memfit.measurement.backends import Backend, backend_for
from memfit.measurement.recorder import Recorder
from memfit.runtime.guard import Guard
from memfit.techniques import recompute

MakePlan = Callable[[Trace, int], Plan]
OnProgress = Callable[[str, int, int | None], None]

_STATE_SLOTS = {"Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "Adadelta": 2, "Adagrad": 1, "RMSprop": 1}


class Session:
    """Holds the training inside `with` to the budget. Made by `memfit.fit`.

    budget_bytes: bytes the whole step may take; None measures only. make_plan: the planner. plan: one made before, to start with.
    verify: 'off', 'always', or in how many planned steps restored tensors are compared with what was evicted.
    """

    def __init__(
        self,
        budget_bytes: int | None,
        make_plan: MakePlan | None,
        *,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        device: torch.device | None = None,
        plan: Plan | None = None,
        verify: str = "3",
        on_progress: OnProgress | None = None,
        on_trace: Callable[[Trace, int], None] | None = None,
    ) -> None:
        self.traces: list[Trace] = []
        self.plan = plan
        self.messages: list[str] = []
        self._budget_bytes = budget_bytes
        self._make_plan = make_plan
        self._model = model
        self._optimizers = [optimizer] if optimizer is not None else []
        self._device = device or _device_of(model, optimizer)
        self._backend: Backend = backend_for(self._device)
        self._verify = verify
        self._on_progress = on_progress or (lambda stage, done, total: None)
        self._on_trace = on_trace
        self._tape = Tape()
        self._recorder: Recorder | None = None
        self._guard: Guard | None = None
        self._leader: torch.optim.Optimizer | None = None
        self._undo: list[Callable[[], Any]] = []
        self._is_installed = False
        self._num_steps = self._num_measured = self._num_planned = self._num_verified = 0
        self._planned_seconds: list[float] = []
        self._free_seconds: list[float] = []
        self._step_start = 0.0
        self._peak_bytes = 0
        self._peak_phase = ""
        self._peak_step: int | None = None
        self._planned_peak_bytes: int | None = None
        self._peak_by_kind: dict[str, int] = {}
        self._margin_bytes = 0
        self._generators_equal: bool | None = None
        self._ever_installed = False
        self._error: BaseException | None = None

    # ---- life ------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Session:
        _refuse(self._model)
        self._check_fixed_bytes()
        self._undo = [
            register_optimizer_step_pre_hook(self._before_optimizer).remove,
            register_optimizer_step_post_hook(self._after_optimizer).remove,
        ]
        self._tape.enter()
        self._is_installed = True
        try:
            if self.plan is not None:
                self._apply(self.plan)
            self._begin_measured_step()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._error = error
        self._note_peak()
        self._remove()

    def _remove(self) -> None:
        """Take everything off: hooks, mode, recorder."""
        self._stop_recorder()
        while self._undo:
            self._undo.pop()()
        self._uninstall()

    def _uninstall(self) -> None:
        if self._is_installed:
            self._tape.observer = None
            self._tape.exit()
            self._is_installed = False

    # ---- steps -----------------------------------------------------------------------------------------------------

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
        if self._recorder is not None:
            self._recorder.set_phase("optimizer step")

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._recorder is not None:
            self._recorder.set_phase("other")
        if self._leader is None:
            self._leader = optimizer
        if optimizer is self._leader:
            self._end_step()

    def _end_step(self) -> None:
        self._num_steps += 1
        seconds = time.perf_counter() - self._step_start
        was_measured = self._recorder is not None
        if self._is_installed:
            self._tape.end_step()
        if was_measured:
            self._end_measured_step()
        elif self._is_installed:
            self._planned_seconds.append(seconds)
        else:
            self._free_seconds.append(seconds)
        if self.plan is not None and self.plan.moves and self._is_installed:
            self._num_planned += 1
            self._count_verified()
        if was_measured:
            self._decide()
        self._step_start = time.perf_counter()

    def _count_verified(self) -> None:
        if self._tape.verify:
            self._num_verified += 1
            self._generators_equal = True
        self._tape.verify = self._verify == "always" or (self._verify != "off" and self._num_verified < int(self._verify))

    def _begin_measured_step(self) -> None:
        """Record the next step: everything, exactly, under the guard where there is a budget."""
        self._on_progress(f"measuring step {self._num_steps + 1}", self._num_steps, None)
        tape = self._tape
        known = {
            "parameter": list(self._parameters()),
            "buffer": list(self._model.buffers()) if self._model is not None else [],
            "optimizer state": list(self._state()),
            "gradient": [p.grad for p in self._parameters() if p.grad is not None],
        }
        recorder = Recorder(self._backend, lambda: tape.is_restoring, known)
        tape.record_all = True
        if self._budget_bytes is not None and self.plan is None:
            self._guard = Guard(tape, recorder, self._budget_bytes, self._fixed_bytes())
            tape.pin_sources = True
            tape.observer = self._guard
        else:
            tape.observer = recorder
        self._recorder = recorder
        self._step_start = time.perf_counter()
        recorder.start()

    def _end_measured_step(self) -> None:
        assert self._recorder is not None
        self._num_measured += 1
        trace = self._recorder.finish(
            {"step": self._num_steps},
            new_state=self._state(),
            gradients=[p.grad for p in self._parameters() if p.grad is not None],
        )
        self.traces.append(trace)
        self._note_peak()
        if self._guard is not None and self._guard.num_evictions:
            self.messages.append(
                f"step {self._num_steps}: the guard let go of {self._guard.num_evictions} saved tensors under pressure."
            )
        if self.plan is not None and self.plan.moves:
            self._planned_peak_bytes = max(self._planned_peak_bytes or 0, self._recorder.peak_bytes)
        self._stop_recorder()
        if self._on_trace is not None:
            self._on_trace(trace, self._num_steps)

    def _note_peak(self) -> None:
        recorder = self._recorder
        if recorder is not None and recorder.peak_bytes > self._peak_bytes:
            self._peak_bytes = recorder.peak_bytes
            self._peak_phase = recorder.peak_phase
            self._peak_step = self._num_steps if self._num_steps else 1
            self._peak_by_kind = recorder.peak_bytes_by_kind

    def _stop_recorder(self) -> None:
        if self._recorder is not None:
            self._recorder.stop()
            self._recorder = None
        self._guard = None
        self._tape.observer = None
        self._tape.record_all = False
        self._tape.pin_sources = False

    def _decide(self) -> None:
        """After a measured step: plan, measure once more, or leave the program alone."""
        if self._budget_bytes is None or self._make_plan is None:
            self._begin_measured_step()
            return
        trace = self.traces[-1]
        measured = trace.meta["measured_peak_bytes"]
        predicted = self.plan.predicted_peak_bytes if self.plan is not None else None
        is_steady = self._num_measured >= 2
        if is_steady and self.plan is not None and predicted is not None:
            if measured > min(self._budget_bytes, 1.01 * predicted):
                self._margin_bytes += measured - predicted
                self.messages.append(
                    f"step {self._num_steps}: measured peak {format_size(measured)}, predicted {format_size(predicted)}; "
                    f"planned again with the measured step and {format_size(self._margin_bytes)} kept free."
                )
        self._on_progress("planning", 0, None)
        try:
            plan = self._plan_for(trace, is_steady)
        except BudgetError:
            self._remove()
            raise
        self._apply(plan)
        if not is_steady:
            self._begin_measured_step()
        elif not plan.moves:
            self._leave()

    def _plan_for(self, trace: Trace, is_steady: bool) -> Plan:
        """A plan from a measured step. After the first one, gradients are assumed to be cleared late, if that can be planned."""
        assert self._make_plan is not None and self._budget_bytes is not None
        budget_bytes = self._budget_bytes - self._margin_bytes
        if is_steady:
            return self._make_plan(trace, budget_bytes)
        try:
            return self._make_plan(steady(trace, gradients_wait=True), budget_bytes)
        except BudgetError:
            return self._make_plan(steady(trace, gradients_wait=False), budget_bytes)

    def _leave(self) -> None:
        """Everything fits: take the tape off, if nobody has stacked anything upon it meanwhile."""
        if is_on_top(self._tape, self._tape.pack_hook):
            self._uninstall()
        else:
            self._tape.policy = None

    def _apply(self, plan: Plan) -> None:
        self.plan = plan
        self._ever_installed = self._ever_installed or bool(plan.moves)
        recompute.apply(self._tape, plan.moves)
        self._tape.verify = bool(plan.moves) and self._verify != "off"

    # ---- what is there anyway ----------------------------------------------------------------------------------------

    def _parameters(self) -> Iterable[torch.Tensor]:
        seen: dict[int, torch.Tensor] = {}
        if self._model is not None:
            seen.update((id(p), p) for p in self._model.parameters())
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                seen.update((id(p), p) for p in group["params"])
        return seen.values()

    def _state(self) -> Iterable[torch.Tensor]:
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                for value in state.values() if isinstance(state, dict) else ():
                    if isinstance(value, torch.Tensor):
                        yield value

    def _fixed_bytes(self) -> int:
        """Parameters, buffers, gradients and optimizer state, the last counted before it exists."""
        parameters = list(self._parameters())
        own = sum(p.nbytes for p in parameters) + sum(p.nbytes for p in parameters if p.requires_grad)
        buffers = sum(b.nbytes for b in self._model.buffers()) if self._model is not None else 0
        return own + buffers + max(self._expected_state_bytes(), sum(t.nbytes for t in self._state()))

    def _expected_state_bytes(self) -> int:
        total = 0
        for optimizer in self._optimizers:
            slots = _STATE_SLOTS.get(type(optimizer).__name__, 0)
            for group in optimizer.param_groups:
                extra = slots + (1 if group.get("amsgrad") else 0) + (1 if slots == 0 and group.get("momentum") else 0)
                total += sum(extra * p.nbytes for p in group["params"] if p.requires_grad)
        return total

    def _check_fixed_bytes(self) -> None:
        fixed = self._fixed_bytes()
        if self._budget_bytes is not None and fixed > self._budget_bytes:
            parameters = sum(p.nbytes for p in self._parameters())
            raise BudgetError(
                f"{format_size(self._budget_bytes)} is too small: parameters ({format_size(parameters)}), their gradients and "
                f"the optimizer's state hold {format_size(fixed)} for the whole step, before any activation. A smaller model, "
                "SGD without momentum, or fewer trainable parameters would help; recomputing activations cannot.",
                needed_bytes=fixed,
            )

    # ---- what came of it ---------------------------------------------------------------------------------------------

    def result(self) -> core.Result:
        """What the run did so far, as data (see docs/result.md)."""
        trace = self.traces[-1] if self.traces else None
        eager = replay(trace) if trace is not None else None
        counts = self._tape.counts
        plan = self.plan
        eager_seconds = min((each.step_seconds for each in self.traces), default=None)
        seconds = self._planned_seconds or self._free_seconds
        return core.Result(
            budget_bytes=self._budget_bytes or 0,
            peak_bytes=self._peak_bytes or None,
            peak_source=(
                f"live storages and operation workspaces, in {self._num_measured} measured steps" if self._num_measured else ""
            ),
            peak_phase=self._peak_phase,
            peak_step=self._peak_step,
            planned_peak_bytes=self._planned_peak_bytes,
            eager_peak_bytes=eager.peak_bytes if eager is not None else None,
            predicted_peak_bytes=plan.predicted_peak_bytes if plan is not None else None,
            floor_bytes=plan.floor_bytes if plan is not None else None,
            step_seconds=statistics.median(seconds) if seconds else None,
            eager_step_seconds=eager_seconds,
            predicted_step_seconds=eager_seconds + plan.extra_seconds if plan and eager_seconds else None,
            num_steps=self._num_steps,
            num_measured_steps=self._num_measured,
            num_planned_steps=self._num_planned,
            installed=self._ever_installed,
            moves=plan.moves if plan is not None else (),
            certificate=core.Certificate(
                num_evicted=counts.num_evicted,
                num_restored=counts.num_restored,
                num_verified=counts.num_verified,
                num_mismatched=counts.num_mismatched,
                num_buffers_checked=counts.num_sources_checked,
                buffers_equal=counts.num_sources_checked > 0 or None,
                generators_equal=self._generators_equal,
                verified_steps=self._num_verified,
                mismatched_places=tuple(counts.mismatched_places),
            ),
            eager_bytes_by_kind=bytes_by(trace, eager, "kind") if eager is not None else {},
            bytes_by_kind=self._peak_by_kind,
            messages=tuple(self.messages),
            exit_reason=_exit_reason(self._error),
            error=f"{type(self._error).__name__}: {self._error}" if self._error is not None else "",
            device=self._device.type,
            versions={"torch": torch.__version__, "python": platform.python_version()},
        )

    def report(self) -> str:
        """The report as text."""
        from memfit.report import draw_result

        return draw_result(self.result())


def _exit_reason(error: BaseException | None) -> str:
    if error is None:
        return core.FINISHED
    if isinstance(error, BudgetError):
        return core.BUDGET
    if isinstance(error, KeyboardInterrupt):
        return core.INTERRUPTED
    if isinstance(error, SystemExit):
        return core.EXITED if error.code else core.FINISHED
    if isinstance(error, torch.OutOfMemoryError):
        return core.OUT_OF_MEMORY
    return core.EXCEPTION


def _device_of(model: torch.nn.Module | None, optimizer: torch.optim.Optimizer | None) -> torch.device:
    """The device of the parameters. Raises UnsupportedError where there are several."""
    parameters = list(model.parameters()) if model is not None else []
    if optimizer is not None:
        parameters += [p for group in optimizer.param_groups for p in group["params"]]
    devices = {p.device for p in parameters}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise UnsupportedError(
            f"The model lies on several devices ({names}); memfit plans for one device and would have to guess the others' "
            "budgets. Put the whole model on one device, or wrap the part that needs the memory."
        )
    return devices.pop() if devices else torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _refuse(model: torch.nn.Module | None) -> None:
    for module in model.modules() if model is not None else ():
        if isinstance(module, torch.nn.DataParallel) and len(module.device_ids) > 1:
            raise UnsupportedError(
                "The model uses DataParallel, which runs forward in threads of its own where memfit cannot see it. "
                "Use DistributedDataParallel, or a single device."
            )

