"""Breakdowns: who holds the peak, as plain functions over a trace and its replay."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memfit.core.trace import PHASE, PHASES, Trace

if TYPE_CHECKING:  # replay offers these functions as its own
    from memfit.core.replay import Replay


def bytes_by(trace: Trace, result: Replay, attribute: str) -> dict[str, int]:
    """Bytes at the peak by a storage's 'kind', 'module' or 'location', largest first.

    'workspace' is what lies above the storages at that moment. The values add up to `result.peak_bytes`.
    """
    sums: dict[str, int] = {}
    for index in result.holders:
        key = getattr(trace.storages[index], attribute)
        sums[key] = sums.get(key, 0) + trace.storages[index].nbytes
    if result.workspace_bytes:
        sums["workspace"] = sums.get("workspace", 0) + result.workspace_bytes
    return dict(sorted(sums.items(), key=lambda item: (-item[1], item[0])))


def peak_by_phase(trace: Trace, result: Replay) -> dict[str, int]:
    """The highest moment of each phase, in the order the phases first came."""
    peaks: dict[str, int] = {}
    phase = "other"
    for (operation, operand), high in zip(trace.events, result.high_bytes, strict=True):
        if operation == PHASE:
            phase = PHASES[operand]
        peaks[phase] = max(peaks.get(phase, 0), high)
    return peaks
