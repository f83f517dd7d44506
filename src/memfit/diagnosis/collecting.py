"""Calls of `gc.collect` in a training step that give nothing back, with what they cost. Pure: a trace in, findings out."""

from __future__ import annotations

from memfit.core.finding import Finding
from memfit.core.sizes import format_size
from memfit.core.trace import Trace

IDLE_COLLECT = "MF802"
_SMALLEST_SHARE = 0.01  # of the step's peak: less than that is nothing given back


def find_idle_collections(trace: Trace) -> list[Finding]:
    """A finding for each line whose collections freed less than 1 % of the peak; nothing for a trace that is not of a training step."""
    if trace.meta.get("step", 0) < 1:
        return []
    by_line: dict[str, list[dict[str, float]]] = {}
    for row in trace.meta.get("collections", ()):
        by_line.setdefault(row["location"], []).append(row)
    found = []
    for location, rows in by_line.items():
        freed_bytes = max(int(row["freed_bytes"]) for row in rows)
        if freed_bytes >= _SMALLEST_SHARE * trace.meta["measured_peak_bytes"]:
            continue
        path, _, line = location.rpartition(":")
        seconds = sum(row["seconds"] for row in rows)
        share = f", {seconds / trace.step_seconds:.0%} of the step," if trace.step_seconds else ""
        times = f"{len(rows)} times " if len(rows) > 1 else ""
        message = f"gc.collect() runs {times}in the step: {1000 * seconds:.0f} ms{share}"
        message += f" and gave back {format_size(freed_bytes)}"
        found.append(
            Finding(path, int(line), 1, IDLE_COLLECT, message, "take it out: what holds memory is referenced.", measured=True)
        )
    return found
