"""The report of a plan: what would be done, what it would cost and why, and what stands in the way of less."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from memfit.core.plan import Plan
from memfit.core.sizes import format_size
from memfit.report.drawing import (
    BAD,
    GOOD,
    HEAD,
    MAX_MOVES,
    Bar,
    draw_facts,
    draw_heading,
    draw_moves,
    draw_table,
    format_count,
    format_percent,
    format_seconds,
)


def draw_plan(plan: Plan, *, max_moves: int | None = MAX_MOVES) -> RenderableType:
    """The whole report of a plan. `max_moves` limits the rows of the moves; None shows all."""
    parts: list[RenderableType] = [_headline(plan), Text(), _peaks(plan), Text(), draw_facts(_facts(plan))]
    if plan.moves:
        heading = f"{format_count(len(plan.moves), 'move')}, in forward order"
        parts += [Text(), draw_heading(heading), draw_moves(plan.moves, reasons=True, max_moves=max_moves)]
    return Group(*parts)


def _headline(plan: Plan) -> Text:
    line = Text("memfit plan: ", style=HEAD)
    budget = format_size(plan.budget_bytes)
    if plan.predicted_peak_bytes > plan.budget_bytes:
        over = format_size(plan.predicted_peak_bytes - plan.budget_bytes)
        return line.append(f"{over} over the budget of {budget}", style=BAD)
    if not plan.moves:
        return line.append(f"the step fits into {budget} as it is; nothing to do", style=GOOD)
    time = f", {1 + plan.extra_seconds / plan.eager_seconds:.2f}x the time" if plan.eager_seconds else ""
    return line.append(f"{format_count(len(plan.moves), 'move')} to fit into {budget}{time}", style=GOOD)


def _peaks(plan: Plan) -> RenderableType:
    whole = max(plan.budget_bytes, plan.eager_peak_bytes, plan.predicted_peak_bytes, plan.floor_bytes)

    def row(label: str, num_bytes: int, style: str, note: str) -> tuple[str | Bar, ...]:
        return (label, Bar(num_bytes, whole, 28, style), format_size(num_bytes), note)

    eager_time = f"{format_seconds(plan.eager_seconds)} a step" if plan.eager_seconds else ""
    time = f"{format_seconds(plan.eager_seconds + plan.extra_seconds)} a step" if plan.eager_seconds else ""
    rows = [row("before", plan.eager_peak_bytes, "yellow", eager_time)]
    if plan.moves:
        rows.append(row("planned", plan.predicted_peak_bytes, GOOD, time))
    rows.append(row("budget", plan.budget_bytes, "blue", ""))
    rows.append(row("floor", plan.floor_bytes, "blue", "smallest feasible budget"))
    return draw_table(("<", "<", "", "<"), rows, wide=3)


def _facts(plan: Plan) -> list[tuple[str, str | Text]]:
    facts: list[tuple[str, str | Text]] = []
    if plan.peak_phase:
        facts.append(("Peak", f"in {plan.peak_phase}, as the program is"))
    if plan.moves:
        used = format_percent(plan.predicted_peak_bytes, plan.budget_bytes)
        facts.append(("Prediction", f"{format_size(plan.predicted_peak_bytes)}, {used} of the budget"))
        cost = f"{format_seconds(plan.extra_seconds)} a step"
        if plan.eager_seconds:
            cost += f", {format_percent(plan.extra_seconds, plan.eager_seconds)} of the step"
        bound = format_seconds(plan.lower_bound_seconds)
        facts.append(("Cost", f"{cost}; no plan of this kind costs less than {bound}"))
    facts += [("Note" if index == 0 else "", note) for index, note in enumerate(plan.notes)]
    made = ", ".join(part for part in (plan.solver and f"solver {plan.solver}", plan.device, plan.precision) if part)
    facts.append(("Made by", made))
    return facts
