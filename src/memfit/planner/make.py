"""Trace and budget in, plan out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memfit.core.breakdown import bytes_by
from memfit.core.errors import BudgetError, PlanError
from memfit.core.inplace import edit, propose
from memfit.core.plan import Plan
from memfit.core.precision import suggest
from memfit.core.replay import Replay, Replayer
from memfit.core.sizes import format_size, slack_bytes
from memfit.core.trace import Trace
from memfit.planner.bound import lower_bound_seconds
from memfit.planner.exhaustive import solve_exhaustively
from memfit.planner.frontier import pareto, pick
from memfit.planner.moves import find_untouched, moves_of
from memfit.planner.overwriting import helps, in_place_moves, leave_out_idle, note_proposals
from memfit.planner.problem import Choice, OnProgress, Problem
from memfit.planner.sweep import find_low_choices, solve_sweep

Solver = Callable[[Problem, OnProgress | None], list[Choice]]
"""A solver returns the choices it looked at, for no budget in particular; the frontier of them serves every budget."""

SOLVERS: dict[str, Solver] = {"sweep": solve_sweep, "exhaustive": solve_exhaustively}


@dataclass(frozen=True)
class Frontier:
    """The choices worth having for one trace, by rising peak; made by `find_frontier`, read by `plan`."""

    problem: Problem
    choices: tuple[Choice, ...]
    solver: str

    @property
    def floor_bytes(self) -> int:
        """The smallest budget that can be served."""
        return self.choices[0].peak_bytes


def find_frontier(trace: Trace, solver: str | Solver = "sweep", progress: OnProgress | None = None) -> Frontier:
    """Everything the solver has to offer for the trace. Nearly all the time planning takes is spent here.

    solver: a key of SOLVERS, or a function like them. Raises PlanError for an unknown key.
    """
    if isinstance(solver, str) and solver not in SOLVERS:
        raise PlanError(f"{solver!r} is no solver. Known are {', '.join(SOLVERS)}.")
    solve = SOLVERS[solver] if isinstance(solver, str) else solver
    problem = Problem(trace)
    nothing = problem.evaluate(frozenset(), frozenset())
    choices = pareto([nothing, *solve(problem, progress)])
    name = solver if isinstance(solver, str) else getattr(solver, "__name__", "custom")
    return Frontier(problem, tuple(choices), name)


def plan(
    trace: Trace,
    budget_bytes: int,
    *,
    margin_bytes: int = 0,
    solver: str | Solver = "sweep",
    progress: OnProgress | None = None,
    frontier: Frontier | None = None,
) -> Plan:
    """The quickest plan found whose predicted peak leaves `margin_bytes` of the budget free; no moves where the step fits as it is.

    Where the step fits that is found out quickly, and floor_bytes is then a budget that can be served, if not the
    smallest. For several budgets of one trace, pass the `frontier` of `find_frontier`, of which calls in place are no part. A
    larger budget never gives a slower plan. Raises BudgetError with `needed_bytes` if nothing fits.
    """
    room_bytes = budget_bytes - margin_bytes
    fitting = frontier or _frontier_if_it_fits(trace, room_bytes)
    ways = [Way(fitting)] if fitting is not None else _find_ways(trace, room_bytes, solver, progress)
    found = [(choice.seconds, len(way.calls), number) for number, way in enumerate(ways) if (choice := way.pick(room_bytes))]
    if not found:
        lowest = min(ways, key=lambda way: way.frontier.floor_bytes)
        raise _too_small(lowest.frontier.problem.trace, lowest.frontier, budget_bytes, margin_bytes)
    way = ways[min(found)[2]]
    choice = way.pick(room_bytes)
    assert choice is not None
    calls = leave_out_idle(trace, way.calls, choice, room_bytes)
    edited = edit(trace, calls) if calls else trace
    problem = way.frontier.problem
    result = Replayer(edited).run(*choice.cells)
    assert result.peak_bytes <= room_bytes
    eager = Replayer(trace).run() if calls else problem.eager
    moves = (*in_place_moves(trace, calls), *moves_of(edited, result, choice))
    note = None if calls or not choice.evict else note_proposals(trace)
    return Plan(
        budget_bytes=budget_bytes,
        eager_peak_bytes=eager.peak_bytes,
        predicted_peak_bytes=result.peak_bytes,
        floor_bytes=_with_margin(min(way.frontier.floor_bytes for way in ways), margin_bytes),
        moves=moves,
        extra_seconds=result.extra_seconds,
        lower_bound_seconds=min(*(lower_bound_seconds(way.frontier.problem, room_bytes) for way in ways), result.extra_seconds),
        eager_seconds=trace.step_seconds,
        peak_phase=eager.peak_phase,
        device=trace.device,
        solver=way.frontier.solver,
        signature=str(trace.meta.get("signature", "")),
        notes=(*_notes(edited, problem, result, way.frontier), *([note] if note else [])),
        untouched=find_untouched(trace, moves),
        precision=str(trace.meta.get("precision", "")),
    )


@dataclass(frozen=True)
class Way:
    """The choices with some calls in place: `frontier` is of the step so edited."""

    frontier: Frontier
    calls: tuple[int, ...] = ()

    def pick(self, room_bytes: int) -> Choice | None:
        return pick(list(self.frontier.choices), room_bytes)


def _find_ways(trace: Trace, room_bytes: int, solver: str | Solver, progress: OnProgress | None) -> list[Way]:
    """The step as it is, and with all in place that may be. A call in place costs no time, but what it overwrites can be kept for no
    recipe. So both are planned, unless one alone is clearly best, whatever the budget."""
    calls = tuple(propose(trace))
    edited = edit(trace, calls) if calls else trace
    if calls and (fitting := _frontier_if_it_fits(edited, room_bytes)):
        return [Way(fitting, calls)]
    plain = find_frontier(trace, solver, progress)
    if not calls or not helps(edited, plain.choices):
        return [Way(plain)]
    return [Way(plain), Way(find_frontier(edited, solver, progress), calls)]


def check(trace: Trace, budget_bytes: int, *, margin_bytes: int = 0) -> None:
    """Raise the BudgetError that `plan` would raise. Quick unless the budget is close to the smallest that can be served."""
    problem = Problem(trace)
    room_bytes = budget_bytes - margin_bytes
    if problem.eager.peak_bytes > room_bytes and pareto(find_low_choices(problem))[0].peak_bytes > room_bytes:
        plan(trace, budget_bytes, margin_bytes=margin_bytes)


def _frontier_if_it_fits(trace: Trace, budget_bytes: int) -> Frontier | None:
    problem = Problem(trace)
    if problem.eager.peak_bytes > budget_bytes:
        return None
    nothing = problem.evaluate(frozenset(), frozenset())
    return Frontier(problem, tuple(pareto([nothing, *find_low_choices(problem)])), "none needed")


def _notes(trace: Trace, problem: Problem, result: Replay, frontier: Frontier) -> tuple[str, ...]:
    eager = problem.eager
    notes = []
    if eager.peak_phase == "optimizer step":
        notes.append(
            f"The peak of the step as it is ({format_size(eager.peak_bytes)}) is in the optimizer step, where no "
            "activation is alive: recomputing saves nothing there. An optimizer built with foreach=False, or "
            "fused=True, needs less."
        )
    elif result.peak_phase == "optimizer step":
        notes.append("The peak is now in the optimizer step: less memory for activations would save nothing more.")
    persistent = sum(storage.nbytes for storage in trace.storages if storage.persistent)
    if frontier.floor_bytes == eager.peak_bytes and eager.peak_phase != "optimizer step":
        notes.append(f"Nothing that autograd saved lowers the peak; {format_size(persistent)} of it outlive the step.")
    return tuple(notes)


def _with_margin(peak_bytes: int, margin_bytes: int) -> int:
    """The budget for a peak; the margin may have been a share of a smaller budget (core.sizes.slack_bytes)."""
    return peak_bytes + (max(margin_bytes, slack_bytes(1001 * peak_bytes // 1000 + 1)) if margin_bytes else 0)


def _too_small(trace: Trace, frontier: Frontier, budget_bytes: int, margin_bytes: int) -> BudgetError:
    floor = frontier.choices[0]
    result = frontier.problem.replayer.run(*floor.cells)
    needed_bytes = _with_margin(floor.peak_bytes, margin_bytes)
    kinds = {kind: size for kind, size in bytes_by(trace, result, "kind").items() if size}
    held = ", ".join(f"{kind} {format_size(size)}" for kind, size in list(kinds.items())[:5])
    lasting = [storage for storage in trace.storages if storage.persistent]
    persistent = sum(storage.nbytes for storage in lasting)
    message = (
        f"{format_size(budget_bytes)} is too small. The best plan found needs {format_size(needed_bytes)} "
        f"({needed_bytes} bytes): at its peak, in the {result.peak_phase} phase, memory holds {held}. "
    )
    if persistent >= budget_bytes:
        lasting_kinds = {storage.kind for storage in lasting}
        names = " and ".join(sorted(lasting_kinds, key=lambda kind: (-kinds.get(kind, 0), kind)))
        message += (
            f"{names[:1].upper()}{names[1:]} alone outlive the step with {format_size(persistent)}: only a smaller "
            "model or a smaller optimizer state could fit. "
        )
    elif result.peak_phase == "optimizer step":
        message += "There recomputing saves nothing; an optimizer built with foreach=False has smaller temporaries. "
    else:
        message += "A smaller batch or shorter sequences make activations, inputs and temporaries smaller. "
    lower = "" if trace.meta.get("precision") else suggest(kinds, needed_bytes, budget_bytes)
    message += f"Or try a budget of {needed_bytes} bytes."
    return BudgetError(f"{message} {lower}".rstrip(), needed_bytes=needed_bytes, may_lower=bool(lower))
