"""Calls of `gc.collect` and `empty_cache` in a training step that give nothing back, and `del` of what lives on, with their cost.

Pure: a trace in, findings out.
"""

from __future__ import annotations

from memfit.core.finding import Finding
from memfit.core.replay import replay
from memfit.core.sizes import format_size
from memfit.core.trace import Trace

IDLE_EMPTYING, IDLE_COLLECT, IDLE_DEL = "MF801", "MF802", "MF804"
_SMALLEST_SHARE = 0.01  # of the step's peak: less than that is nothing given back
_CALLS = (
    ("collections", IDLE_COLLECT, "gc.collect()", "take it out: what holds memory is referenced"),
    ("emptyings", IDLE_EMPTYING, "empty_cache()", "take it out: the allocator empties its cache itself before it runs out"),
)


def find_idle_calls(trace: Trace) -> list[Finding]:
    """A finding for each line whose calls gave back less than 1 % of the peak, and for each `del` whose storage others hold at the peak.

    Nothing for a trace that is not of a training step.
    """
    if trace.meta.get("step", 0) < 1:
        return []
    found = []
    for rows, code, call, remedy in _CALLS:
        by_line: dict[str, list[dict[str, float]]] = {}
        for row in trace.meta.get(rows, ()):
            by_line.setdefault(row["location"], []).append(row)
        found += [
            _about(location, each, trace, code, call, remedy)
            for location, each in by_line.items()
            if max(int(row["freed_bytes"]) for row in each) < _SMALLEST_SHARE * trace.meta["measured_peak_bytes"]
        ]
    return [*found, *_idle_deletes(trace)]


def _about(location: str, rows: list[dict[str, float]], trace: Trace, code: str, call: str, remedy: str) -> Finding:
    path, _, line = location.rpartition(":")
    freed_bytes = max(int(row["freed_bytes"]) for row in rows)
    seconds = sum(row["seconds"] for row in rows)
    share = f", {seconds / trace.step_seconds:.0%} of the step," if trace.step_seconds else ""
    times = f"{len(rows)} times " if len(rows) > 1 else ""
    message = f"{call} runs {times}in the step: {1000 * seconds:.0f} ms{share} and gave back {format_size(freed_bytes)}"
    return Finding(path, int(line or 1), 1, code, message, f"{remedy}.", measured=True)


def _idle_deletes(trace: Trace) -> list[Finding]:
    rows = trace.meta.get("shared_names", ())
    step = replay(trace) if rows else None
    found: dict[tuple[str, int], Finding] = {}
    for row in rows:
        num_bytes = trace.storages[row["storage"]].nbytes
        if step is None or row["event"] > step.peak_event or row["storage"] not in step.holders:
            continue
        if num_bytes < _SMALLEST_SHARE * step.peak_bytes:
            continue
        where = "" if row["function"] == "<module>" else f" of {row['function']}"
        message = f"`del {row['name']}`{where} frees nothing: {row['chain']} holds the same storage, also at the peak in {step.peak_phase}"
        remedy = "let go of that, too, or leave the `del` out."
        key = row["path"], row["deleted_line"]
        found.setdefault(key, Finding(*key, 1, IDLE_DEL, message, remedy, num_bytes, measured=True))
    return list(found.values())
