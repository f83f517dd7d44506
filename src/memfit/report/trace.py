"""The report of a trace: where the peak of the step is, and who holds it: by kind, module, line and tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from memfit.core.breakdown import bytes_by, peak_by_phase
from memfit.core.finding import Finding
from memfit.core.replay import Replay, replay
from memfit.core.sizes import format_size
from memfit.core.trace import BEGIN, END, KINDS, Trace
from memfit.report.drawing import (
    HEAD,
    Bar,
    draw_facts,
    draw_finding,
    draw_heading,
    draw_table,
    format_count,
    format_percent,
    format_seconds,
    shorten_path,
)

MAX_ROWS = 8  # of modules, lines and tensors


def draw_trace(trace: Trace, *, max_rows: int = MAX_ROWS) -> RenderableType:
    """The whole report of a trace: derived by replay, so it holds for a file as for a step just measured."""
    step = replay(trace)
    parts: list[RenderableType] = [_headline(trace, step), Text(), draw_facts(_facts(trace, step))]
    sections = (
        ("Peak of each phase", "<phase", peak_by_phase(trace, step), None, ""),
        ("At the peak, by kind", "<kind", _by_kind(trace, step), None, ""),
        ("At the peak, by module", "<module", bytes_by(trace, step, "module"), max_rows, "(no module)"),
        ("At the peak, by line", "<line", _by_line(trace, step), max_rows, "(not known)"),
    )
    for heading, column, sums, limit, nameless in sections:
        if any(key for key in sums if key != "workspace"):
            parts += [Text(), draw_heading(heading), _sums(column, sums, step.peak_bytes, limit, nameless)]
    if step.holders:
        parts += [Text(), draw_heading("Largest tensors at the peak"), _tensors(trace, step.holders, max_rows)]
    return Group(*parts)


def draw_dead(findings: Sequence[Finding], peak_bytes: int, without_bytes: int) -> RenderableType:
    """What is held at the peak for nothing, a finding each, and the peak of the step without all of it."""
    heading = f"Dead, yet held at the peak: without it {format_size(without_bytes)} instead of {format_size(peak_bytes)}"
    return Group(draw_heading(heading), draw_facts(map(draw_finding, findings)))


def _headline(trace: Trace, step: Replay) -> Text:
    program = trace.meta.get("program") or "the step"
    line = Text("memfit trace: ", style=HEAD)
    return line.append(f"{program} peaks at {format_size(step.peak_bytes)} in {step.peak_phase}")


def _facts(trace: Trace, step: Replay) -> list[tuple[str, str | Text]]:
    facts: list[tuple[str, str | Text]] = [("Peak", _where(trace, step))]
    persistent = sum(storage.nbytes for storage in trace.storages if storage.persistent)
    saved = {trace.cells[handle.cell].storage for handle in trace.handles}
    saved_bytes = sum(trace.storages[index].nbytes for index in saved if not trace.storages[index].persistent)
    facts.append(("Persistent", f"{format_size(persistent)} live for the whole step and longer"))
    facts.append(("Saved", f"{format_size(saved_bytes)} saved for backward, in {format_count(len(saved), 'storage')}"))
    facts += _about_first_step(trace)
    measured = f"{format_seconds(trace.step_seconds)} a step" if trace.step_seconds else "time not known"
    facts.append(("Step", f"{measured}; {format_count(len(trace.calls), 'call')}; {trace.device}"))
    if source := trace.meta.get("peak_source"):
        facts.append(("Read from", str(source)))
    if note := trace.meta.get("note"):
        facts.append(("Note", str(note)))
    return facts


def _about_first_step(trace: Trace) -> list[tuple[str, str | Text]]:
    """What a measurement of the first step alone would miss."""
    state = sum(storage.nbytes for storage in trace.storages if storage.kind == "optimizer state" and storage.persistent)
    first_bytes = trace.meta.get("first_peak_bytes")
    if not state or first_bytes is None:
        return []
    text = f"peaked at {format_size(int(first_bytes))}; {format_size(state)} of optimizer state came at its end and stay"
    return [("First step", text)]


def _where(trace: Trace, step: Replay) -> str:
    """The peak in one line: phase, the running call if one is, its module and line."""
    running: list[int] = []
    for operation, operand in trace.events[: step.peak_event + 1]:
        if operation == BEGIN:
            running.append(operand)
        elif operation == END and running:
            running.pop()
    text = f"in {step.peak_phase}"
    if running:
        call = trace.calls[running[-1]]
        text += f", inside {call.function}"
        text += f" of {call.module}" if call.module else ""
        text += f", {shorten_path(call.location)}" if call.location else ""
    if step.workspace_bytes:
        text += f"; {format_size(step.workspace_bytes)} of it inside one operation"
    return text


def _by_kind(trace: Trace, step: Replay) -> dict[str, int]:
    sums = bytes_by(trace, step, "kind")
    return {kind: sums[kind] for kind in dict.fromkeys((*KINDS, *sums)) if sums.get(kind)}


def _by_line(trace: Trace, step: Replay) -> dict[str, int]:
    sums: dict[str, int] = {}
    for location, num_bytes in bytes_by(trace, step, "location").items():
        short = shorten_path(location)
        sums[short] = sums.get(short, 0) + num_bytes
    return dict(sorted(sums.items(), key=lambda item: (-item[1], item[0])))


def _sums(column: str, sums: Mapping[str, int], whole: int, limit: int | None, nameless: str) -> RenderableType:
    items = list(sums.items())
    shown, rest = (items, []) if limit is None or len(items) <= limit else (items[: limit - 1], items[limit - 1 :])
    rows: list[Sequence[str | Text | Bar]] = [
        (key or nameless, format_size(size), format_percent(size, whole), Bar(size, whole, 16)) for key, size in shown
    ]
    if rest:
        size = sum(size for _, size in rest)
        rows.append((f"{len(rest)} others", format_size(size), format_percent(size, whole), Bar(size, whole, 16)))
    return draw_table((column, "bytes", "of peak", "<"), rows)


def _tensors(trace: Trace, holders: Iterable[int], limit: int) -> RenderableType:
    storages = sorted((trace.storages[index] for index in holders), key=lambda storage: -storage.nbytes)
    rows = []
    for storage in storages[:limit]:
        place = ", ".join(part for part in (storage.module, shorten_path(storage.location)) if part)
        rows.append((storage.kind, place or "(not known)", format_size(storage.nbytes)))
    return draw_table(("<kind", "where it was made", "bytes"), rows, wide=1)
