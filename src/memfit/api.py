"""The verbs. Each composes the folders in a few lines that a reader can copy."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from memfit.core.errors import BudgetError, MemfitError, PlanError, TraceError
from memfit.core.finding import Finding
from memfit.core.generators import unmoved
from memfit.core.plan import APPROXIMATE, BITWISE, EXACTNESS, Plan, precision_for
from memfit.core.precision import Choice, choose, read_precision
from memfit.core.proof import Proof
from memfit.core.sizes import format_size, parse_size, slack_bytes
from memfit.core.trace import Trace
from memfit.core.verify import check_verify

if TYPE_CHECKING:
    import torch

    from memfit.core.growth import GrowthReport
    from memfit.diagnosis.values import ValueLog
    from memfit.diagnosis.watch import GrowthWatch
    from memfit.runtime.script import ScriptRun, TraceRun
    from memfit.runtime.session import OnProgress, Session

T = TypeVar("T")
Made = TypeVar("Made", Plan, Trace)

_MARGIN = 0.06  # of a card's free bytes: context growth, library workspaces, fragmentation


def fit(
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    budget: str | int | None = None,
    *,
    allow: str = BITWISE,
    precision: str | None = None,
    half: str | None = None,
    plan: Plan | str | Path | None = None,
    verify: str | int = "3",
    on_progress: OnProgress | None = None,
) -> Session:
    """A context manager that holds the training loop inside it to `budget` bytes, with bitwise the same results.

    model, optimizer: what is trained; both may be left out, but with them a hopeless budget is refused before the first step.
    budget: the peak of the whole step, as bytes or text ('3 GiB'). Default: the plan's; without a plan, on CUDA what the card has free, less a
    margin, and with a precision, on CPU, all of the machine's memory.
    allow: 'bitwise', 'reordered' or 'approximate': how far results may differ from plain PyTorch.
    precision, half: an opt level, 'O0' to 'O3', and 'bf16' or 'fp16' (default: what torch.autocast takes), as `memfit run --precision`; asking
    for it allows 'approximate'. The results are then those of plain torch.autocast and GradScaler.
    plan: a plan made before (memfit.plan), or the path of its file; without one the first steps are measured under a guard. One made for a precision trains in it.
    verify: in how many planned steps restored tensors are compared with what was evicted; 'always' or 'off'.
    on_progress: told what goes on, see report.progress.OnProgress.

    Raises BudgetError where the budget cannot be met, PlanError for a plan that needs more than the budget or is for another model,
    PrecisionError for an unknown level and for weights it cannot take, UnsupportedError for a model on several devices or DataParallel,
    MemfitError for an unknown `allow` or `verify`.
    """
    choice = read_precision(precision, half, "half=", "precision='O1'")
    given = None if plan is None else _loaded(plan, Plan)
    return _make_session(model, optimizer, budget, allow, choice, given, verify, on_progress)


def _loaded(given: Any, kind: type[Made]) -> Made:
    """The plan or trace; from its file, if it is a path."""
    if isinstance(given, (str, os.PathLike)):
        return kind.load(Path(given))
    if not isinstance(given, kind):
        raise MemfitError(f"{given!r} is no {kind.__name__}. Give the {kind.__name__} itself, or the path of its file.")
    return given


@unmoved()
def _make_session(
    model: torch.nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
    budget: str | int | None,
    allow: str,
    precision: Choice | None,
    plan: Plan | None,
    verify: str | int,
    on_progress: OnProgress | None,
) -> Session:
    import memfit
    from memfit import planner
    from memfit.report import draw_result, draw_text
    from memfit.runtime.session import Session

    check_verify(verify)
    if allow not in EXACTNESS:
        raise MemfitError(f"allow={allow!r} is no exactness. Give one of {', '.join(map(repr, EXACTNESS))}.")
    _check_given(model, optimizer)
    precision = precision_for(plan, precision, allow)
    if budget is not None:
        budget_bytes, source = parse_size(budget), "given"
    elif plan is not None:
        budget_bytes, source = plan.budget_bytes, "the plan's"
    elif precision is not None and not _has_cuda():
        budget_bytes, source = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "this machine's memory"
    else:
        budget_bytes, source = default_budget(), f"free on the card less {_MARGIN:.0%}"
    if plan is not None and plan.predicted_peak_bytes > budget_bytes:
        raise PlanError(
            f"The plan peaks at {format_size(plan.predicted_peak_bytes)}, more than the budget of {format_size(budget_bytes)}: it was "
            f"made for {format_size(plan.budget_bytes)}. Make one for this budget with `memfit plan`, or leave the plan out."
        )
    session = Session(
        budget_bytes,
        planner,
        model=model,
        optimizer=optimizer,
        plan=plan,
        verify=str(verify),
        precision=precision,
        on_progress=on_progress,
        draw=lambda result: draw_text(draw_result(result)),
        facts={
            "allow": allow if precision is None else APPROXIMATE,
            "budget_source": source,
            "versions": {"memfit": memfit.__version__},
        },
    )
    if plan is not None and plan.budget_bytes < 0.95 * budget_bytes:
        session.messages.append(
            f"the plan was made for {format_size(plan.budget_bytes)}; one for {format_size(budget_bytes)} may take less time (`memfit plan`)."
        )
    return session


def _check_given(model: object, optimizer: object) -> None:
    import torch

    for given, kind, name in ((model, torch.nn.Module, "model"), (optimizer, torch.optim.Optimizer, "optimizer")):
        if given is not None and not isinstance(given, kind):
            raise MemfitError(
                f"The {name} is a {type(given).__name__}, no torch {kind.__name__}. Give the {kind.__name__} itself; where there are several, leave it "
                "out: memfit finds them."
            )


def default_budget() -> int:
    """Bytes the CUDA card has free for this process, less a margin. Raises BudgetError on CPU: there one must be given."""
    import torch

    from memfit.measurement.backends import backend_for

    if not torch.cuda.is_available():
        raise BudgetError(
            "No budget was given and there is no CUDA device to ask. Give one: budget='3 GiB', or `memfit run --budget 3GiB SCRIPT` (before the "
            "script: what comes after it is its own)."
        )
    free_bytes = backend_for(torch.device("cuda")).free_bytes()
    assert free_bytes is not None
    return int(free_bytes * (1 - _MARGIN))


def trace(train_step: Callable[[], Any], num_steps: int = 2, *, precision: str | None = None, half: str | None = None) -> Trace:
    """The Trace of the last of `num_steps` calls of `train_step` (forward, backward, optimizer.step), nothing changed.

    precision, half: measure it at an opt level, as `fit` would train in it.
    Raises TraceError if no optimizer step happened in it, PrecisionError as `fit`.
    """
    with unmoved():
        from memfit.runtime.session import Session

    if num_steps < 1:
        raise MemfitError(
            f"num_steps={num_steps} is no number of steps to run. Give 1 or more; 2 is the first step with all of the optimizer's state."
        )
    with Session(None, None, precision=read_precision(precision, half, "half=", "precision='O1'")) as session:
        for _ in range(num_steps):
            train_step()
    if not session.traces:
        raise TraceError(
            "train_step ran without an optimizer step, so there is no step to trace. It must call optimizer.step()."
        )
    return session.traces[-1]


@unmoved()
def plan(
    trace: Trace | str | Path,
    budget: str | int,
    on_progress: OnProgress | None = None,
    *,
    lower: Trace | str | Path | None = None,
) -> Plan:
    """The cheapest plan found that holds the traced step to `budget`. A trace may be given as the path of its file.

    lower: a trace of the same step in lower precision (`trace(step, precision='O1')`), which the plan is made of where `trace` cannot be held to
    the budget; Plan.precision and its first note then say so. Giving it allows it.
    Raises BudgetError (with needed_bytes) if there is no plan, TraceError if `lower` was not measured in lower precision.
    """
    from memfit import planner

    trace = _loaded(trace, Trace)
    lower = None if lower is None else _loaded(lower, Trace)
    budget_bytes = parse_size(budget)
    margin_bytes = slack_bytes(budget_bytes)
    if lower is not None and not lower.meta.get("precision"):
        raise TraceError(
            "The trace for lower precision was measured in the program's own. Take it with `memfit trace --precision O1`, or memfit.trace(step, "
            "precision='O1')."
        )
    try:
        return planner.plan(trace, budget_bytes, margin_bytes=margin_bytes, progress=on_progress)
    except BudgetError as error:
        if lower is None:
            raise
        needed = format_size(error.needed_bytes or 0)
    found = planner.plan(lower, budget_bytes, margin_bytes=margin_bytes, progress=on_progress)
    note = f"Trains in {found.precision}, which changes results: in the program's own precision the best plan found needs {needed}."
    return replace(found, notes=(note, *found.notes))


def trace_script(path: str, args: list[str], on_progress: OnProgress | None = None, precision: Choice | None = None) -> Trace:
    """The Trace of a script's second training step, in this precision; the script is stopped there. Raises TraceError if it never trains."""
    return trace_run(path, args, on_progress, precision).whole()


def trace_run(path: str, args: list[str], on_progress: OnProgress | None = None, precision: Choice | None = None) -> TraceRun:
    """As `trace_script`, raising nothing that ends the script: what there is of one that ended before, and what ended it."""
    from memfit.integrations import apex
    from memfit.runtime.script import trace_run

    with apex.standing_in():
        return trace_run(path, args, on_progress, precision)


def find_measured(path: str, args: list[str]) -> list[Finding]:
    """Measured findings: what the script holds at its peak although nobody reads it any more, and collections that free nothing.

    Of its second training step; of what ran, where it ended before that (it may be no training script, or raise).
    """
    from memfit.runtime.script import trace_run

    trace = trace_run(path, args).trace
    return findings_of(trace) if trace is not None else []


@unmoved()
def findings_of(trace: Trace) -> list[Finding]:
    """The findings that a trace shows, most bytes first."""
    from memfit.diagnosis.collecting import find_idle_calls
    from memfit.diagnosis.dead import find_dead
    from memfit.diagnosis.held import find_held

    return [*find_dead(trace), *find_held(trace), *find_idle_calls(trace)]


def run_script(
    path: str,
    args: list[str],
    *,
    budget: int | None = None,
    allow: str = BITWISE,
    plan: Plan | None = None,
    verify: str = "3",
    release: bool = True,
    precision: Choice | None = None,
    on_progress: OnProgress | None = None,
) -> ScriptRun:
    """Run a script as `python path args…` would, its training held to the budget.

    release: let go of the script's names where it has read them for the last time, as a `del` there would (techniques.release).
    precision: the opt level to train in (core.precision.choose), which is `allow`ed by asking for it; on CPU the budget may then be left out: all
    of the machine's memory.

    With allow='approximate' and neither precision nor plan, a script whose first step cannot be held to the budget, and might be in O1, is started
    over in O1: from its first line, the generators as they were, with what it wrote and printed up to there written and printed again.

    Raises as `fit` does for what is wrong before the script begins; all that comes later is in the ScriptRun.
    """
    from memfit.integrations import apex
    from memfit.runtime.again import StartingPoint
    from memfit.runtime.script import run_script

    def run(choice: Choice | None) -> ScriptRun:
        session = _make_session(None, None, budget, allow, choice, plan, verify, on_progress)
        with apex.standing_in() as messages:
            ran = run_script(path, args, session, release=release)
        findings = tuple(findings_of(session.traces[-1])) if session.traces else ()
        return replace(ran, result=replace(ran.result, findings=findings, messages=(*messages, *ran.result.messages)))

    start = StartingPoint(path)
    ran = run(precision)
    if allow != APPROXIMATE or precision is not None or plan is not None or not ran.may_lower:
        return ran
    assert isinstance(ran.error, BudgetError)
    why = (
        f"in the program's own precision its first step needs {format_size(ran.error.needed_bytes or 0)} at least, so it was started over in O1, which "
        "--allow approximate allows; what it printed and wrote up to there came twice."
    )
    del ran  # its traceback holds the tensors of the first try
    start.go_back()
    again = run(choose("O1"))
    return replace(again, result=replace(again.result, messages=(why, *again.result.messages)))


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@unmoved()
def watch_growth(items: Iterable[T] = (), *, budget: str | int | None = None, max_steps: int | None = None) -> GrowthWatch[T]:
    """Says what grows from step to step: `for batch in (watch := watch_growth(loader)):`, or a `with` around any loop.

    Afterwards `print(watch)` has the report in words and `watch.report` as data. budget: bytes or text, to say in how many steps
    they are full; default on CUDA: what the card has free. max_steps: watch no longer than that.
    Raises UnsupportedError where another watch is on.
    """
    import torch

    from memfit.diagnosis.watch import GrowthWatch
    from memfit.report import draw_growth, draw_text

    budget_bytes = parse_size(budget) if budget is not None else default_budget() if torch.cuda.is_available() else None
    return GrowthWatch(
        items, budget_bytes=budget_bytes, max_steps=max_steps, draw=lambda report: draw_text(draw_growth(report))
    )


def watch_script(
    path: str,
    args: list[str],
    *,
    budget: int | None = None,
    max_steps: int | None = None,
    texts: Mapping[str, str] | None = None,
    values: ValueLog | None = None,
) -> tuple[GrowthReport, int, BaseException | None]:
    """Run a script under a growth watch: what grew, the script's exit code, and what ended it.

    max_steps: stop the script after so many steps (its `finally` blocks run; the exit code is then 0).
    texts: by absolute path, what is run in place of a file's own text. values: filled, for `prove_growth`.
    """
    from memfit.runtime.script import execute, exit_code_of

    class Enough(BaseException):
        """Not an Exception: a script's `except Exception` must not swallow it."""

    def stop() -> None:
        raise Enough

    watch: GrowthWatch[Any] = watch_growth(budget=budget, max_steps=max_steps)
    watch.on_enough = stop
    watch.values = values
    error: BaseException | None = None
    with watch:
        try:
            execute(path, args, watch.look_now, texts)
        except Enough:
            pass
        except BaseException as caught:
            error = caught
    return replace(watch.report, program=path), exit_code_of(error), error


def prove_growth(
    path: str,
    args: list[str],
    report: GrowthReport,
    values: ValueLog,
    error: BaseException | None,
    max_steps: int | None = None,
) -> Proof:
    """Mend in a copy what the report says grows, run the script again from the copy, and compare (`diagnosis.proving`).

    report, values, error: of `watch_script` with this script. The copy is text alone: it runs in a process of its own under the script's
    name and directory, so imports and relative files are the same; what it prints is thrown away. No file is changed, except by the
    script itself.
    """
    from memfit.core.growth_file import from_document
    from memfit.diagnosis.proving import Ran, prove
    from memfit.runtime.afresh import call_afresh

    def run(texts: Mapping[str, str]) -> Ran:
        task = {"path": path, "args": args, "max_steps": max_steps, "texts": dict(texts)}
        ran, problem = call_afresh("memfit.api:watch_copy", task)
        if ran is None:
            return Ran(None, problem=problem)
        return Ran(
            from_document(ran["report"]), tuple(ran["outputs"]), tuple(ran["gradients"]), ran["exception"], ran["exit_code"]
        )

    return prove(Ran(report, tuple(values.outputs), tuple(values.gradients), _exception_name(error)), run)


def watch_copy(task: dict[str, Any]) -> dict[str, Any]:
    """In a process of `prove_growth`: run the copy; its report and values."""
    from memfit.core.growth_file import to_document
    from memfit.diagnosis.values import ValueLog

    values = ValueLog()
    report, exit_code, error = watch_script(**task, values=values)
    return {
        "report": to_document(report),
        "outputs": values.outputs,
        "gradients": values.gradients,
        "exception": _exception_name(error),
        "exit_code": exit_code,
    }


def _exception_name(error: BaseException | None) -> str:
    return "" if error is None or isinstance(error, SystemExit) else type(error).__name__
