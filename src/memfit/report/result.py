"""The report of a run: did it hold, before and after, where the peak was, what was done, predicted, proved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from memfit.core.result import (
    BUDGET,
    DIFFERENT,
    EQUAL,
    EXCEPTION,
    EXIT_REASONS,
    EXITED,
    FINISHED,
    INTERRUPTED,
    OUT_OF_MEMORY,
    UNTOUCHED,
    Certificate,
    Result,
)
from memfit.core.sizes import format_size
from memfit.core.trace import KINDS
from memfit.report.drawing import (
    BAD,
    GOOD,
    HEAD,
    MAX_MOVES,
    QUIET,
    Bar,
    draw_facts,
    draw_finding,
    draw_heading,
    draw_moves,
    draw_table,
    format_count,
    format_percent,
    format_seconds,
)

_MAX_NAMES = 5  # of variables let go
_ENDINGS = {
    FINISHED: "",
    EXITED: "the script ended itself with exit code {code}",
    EXCEPTION: "the script ended with an exception it did not catch",
    INTERRUPTED: "interrupted (Ctrl-C)",
    BUDGET: "stopped by memfit: the budget cannot be met",
    OUT_OF_MEMORY: "the device ran out of memory all the same",
}
assert set(_ENDINGS) == set(EXIT_REASONS)


def draw_result(result: Result, *, max_moves: int | None = MAX_MOVES) -> RenderableType:
    """The whole report of a run. `max_moves` limits the rows of the moves; None shows all."""
    parts: list[RenderableType] = [_headline(result), Text()]
    if result.peak_bytes is not None or result.eager_peak_bytes is not None:
        parts += [_before_and_after(result), Text()]
    parts.append(draw_facts(_facts(result)))
    if result.eager_bytes_by_kind or result.bytes_by_kind:
        parts += [Text(), draw_heading("At the peak"), _kinds(result)]
    if result.moves:
        heading = f"{format_count(len(result.moves), 'move')}, in forward order"
        parts += [Text(), draw_heading(heading), draw_moves(result.moves, reasons=False, max_moves=max_moves)]
    if result.findings:
        parts += [Text(), draw_heading("Seen in the measured steps"), draw_facts(map(draw_finding, result.findings))]
    return Group(*parts)


def _headline(result: Result) -> Text:
    program = result.program or "the run"
    budget = format_size(result.budget_bytes or 0)
    line = Text("memfit: ", style=HEAD)
    if result.exit_reason == BUDGET:
        when = f"stopped in step {result.num_steps + 1}" if result.num_steps else "stopped before its first step ended"
        return line.append(f"{program} was {when}: {budget} is too small", style=BAD)
    if result.num_steps == 0 and result.peak_bytes is None:
        return line.append(f"{program} made no training step, so nothing was measured", style=BAD)
    if result.peak_bytes is None:
        return line.append(f"{program} ran, its peak was not measured")
    if result.within_budget is None:
        return line.append(f"{program} was measured without a budget")
    if not result.within_budget:
        over = format_size(result.peak_bytes - (result.budget_bytes or 0))
        return line.append(f"{program} went {over} over the budget of {budget}", style=BAD)
    if not result.installed:
        if result.precision:
            how = f"in {result.precision}; nothing more was changed"
        else:
            how = "with dead variables let go" if result.let_go else "as it is; nothing was changed"
        return line.append(f"{program} fits into {budget} {how}", style=GOOD)
    line.append(f"{program} stayed within {budget}", style=GOOD)
    if result.num_measured_steps < result.num_steps:  # claim no more than was read
        line.append(f" in the {result.num_measured_steps} of {result.num_steps} steps that were measured")
    return line


def _before_and_after(result: Result) -> RenderableType:
    whole = max(result.budget_bytes or 0, result.peak_bytes or 0, result.eager_peak_bytes or 0)
    rows: list[tuple[str | Text | Bar, ...]] = []

    def add(label: str, num_bytes: int | None, style: str, note: str) -> None:
        if num_bytes is not None:
            rows.append((label, Bar(num_bytes, whole, 28, style), format_size(num_bytes), note))

    eager_time = (
        f"{format_seconds(result.eager_step_seconds)} a step (estimate)" if result.eager_step_seconds is not None else ""
    )
    time = f"{format_seconds(result.step_seconds)} a step" if result.step_seconds is not None else ""
    if result.time_ratio is not None and result.installed:
        time += f", {result.time_ratio:.2f}x"
    if result.installed or result.peak_bytes is None:
        add("before", result.eager_peak_bytes, "yellow", eager_time)
        add("after", result.peak_bytes, GOOD if result.within_budget else BAD, time)
    else:
        add("peak", result.peak_bytes, GOOD if result.within_budget else BAD, time)
    add("budget", result.budget_bytes or None, "blue", "" if result.budget_source == "given" else result.budget_source)
    return draw_table(("<", "<", "", "<"), rows, wide=3)


def _facts(result: Result) -> list[tuple[str, str | Text]]:
    facts: list[tuple[str, str | Text]] = []
    if result.peak_bytes is not None:
        facts.append(("Peak", _peak(result)))
    if result.predicted_peak_bytes is not None:
        facts.append(("Prediction", _prediction(result)))
    if result.num_steps or result.certificate.verdict != UNTOUCHED:
        facts.append(("Equal", _certificate(result.certificate, result.installed)))
    if result.certificate.mismatched_places:
        places = ", ".join(result.certificate.mismatched_places)
        facts.append(("Differed", Text(f"{places}; the run was stopped", style=BAD)))
    facts.append(("Steps", _steps(result)))
    if result.let_go:
        facts.append(("Let go", _let_go(result.let_go)))
    facts += [("Note" if index == 0 else "", message) for index, message in enumerate(result.messages)]
    if ending := _ENDINGS.get(result.exit_reason, result.exit_reason):
        text = Text(ending.format(code=result.exit_code), style=BAD)
        facts.append(("Ended", text.append(f": {result.error}" if result.error else "", style="not bold")))
    return facts


def _let_go(names: Mapping[str, int]) -> str:
    shown = ", ".join(f"{name} {format_size(num_bytes)}" for name, num_bytes in [*names.items()][:_MAX_NAMES])
    rest = f", and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"{shown}{rest}; each step, after their last use"


def _peak(result: Result) -> str:
    where = f"in {result.peak_phase}" if result.peak_phase else "phase not known"
    step = f" (step {result.peak_step})" if result.peak_step is not None else ""
    share = f", {format_percent(result.peak_bytes or 0, result.budget_bytes)} of the budget" if result.budget_bytes else ""
    source = f"; read from {result.peak_source}" if result.peak_source else ""
    return f"{where}{step}{share}{source}"


def _prediction(result: Result) -> str:
    text = f"peak {format_size(result.predicted_peak_bytes or 0)}"
    if result.prediction_ratio is None:
        text += ", no planned step was measured"
    else:
        text += f", measured {format_size(result.planned_peak_bytes or 0)}, {_apart(result.prediction_ratio)}"
    if result.predicted_step_seconds is not None:
        text += f"; {format_seconds(result.predicted_step_seconds)} a step"
        if result.step_seconds is not None:
            text += f", measured {format_seconds(result.step_seconds)}"
    return text


def _apart(ratio: float) -> str:
    percent = 100 * (ratio - 1)
    return "equal" if abs(percent) < 0.005 else f"{abs(percent):.2f} % {'higher' if percent > 0 else 'lower'}"


def _certificate(certificate: Certificate, installed: bool) -> Text:
    """One line: how many left and came back, whether all were equal, sources, generators."""
    if not installed and certificate.verdict == UNTOUCHED:
        return Text("plain PyTorch ran, nothing to compare", style=QUIET)
    counts = f"{certificate.num_evicted} evicted, {certificate.num_restored} restored"
    if certificate.num_verified:
        counts += f", {certificate.num_verified} verified in {format_count(certificate.verified_steps, 'step')}"
        counts += f", {certificate.num_mismatched} differed" if certificate.num_mismatched else ""
    checks = []
    if certificate.sources_equal is not None:
        equal = "unchanged" if certificate.sources_equal else "CHANGED"
        checks.append(f"{format_count(certificate.num_sources_checked, 'source')} {equal}")
    if certificate.generators_equal is not None:
        checks.append(f"generators {'equal' if certificate.generators_equal else 'DIFFER'}")
    rest = "".join(f"; {check}" for check in checks)
    verdict = certificate.verdict
    if verdict == EQUAL:
        return Text("yes, bit for bit", style=GOOD).append(f": {counts}{rest}", style="default")
    if verdict == DIFFERENT:
        return Text("NO", style=BAD).append(f": {counts}{rest}", style="not bold default")
    if verdict == UNTOUCHED:
        return Text(f"nothing was evicted, nothing to compare{rest}")
    return Text(f"not checked: {counts}{rest}")


def _steps(result: Result) -> str:
    text = format_count(result.num_steps, "step")
    parts = []
    if result.num_measured_steps:
        parts.append(f"{result.num_measured_steps} measured")
    if result.num_planned_steps:
        parts.append(f"{result.num_planned_steps} under the plan")
    text += f": {', '.join(parts)}" if parts else ""
    precision = f", {result.precision}" if result.precision else ""
    return f"{text}; {result.device}, {result.allow}{precision}" + "".join(
        f", {name} {result.versions[name]}" for name in ("torch", "memfit") if name in result.versions
    )


def _kinds(result: Result) -> RenderableType:
    """Bytes by kind at the peak, before and after; a kind that neither holds is left out."""
    before, after = result.eager_bytes_by_kind, result.bytes_by_kind
    kinds = [*KINDS, *sorted((set(before) | set(after)) - set(KINDS))]
    kinds = [kind for kind in kinds if before.get(kind) or after.get(kind)]
    whole = max([*before.values(), *after.values(), 1])
    columns, rows = ["kind"], [[Text(kind)] for kind in kinds]
    for name, values in (("before", before), ("after", after)):
        if values:
            columns.append(name)
            for row, kind in zip(rows, kinds, strict=True):
                row.append(Text(format_size(values.get(kind, 0))))
    largest = after or before
    drawn: list[Sequence[str | Text | Bar]] = [
        (*row, Bar(largest.get(kind, 0), whole, 24)) for row, kind in zip(rows, kinds, strict=True)
    ]
    if not result.installed and not before:
        columns[1:] = ["bytes"]
    return draw_table((*columns, "<"), drawn)
