"""The report of calls in place: which may be and what that saves, also where it is nothing; which may not and why."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from memfit.core.inplace import Site, Worth, edit, find_idle, find_sites, weigh, weigh_each, why_idle
from memfit.core.sizes import format_size
from memfit.core.trace import Trace
from memfit.report.drawing import QUIET, draw_facts, draw_heading, draw_table, format_count

_MAX_ROWS = 6
_NUM_PARTS = 3  # of a file's path that are shown


def draw_in_place(trace: Trace) -> RenderableType | None:
    """The section of a trace's report: what all of it is worth, and the largest calls. None where there is nothing to say."""
    sites, idle = find_sites(trace), find_idle(trace)
    proposed = sorted((site for site in sites if not site.reason), key=lambda site: (not site.is_map, -site.nbytes, site.call))
    if not sites and not idle:
        return None
    parts: list[RenderableType] = [draw_heading(_headline(trace, proposed))]
    if proposed:
        parts.append(_proposals(trace, proposed[:_MAX_ROWS]))
    rest = []
    if len(proposed) > _MAX_ROWS:
        rest.append(("Smaller", format_count(len(proposed) - _MAX_ROWS, "other")))
    if refused := len(sites) - len(proposed):
        rest.append(("Not so", f"{format_count(refused, 'call')}, see `memfit explain inplace --trace`"))
    if idle:
        functions = ", ".join(dict.fromkeys(trace.calls[call].function for call in idle))
        saved = f"{format_count(len(idle), 'call')} that the program runs in place ({functions}) {'saves' if len(idle) == 1 else 'save'} nothing"
        rest.append(("Own", f"{saved}; the first, {_where(trace, idle[0])}, {why_idle(trace, idle[0])}"))
    if rest:
        parts.append(draw_facts(rest))
    return Group(*parts)


def draw_sites(trace: Trace, place: str = "") -> RenderableType:
    """Every call with an in-place form, in forward order, with what it saves or why it may not; only those whose module, function or
    line contains `place`."""
    sites = [site for site in find_sites(trace) if place in _name(trace, site.call)]
    idle = [call for call in find_idle(trace) if place in _name(trace, call)]
    proposed = [site for site in sites if not site.reason]
    parts: list[RenderableType] = [draw_heading(_headline(trace, proposed))]
    if proposed:
        parts.append(_proposals(trace, proposed))
    for heading, rows in (
        ("May not be in place", [(site.call, site.reason) for site in sites if site.reason]),
        ("In place already, for nothing", [(call, why_idle(trace, call)) for call in idle]),
    ):
        if rows:
            cells = [
                (trace.calls[call].function, Text(_where(trace, call)).append("\n" + reason, style=QUIET))
                for call, reason in rows
            ]
            parts += [Text(), draw_heading(heading), draw_table(("<function", "<place"), cells, wide=1)]
    if not sites and not idle:
        parts.append(
            Text(
                f"No call of this trace with {place!r} in its module, function or line has an in-place form."
                if place
                else "No call of this trace has an in-place form."
            )
        )
    return Group(*parts)


def _headline(trace: Trace, proposed: list[Site]) -> str:
    if not proposed:
        return "In place: no call may write over its input"
    worth = weigh(trace, edit(trace, [site.call for site in proposed]))
    return f"In place: {format_count(len(proposed), 'call')} may write over {'its' if len(proposed) == 1 else 'their'} input; {_say(worth)}"


def _say(worth: Worth) -> str:
    return f"{format_size(worth.peak_bytes)} less at the peak, {format_size(worth.held_bytes)} less until backward"


def _proposals(trace: Trace, sites: list[Site]) -> RenderableType:
    alone = weigh_each(trace, [site.call for site in sites])
    rows = [
        (
            trace.calls[site.call].function,
            _where(trace, site.call),
            format_size(site.nbytes),
            format_size(alone[site.call].peak_bytes),
            format_size(alone[site.call].held_bytes),
        )
        for site in sites
    ]
    return draw_table(("<function", "place", "result", "at the peak", "until backward"), rows, wide=1)


def _name(trace: Trace, call: int) -> str:
    row = trace.calls[call]
    return f"{row.function} {row.module} {row.location}"


def _where(trace: Trace, call: int) -> str:
    """'net.block.relu, project/nets/block.py:12'."""
    row = trace.calls[call]
    location = "/".join(row.location.replace("\\", "/").split("/")[-_NUM_PARTS:])
    return ", ".join(part for part in (row.module, location) if part) or "(not known)"
