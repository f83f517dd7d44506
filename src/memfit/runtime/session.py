"""A session: one training run held to a budget, from its first step on.

    step 1   measured, under the guard     -> Trace -> Plan (optimizer state counted before it exists)
    step 2   planned, measured             -> steady Trace; prediction against measurement; Plan again if they part
    step 3   measured once more, if the plan changed
    after    planned, at full speed; or, where everything fits, nothing installed at all

A step ends when the optimizer that ended the first one has stepped again, so several optimizers make one step together.
"""

from __future__ import annotations

import copy
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memfit.core import result as core
from memfit.core.copies import find_copies
from memfit.core.errors import BudgetError, MemfitError, PlanError, UnsupportedError
from memfit.core.inplace import find_let_go
from memfit.core.keys import cells_of_plan, edit_by_plan
from memfit.core.plan import Plan
from memfit.core.precision import Choice
from memfit.core.replay import replay
from memfit.core.sizes import format_size, slack_bytes
from memfit.core.steady import FREED, GRADIENTS, steady
from memfit.core.trace import Trace
from memfit.engine.private import is_on_top, stacks
from memfit.engine.tape import Tape
from memfit.measurement.backends import Backend, backend_for
from memfit.measurement.held import HolderWatch
from memfit.measurement.recorder import Recorder, take_off_stopped
from memfit.measurement.simulated import OPTIMIZER_STEP
from memfit.runtime.emptying import Emptying, plan_emptying
from memfit.runtime.guard import Guard
from memfit.runtime.holdings import Holdings, check_parallel, check_signature, device_of, signature_of
from memfit.runtime.optimizers import ENDED, JOINED, LED, Optimizers
from memfit.runtime.outcome import InForce, Outcome
from memfit.runtime.precision import Precision
from memfit.runtime.valve import Valve
from memfit.runtime.watch import SizeWatch, StepWatch
from memfit.techniques import inplace, recompute
from memfit.techniques.release import releases

OnProgress = Callable[[str, int, int | None], None]

_MAX_RESTARTS_TOLD = (
    5  # a program that makes an optimizer every few steps is measured all the time; one need not say so each time
)
_active: weakref.WeakSet[Session] = weakref.WeakSet()  # sessions between enter and exit; at most one

_MEASURED_STEPS = 3  # at most, of one program: the plan, the plan in force, and the plan made of that


class Planner(Protocol):
    """What a session asks of `memfit.planner`, which it may not import. Both raise BudgetError where nothing found fits."""

    def plan(self, trace: Trace, budget_bytes: int, *, margin_bytes: int) -> Plan: ...
    def check(self, trace: Trace, budget_bytes: int, *, margin_bytes: int) -> None: ...


class Session:
    """Holds the training inside `with` to the budget. Made by `memfit.fit`.

    budget_bytes: bytes the whole step may take; None measures only. planner: makes the plans. plan: one made before, to start with.
    verify: 'off', 'always', or in how many planned steps restored tensors are compared with what was evicted.
    precision: the opt level to train in; None leaves the program's own.
    """

    def __init__(
        self,
        budget_bytes: int | None,
        planner: Planner | None,
        *,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        device: torch.device | None = None,
        plan: Plan | None = None,
        verify: str = "3",
        precision: Choice | None = None,
        on_progress: OnProgress | None = None,
        on_trace: Callable[[Trace, int], None] | None = None,
        draw: Callable[[core.Result], str] | None = None,
        facts: dict[str, Any] | None = None,
    ) -> None:
        """draw: makes the text of `report` (runtime may not import report). facts: fields of the Result that the caller knows."""
        self.traces: list[Trace] = []
        self.holders: HolderWatch | None = None  # set before `with`: measured steps say who holds what at their peak
        self.plan = plan
        self._outcome = Outcome(budget_bytes, facts or {})
        self.messages = self._outcome.messages
        self._budget_bytes = budget_bytes
        self._planner = planner
        self._model = model
        self._optimizers = Optimizers(optimizer, self._on_new_optimizer)
        self._holdings = Holdings(model, self._optimizers)
        self._device = device or device_of(model, optimizer)
        self._backend: Backend = backend_for(self._device)
        self._verify = verify
        self._precision = (
            Precision(precision, self.leave_out_step, model=model, optimizer=optimizer) if precision is not None else None
        )
        self._on_progress = on_progress or (lambda stage, done, total: None)
        self._on_trace = on_trace
        self._tape = Tape()
        self._watch = SizeWatch(self._on_larger)
        self._steps = StepWatch(self._tape)
        self._tape.on_root = self._watch.look
        self._recorder: Recorder | None = None
        self._guard: Guard | None = None
        self._valve: Valve | None = None
        self._num_unplanned = 0  # saved tensors that valves let go of
        self._unhelped_bytes = 0  # what the last measured step would have taken at its peak without a valve
        self._emptying: Emptying | None = None
        self._undo: list[Callable[[], Any]] = []
        self._is_installed = False
        self._margin_bytes = slack_bytes(budget_bytes or 0)  # kept free of the budget
        self._num_measured_here = 0  # of the program that trains now
        self._is_given = plan is not None  # the plan in force was made before
        self._is_waiting = False
        self._is_training = model is not None or optimizer is not None
        self._is_over = True
        self.refusal: MemfitError | None = None  # raised inside the program; raised again should the program go on all the same
        self._draw = draw
        self._thread = 0
        self._is_dead = False  # in a forked child: a worker must find nothing of this at work
        self._given_signature = plan.signature if plan is not None else ""  # still to be compared with the program's
        self._num_restarts = 0
        self._stacks_below: Any = None

    # ---- life ------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Session:
        if _active:
            raise UnsupportedError(
                "memfit is at work in this process already: one session holds the whole process to its budget. Leave the first "
                "`with` block before the second, and start a script that uses memfit.fit with plain python, not with `memfit run`."
            )
        check_parallel(self._model)
        self._holdings.check_fixed_bytes(self._budget_bytes)
        if self._precision is not None:
            self._precision.__enter__()
        self._undo = [
            register_optimizer_step_pre_hook(self._before_optimizer).remove,
            register_optimizer_step_post_hook(self._after_optimizer).remove,
            self._optimizers.watch(),
            torch.nn.modules.module.register_module_forward_pre_hook(self._before_module).remove,
        ]
        _active.add(self)
        self._thread = threading.get_ident()
        self._is_over = False
        try:
            self._install()
            if self.plan is not None:
                self._apply(self.plan)
            self._begin_measured_step()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._outcome.end(error if error is not None else self.refusal, self.plan, self._recorder)
        self._remove()

    def _remove(self) -> None:
        """Take everything off: hooks, mode, recorder."""
        _active.discard(self)
        self._is_over = True
        self._watch.leave()
        self._stop_recorder()
        self._stop_emptying()
        take_off_stopped()
        while self._undo:
            self._undo.pop()()
        self._uninstall()
        if self._precision is not None:
            self._precision.__exit__()

    def _install(self) -> None:
        self._tape.enter()
        self._is_installed = True

    def _uninstall(self) -> None:
        if self._is_installed:
            self._tape.observer = None
            self._tape.exit()
            self._is_installed = False

    # ---- steps -----------------------------------------------------------------------------------------------------

    def _before_module(self, module: torch.nn.Module, _: Any) -> None:
        if self._recorder is None or self._is_dead or threading.get_ident() != self._thread:
            return
        if isinstance(module, torch.nn.DataParallel):
            with self._refusing():
                check_parallel(module)
        if not self._is_training and torch.is_grad_enabled():
            self._begin_training()

    def _begin_training(self) -> None:
        """The model is there: from here on it counts, and the guard watches. Before, nothing could be evicted anyway."""
        self._is_training = True
        if self._recorder is not None:
            self._recorder.ledger.peak_phase = "other"
            self._outcome.note_peak(self._recorder, 1)
            self._stop_recorder()
            self._tape.start_over()  # a module's initialisation is no part of the step
            self._begin_measured_step()

    def _on_new_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """One has been made: refuse what cannot work before the first forward; measure from here, with its parameters known."""
        if self._is_over or self._is_dead or threading.get_ident() != self._thread:
            return
        with self._refusing():
            self._set_device(optimizer)
            self._holdings.check_fixed_bytes(self._budget_bytes, optimizer)
            if self._outcome.num_steps:
                self._restart("a new optimizer was made")
            else:
                self._begin_training()

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_over or self._is_dead:
            return
        if self.refusal is not None:  # the program caught it and goes on
            raise copy.copy(self.refusal)
        with self._refusing():
            if threading.get_ident() != self._thread:
                raise UnsupportedError(
                    "The script trains in a thread of its own, where memfit cannot see its tensors. Train in the main thread, or "
                    "put `with memfit.fit(...)` inside the thread that trains."
                )
            if optimizer not in self._optimizers.stepped:
                self._optimizers.add(optimizer)
                self._set_device(optimizer)
                self._holdings.check_fixed_bytes(self._budget_bytes, optimizer)
            wanted, self._given_signature = self._given_signature, ""
            check_signature(wanted, optimizer)
            self._check_before_first_update()
        if self._guard is not None:
            self._guard.before_optimizer()
        if self._recorder is not None:
            self._recorder.set_phase("optimizer step")
        self._tape.before_optimizer(optimizer, args, kwargs)
        if self._emptying is not None:
            self._emptying.pass_by(OPTIMIZER_STEP)

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._tape.after_optimizer()
        if self._is_over or self._is_dead:
            return
        if self._recorder is not None:
            self._recorder.set_phase("other")
        with self._refusing():
            if self._is_waiting:
                self._restart("the step began inside a context of the program's and could not be watched")
            answer = self._optimizers.note_step(optimizer)
            if answer in (ENDED, LED):
                self._end_step()
            if answer in (JOINED, LED):
                self._restart("another optimizer began to step" if answer == JOINED else "another optimizer ends the steps")

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Remember what memfit refuses inside the program: a program that catches it must not go on without its budget."""
        try:
            yield
        except MemfitError as error:
            self.refusal = copy.copy(error)
            raise

    def _restart(self, reason: str) -> None:
        """Another program begins: forget the plan, measure anew under the guard."""
        if self._budget_bytes is None or (self.plan is None and self._recorder is not None):  # it had not got further anyway
            return
        self._num_restarts += 1
        if self._num_restarts <= _MAX_RESTARTS_TOLD:
            self.messages.append(f"step {self._outcome.num_steps}: {reason}; measured and planned anew from here.")
        self._outcome.note_peak(self._recorder, self._outcome.num_steps + 1)
        self._outcome.end_program(self._in_force())
        self._stop_recorder()
        self._stop_emptying()
        self.plan = None
        recompute.apply(self._tape, ())
        self._watch.forget()
        self._is_given = False
        self._margin_bytes = slack_bytes(self._budget_bytes)
        self._num_measured_here = 0
        del self.traces[:-2]
        self._is_waiting = not self._is_installed and stacks() != self._stacks_below
        if self._is_waiting:  # inside a context of the program's: its exit would take ours for its own
            return
        if not self._is_installed:
            self._install()
        self._tape.end_step()
        self._begin_measured_step()

    def _end_step(self) -> None:
        self._outcome.num_steps += 1
        seconds = self._outcome.seconds_so_far()
        was_measured = self._recorder is not None
        moves = self.plan.moves if self.plan is not None else ()
        self._steps.end_step()
        if self._is_installed:
            self._tape.end_step()
        if was_measured:
            self._steps.learn(moves, self._valve.num_evictions if self._valve is not None else 0)
            self._end_measured_step()
        elif self._is_installed:
            self._outcome.note_planned_step(seconds, self._tape.counts.restore_seconds)
        else:
            self._outcome.note_free_step(seconds)
        if moves and self._is_installed:
            self._outcome.num_planned += 1
            self._count_verified()
        counts = self._tape.counts
        num_moved = counts.num_evicted + counts.num_overwritten - self._num_unplanned
        if self._is_given and moves and not num_moved:
            self._optimizers.forget_leader()
            self._restart("nothing of what the plan names was there, so it was made for another program")
        elif was_measured:
            self._decide()
        elif moves and self._is_installed and (reason := self._steps.why_changed(moves)):
            self._restart(reason)
        self._outcome.begin_step(self._tape.counts.restore_seconds)

    def leave_out_step(self) -> None:
        """The program left out its optimizer's step (gradients overflowed): what comes next is this training step from its beginning."""
        if self._is_over or self._is_dead:
            return
        was_measured = self._recorder is not None
        self._steps.end_step()
        self._outcome.note_peak(self._recorder, self._outcome.num_steps + 1)
        self._stop_recorder()
        if self._is_installed:
            self._tape.end_step()
        if was_measured:
            self._begin_measured_step()
        self._outcome.begin_step()

    def _count_verified(self) -> None:
        if self._tape.verify:
            self._outcome.num_verified += 1
        self._tape.verify = self._verify == "always" or (
            self._verify != "off" and self._outcome.num_verified < int(self._verify)
        )

    def _begin_measured_step(self) -> None:
        """Record the next step: everything, exactly, under the guard where there is a budget."""
        self._on_progress(f"measuring step {self._outcome.num_steps + 1}", self._outcome.num_steps, None)
        tape = self._tape
        known = {
            "parameter": list(self._holdings.parameters()),
            "buffer": list(self._holdings.buffers()),
            "optimizer state": list(self._holdings.state()),
            "gradient": self._holdings.gradients(),
        }
        earlier = find_let_go(self.traces[-1]) if self.traces and self._num_measured_here else None
        recorder = Recorder(self._backend, lambda: tape.is_restoring, known, self.holders, earlier)
        tape.record_all = True
        self._watch.is_learning = self.plan is None or self._is_given  # a plan from a file does not say for which inputs
        if self._budget_bytes is not None and self.plan is None and self._is_training:
            fixed_bytes = self._holdings.fixed_bytes()
            self._guard = Guard(tape, recorder, self._budget_bytes, fixed_bytes, may_lower=self._precision is None)
            tape.pin_sources = True
            tape.verify = self._verify != "off"
            tape.observer = self._guard
        else:
            tape.observer = recorder.rows
            if self._budget_bytes is not None and self.plan is not None:
                self._valve = Valve(tape, recorder, self._budget_bytes)
        self._recorder = recorder
        self._outcome.begin_step()
        self._watch.begin_step()
        recorder.start()
        releases.follow(recorder.rows.note_dead)

    def _end_measured_step(self) -> None:
        assert self._recorder is not None
        self._outcome.num_measured += 1
        self._num_measured_here += 1
        trace = self._trace_so_far()
        self._recorder.stop()
        self.traces.append(trace)
        self._outcome.note_peak(self._recorder, self._outcome.num_steps)
        if self._guard is not None and self._guard.num_evictions:
            self.messages.append(
                f"step {self._outcome.num_steps}: the guard let go of {self._guard.num_evictions} saved tensors under pressure."
            )
        self._unhelped_bytes = 0
        if self._valve is not None and self._valve.num_evictions:
            self._unhelped_bytes = self._peak_as_planned(trace)
            self._num_unplanned += self._valve.num_evictions
            self.messages.append(
                f"step {self._outcome.num_steps}: the plan was not enough; {self._valve.num_evictions} more saved tensors were let go of."
            )
        if self.plan is not None and self.plan.moves:
            self._outcome.planned_peak_bytes = self._recorder.ledger.peak_bytes  # of the plan in force, beside its prediction
        self._stop_recorder()
        if self._on_trace is not None:
            self._on_trace(trace, self._outcome.num_steps)

    def unfinished_trace(self) -> Trace | None:
        """What was measured since the last step ended, as a trace; None where nothing is being measured."""
        return self._trace_so_far() if self._recorder is not None else None

    @property
    def _label(self) -> str:
        return self._precision.label if self._precision is not None else ""

    def _trace_so_far(self) -> Trace:
        assert self._recorder is not None
        return self._recorder.trace_so_far(
            {"step": self._outcome.num_steps, "signature": signature_of(self._optimizers), "precision": self._label},
            new_state=self._holdings.state(),
            gradients=self._holdings.gradients(),
        )

    def _stop_recorder(self) -> None:
        if self._recorder is not None:
            releases.watch = None  # until the next measured step
            self._recorder.stop()
            self._recorder = None
        self._guard = self._valve = None
        self._tape.observer = None
        self._tape.record_all = False
        self._tape.pin_sources = False

    def _decide(self) -> None:
        """After a measured step: plan, measure once more, or leave the program alone."""
        if self._budget_bytes is None or self._planner is None:
            self._begin_measured_step()
            return
        trace = self.traces[-1]
        measured = max(trace.meta["measured_peak_bytes"], self._unhelped_bytes)
        predicted = self.plan.predicted_peak_bytes if self.plan is not None else None
        is_steady = self._num_measured_here >= 2
        is_fragmented = self._note_fragmentation(trace, measured)
        if self._is_given and self.plan is not None and measured <= self._budget_bytes:
            if not is_steady:  # it holds; the second step has all of the state
                self._begin_measured_step()
            elif not self.plan.moves:
                self._leave()
            return
        self._is_given = False
        if is_steady and self.plan is not None and measured > min(self._budget_bytes, 1.01 * self.plan.predicted_peak_bytes):
            self._note_departure(self.plan, replay(trace).peak_bytes, measured)
        if is_steady and predicted is not None and measured <= self._budget_bytes and self._watch.was_smaller:
            self._keep_plan()  # it was made of a larger step, and the next may be as large
            return
        holds = predicted is not None and not is_fragmented and measured <= min(self._budget_bytes, 1.01 * predicted)
        if holds and self._num_measured_here >= _MEASURED_STEPS:
            return
        self._on_progress("planning", 0, None)
        before = self.plan
        try:
            plan = self._plan_for(trace, is_steady)
        except BudgetError:
            if before is not None and measured <= self._budget_bytes:  # the plan in force does what no new one promises
                return
            self._stop_recorder()
            raise
        self._apply(plan)
        if not plan.moves and is_steady:
            self._leave()
        elif not is_steady or (self._num_measured_here < _MEASURED_STEPS and (before is None or plan.moves != before.moves)):
            self._begin_measured_step()

    def _keep_plan(self) -> None:
        """Measure the next step under the plan in force, as far as steps are measured."""
        if self._num_measured_here < _MEASURED_STEPS:
            self._begin_measured_step()
        elif self.plan is not None and not self.plan.moves:
            self._leave()

    def _peak_as_planned(self, trace: Trace) -> int:
        """What the step takes with the plan in force and nothing beside: more than the budget, or no valve had been needed. (Under a plan that
        was given, before anything is known of the operations, it may have acted on an estimate that was too high.)"""
        assert self._budget_bytes is not None
        assert self.plan is not None
        least_bytes = 0 if self._is_given else self._budget_bytes + 1
        try:
            edited = edit_by_plan(trace, self.plan)
            return max(least_bytes, replay(edited, *cells_of_plan(edited, self.plan)).peak_bytes)
        except PlanError:  # the step took another way: the plan is not for it
            return self._budget_bytes + 1

    def _note_departure(self, plan: Plan, eager_bytes: int, measured_bytes: int) -> None:
        """The step under the plan took more than was predicted: say why, and keep the difference free if it was the prediction's fault."""
        grown_bytes = eager_bytes - plan.eager_peak_bytes
        if grown_bytes > eager_bytes // 100:  # another step than the one that was planned
            self.messages.append(
                f"step {self._outcome.num_steps}: {format_size(grown_bytes)} more than step {self._outcome.num_steps - 1} under plain "
                f"PyTorch; measured peak {format_size(measured_bytes)}, planned again with this step."
            )
            return
        self._margin_bytes += measured_bytes - plan.predicted_peak_bytes
        self.messages.append(
            f"step {self._outcome.num_steps}: measured peak {format_size(measured_bytes)}, predicted {format_size(plan.predicted_peak_bytes)}; "
            f"planned again with the measured step and {format_size(self._margin_bytes)} kept free."
        )

    def _note_fragmentation(self, trace: Trace, measured_bytes: int) -> bool:
        """Where the process has taken more from the card than the budget, though less was allocated: empty its cache in stages where
        that is enough, else keep the difference free from now on; the next step shows. True if so."""
        taken_bytes = self._backend.process_bytes()
        if self._budget_bytes is None or taken_bytes is None or taken_bytes <= self._budget_bytes:
            return False
        about = (
            f"step {self._outcome.num_steps}: the process took {format_size(taken_bytes)} from the card where {format_size(measured_bytes)} were "
            "allocated at most; "
        )
        if self._emptying is None and (places := plan_emptying(trace, self.plan, self._budget_bytes)):
            self._emptying = Emptying(self._backend, places)
            self._tape.on_enter = self._emptying.pass_by
            self.messages.append(f"{about}from here on its cache is emptied at {len(places)} of the step's places.")
        else:
            self._margin_bytes = max(self._margin_bytes, taken_bytes - measured_bytes)
            self.messages.append(f"{about}{format_size(self._margin_bytes)} are kept free for that.")
        self._backend.give_back()
        return True

    def _stop_emptying(self) -> None:
        if self._emptying is not None and self._emptying.num_calls:
            self.messages.append(
                f"the card's cache was emptied {self._emptying.num_calls} times, which gave back {format_size(self._emptying.given_bytes)} in all."
            )
        self._emptying = self._tape.on_enter = None

    def _plan_for(self, trace: Trace, is_steady: bool) -> Plan:
        """A plan from a measured step. After the first one, gradients are assumed to stay as long as can be planned."""
        assert self._planner is not None
        assert self._budget_bytes is not None
        traces = [trace] if is_steady else [steady(trace, gradients) for gradients in reversed(GRADIENTS)]
        for each in traces[:-1]:
            with suppress(BudgetError):
                return self._planner.plan(each, self._budget_bytes, margin_bytes=self._margin_bytes)
        return self._planner.plan(traces[-1], self._budget_bytes, margin_bytes=self._margin_bytes)

    def _check_before_first_update(self) -> None:
        """Once forward and backward of the first step are known: refuse what cannot be planned before a parameter changes."""
        if self._guard is None or self._planner is None or self._budget_bytes is None:
            return
        trace = steady(self._trace_so_far(), FREED, self._holdings.missing_state_bytes())
        self._planner.check(trace, self._budget_bytes, margin_bytes=self._margin_bytes)

    def _on_larger(self, module: torch.nn.Module, elements: int, largest: int) -> None:
        """A forward pass larger than any measured begins: the rest of this step runs under the guard, and is planned from."""
        if self._guard is not None or self._budget_bytes is None or self._planner is None or self._is_over:
            return
        if not self._is_installed and stacks() != self._stacks_below:  # inside a context whose exit would take ours for its own
            return
        self.messages.append(
            f"step {self._outcome.num_steps + 1}: inputs of {elements:,} elements, the largest measured had {largest:,}; "
            "measured under the guard and planned anew."
        )
        self._outcome.note_peak(self._recorder, self._outcome.num_steps + 1)
        self._stop_recorder()
        self._watch.leave()
        self.plan = None
        self._is_given = False
        was_installed = self._is_installed
        if not was_installed:
            self._install()
        recompute.apply(self._tape, ())
        self._tape.start_over()
        self._begin_measured_step()
        if not was_installed:
            self._tape.enter_module(module)

    def _leave(self) -> None:
        """Everything fits: take the tape off, if nobody has stacked anything upon it meanwhile.

        Where the step takes more than half of the budget, larger inputs could break it, so their size is still watched.
        """
        self._watch.is_learning = False
        if self.plan is not None and self._budget_bytes is not None and 2 * self.plan.eager_peak_bytes > self._budget_bytes:
            self._watch.stay()
        if self._emptying is None and is_on_top(self._tape, self._tape.pack_hook):
            self._uninstall()
            self._stacks_below = stacks()
        else:
            self._tape.policy = None

    def _apply(self, plan: Plan) -> None:
        self.plan = plan
        self._watch.is_learning = False
        self._outcome.ever_installed = self._outcome.ever_installed or bool(plan.moves)
        recompute.apply(self._tape, plan.moves, plan.untouched)
        inplace.apply(self._tape, plan.moves, plan.untouched)
        self._tape.verify = bool(plan.moves) and self._verify != "off"

    def _set_device(self, optimizer: torch.optim.Optimizer) -> None:
        if self._model is None:
            device = device_of(None, optimizer)
            if device.type != self._device.type:
                self._backend = backend_for(device)
            self._device = device

    # ---- what came of it ---------------------------------------------------------------------------------------------

    def result(self) -> core.Result:
        """What the run did so far, as data (see docs/result.md). Of several programs one after the other: the largest's."""
        return self._outcome.result(self._in_force(), self._about_precision())

    def _in_force(self) -> InForce:
        trace = self.traces[-1] if self.traces else None
        return InForce(trace, self.plan, self._tape.counts, self._device, self._label)

    def _about_precision(self) -> list[str]:
        if self._precision is None:
            return []
        told = self._precision.messages()
        if self.traces and self._label and self._precision.choice.level.by_lists:
            told.append(find_copies(self.traces[-1]).sentence)
        return told

    def report(self) -> str:
        """The report as text of 80 columns without colour."""
        if self._draw is None:
            raise MemfitError(
                "This session was made without a way to draw its report. Use memfit.fit, or draw `session.result()`."
            )
        return self._draw(self.result())

    def abandon(self) -> None:
        """In a forked child: have no effect any more. What lies on top of the stacks is taken off, the rest made inert."""
        self._is_dead = True
        _active.discard(self)
        recorder, self._recorder = self._recorder, None
        self._guard = None
        self._tape.observer = None
        if recorder is not None:
            recorder.stop()
        if self._is_installed and is_on_top(self._tape, self._tape.pack_hook):
            self._uninstall()
        else:
            self._tape.fall_asleep()


def _abandon_all() -> None:
    for session in list(_active):
        session.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)
