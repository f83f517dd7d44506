"""A growth report as JSON, written and read again."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from memfit.core.growth import Growth, GrowthReport, StepPeaks


def to_document(report: GrowthReport, proof: dict[str, Any] | None = None) -> dict[str, Any]:
    """For JSON: the report's own fields, and its findings as `findings`. proof: see `core.proof.to_document`."""
    return {
        "format": "memfit-growth",
        **asdict(report),
        "findings": [asdict(each) for each in report.findings],
        "steps_left": report.steps_left,
        **({} if proof is None else {"proof": proof}),
    }


def save(report: GrowthReport, path: str | Path, proof: dict[str, Any] | None = None) -> None:
    """Write the document as JSON."""
    Path(path).write_text(json.dumps(to_document(report, proof), indent=1) + "\n", encoding="utf-8")


def load(path: str | Path) -> GrowthReport:
    """What `save` wrote. Raises OSError, and ValueError for what is no such file."""
    document = json.loads(Path(path).read_text(encoding="utf-8"))
    if not isinstance(document, dict) or document.get("format") != "memfit-growth":
        raise ValueError(f"{path} is no growth report: `memfit leaks --json` writes one.")
    return from_document(document)


def from_document(document: dict[str, Any]) -> GrowthReport:
    """The report of `to_document`, before or after it was JSON."""
    derived = ("format", "findings", "steps_left", "proof")
    known = {name: value for name, value in document.items() if name not in derived}
    known["growths"] = tuple(Growth(**{**row, "made_at": tuple(map(tuple, row["made_at"]))}) for row in known["growths"])
    known["settled"] = tuple(map(tuple, known["settled"]))
    known["messages"] = tuple(known["messages"])
    known["peaks"] = None if known["peaks"] is None else StepPeaks(**known["peaks"])
    return GrowthReport(**known)
