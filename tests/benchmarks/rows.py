"""Rows as measuring.py makes them, written by hand."""

from __future__ import annotations

from typing import Any

MIB = 1024**2


def row(variant: str, peak_mib: float, ratio: float, **other: Any) -> dict[str, Any]:
    """A right row of workload W1 that holds its budget; its activations are 80 MiB less than its peak."""
    return {
        "workload": "W1",
        "variant": variant,
        "label": "",
        "budget_bytes": None,
        "peak_bytes": int(peak_mib * MIB),
        "peak_of_eager": peak_mib / 700,
        "activation_bytes": int((peak_mib - 80) * MIB),
        "within_budget": True,
        "equal": True,
        "num_parts_compared": 500,
        "differing": [],
        "cpu_time_ratio": ratio,
        "wall_time_ratio": ratio,
        "user_time_ratio": ratio,
    } | other


def memfit(budget_mib: float, peak_mib: float, ratio: float, **other: Any) -> dict[str, Any]:
    facts = {"budget_bytes": int(budget_mib * MIB), "installed": True, "prediction_error": 0.0}
    return row("memfit", peak_mib, ratio, **(facts | other))


def document(*rows: dict[str, Any], clock: str = "cpu") -> dict[str, Any]:
    """A whole result file around the rows."""
    return {
        "clock": clock,
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "commit": "0123456789ab",
        "hardware": {"cpu": "a CPU", "num_cores": 2, "num_threads": 1},
        "date": "2026-11-30T12:00:00+00:00",
        "rows": list(rows),
    }
