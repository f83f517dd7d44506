"""Calls of `gc.collect` in a training step that give nothing back, with what they cost. Pure: a trace in, findings out."""

from __future__ import annotations

from memfit.core.finding import Finding
from memfit.core.sizes import format_size
from memfit.core.trace import Trace

IDLE_COLLECT = "MF802"
_SMALLEST_SHARE = 0.01  # of the step's peak: less than that is nothing given back
_TELLING_CALLS = 3  # in a run without steps: less often is no loop


def find_idle_collections(trace: Trace) -> list[Finding]:
    """A finding for each line whose collections freed less than 1 % of the peak. In a trace of a whole run (without steps) only for
    lines that came three times."""
    by_line: dict[str, list[dict[str, float]]] = {}
    for row in trace.meta.get("collections", ()):
        by_line.setdefault(row["location"], []).append(row)
    is_step = trace.meta.get("step", 0) > 0
    found = []
    for location, rows in by_line.items():
        freed_bytes = max(int(row["freed_bytes"]) for row in rows)
        if freed_bytes >= _SMALLEST_SHARE * trace.meta["measured_peak_bytes"] or (not is_step and len(rows) < _TELLING_CALLS):
            continue
        path, _, line = location.rpartition(":")
        seconds = sum(row["seconds"] for row in rows)
        share = f", {seconds / trace.step_seconds:.0%} of the step," if is_step and trace.step_seconds else ""
        times = f"{len(rows)} times " if len(rows) > 1 else ""
        message = f"gc.collect() runs {times}in {'the step' if is_step else 'this run'}: {1000 * seconds:.0f} ms{share}"
        message += f" and gave back {format_size(freed_bytes)}"
        found.append(
            Finding(path, int(line), 1, IDLE_COLLECT, message, "take it out: what holds memory is referenced.", measured=True)
        )
    return found
