"""The tables of precision.py as Markdown: one row a variant, the guide's claims beside what was found, and how near training comes to float32."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from machine import draw_machine

FLOAT32, BY_HAND = "float32", "by hand"
MIB = 1024**2
HEADER = (
    "| workload | variant | half | budget MiB | peak MiB | of float32 | lasting MiB | CPU time of float32 | bit for bit |\n"
    "|---|---|---|---:|---:|---:|---:|---:|---|"
)
CLAIMS_HEADER = "| the guide says | found |\n|---|---|"
CONVERGENCE_HEADER = "| level | half | last loss, each seed | from float32, same seed | accuracy |\n|---|---|---|---|---|"

Row = dict[str, Any]


def draw_row(row: Row) -> str:
    """One line of the main table. A broken promise stands out in bold."""
    name = row["variant"] + (f" at {row['percent']} % of by hand" if row.get("percent") else "")
    start = f"| {row['workload']} | {name} | {row['half']} | {_mib(row.get('budget_bytes'))} "
    if "error" in row:
        return start + f"| – | – | – | – | not run: {row['error'].partition(': ')[2][:100] or row['error'][:100]} |"
    over = "" if row.get("within_budget", True) else " **over**"
    slower = "" if row.get("no_slower", True) else " **slower than by hand**"
    equal = {True: "yes", False: "**NO**", None: ""}[row.get("equal")]
    return (
        f"{start}| {_mib(row['peak_bytes'])}{over} | {_ratio(row.get('peak_of_float32'))} | {_mib(row.get('lasting_bytes'))} "
        f"| {_ratio(row.get('cpu_time_of_float32'))}{slower} | {equal} |"
    )


def draw_claims(rows: list[Row], folder: Path) -> list[str]:
    """The guide's two claims beside what was measured. folder: where inplace.json lies, if in-place modules have been measured."""
    lines = [CLAIMS_HEADER, f'| in-place modules save "a little" of the peak | {_claim_in_place(folder / "inplace.json")} |']
    for half in dict.fromkeys(row["half"] for row in rows if row["variant"] == "O1"):
        alone = [
            row
            for row in rows
            if row["variant"] == "O1" and row["half"] == half and not row.get("percent") and "error" not in row
        ]
        saved = ", ".join(f"{row['workload']} {1 - row['peak_of_float32']:.0%}" for row in alone)
        lines.append(f'| O1 saves "about half" of the peak ({half}) | {saved} |')
    plain = {row["workload"]: row["lasting_bytes"] for row in rows if row["variant"] == FLOAT32 and "lasting_bytes" in row}
    o1 = {row["workload"]: row["lasting_bytes"] for row in rows if row["variant"] == "O1" and "lasting_bytes" in row}
    if o1:
        same = ", ".join(f"{name} {_mib(o1[name])} MiB of {_mib(plain[name])} in float32" for name in o1 if name in plain)
        lines.append(f"| (not said) parameters, gradients and optimizer state under O1 | {same} |")
    return lines


def _claim_in_place(path: Path) -> str:
    if not path.exists():
        return "not measured here"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    shares = [f"{row['workload']} {row['variant']} {row['predicted_bytes'] / row['peak_bytes']:.1%}" for row in rows]
    return f"{', '.join(shares)} ([inplace.md](inplace.md))"


def draw_convergence(row: Row, plain: Row) -> str:
    """One line of the convergence table."""
    start = f"| {row['level']} | {row['half']} "
    if any("error" in run for run in row["runs"]):
        return start + "| not run: " + next(run["error"] for run in row["runs"] if "error" in run) + " | | |"
    losses = ", ".join(f"{run['loss']:.4f}" for run in row["runs"])
    apart = [run["loss"] / base["loss"] - 1 for run, base in zip(row["runs"], plain["runs"], strict=True)]
    accuracy = statistics.mean(run["accuracy"] for run in row["runs"])
    return start + f"| {losses} | {min(apart):+.1%} to {max(apart):+.1%} | {accuracy:.1%} |"


def draw_document(document: dict[str, Any], folder: Path) -> str:
    """The whole result as Markdown. folder: where it will lie."""
    rows = document["rows"]
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    lines = [
        draw_machine({**document, "commit": commits or document["commit"]}),
        "",
        "Peaks are exact. Times were taken one variant after the other and are rough; float16 is not timed, this CPU has no fast products in it. Lasting: "
        "parameters, gradients and optimizer state. By hand is torch.autocast, in float16 with GradScaler; bit for bit compares O1 with it, and O0 with float32.",
        "",
    ]
    if rows:
        lines += [HEADER, *map(draw_row, rows), "", *draw_claims(rows, folder), ""]
    if document["convergence"]:
        first = document["convergence"][0]
        lines += [CONVERGENCE_HEADER, *(draw_convergence(row, first) for row in document["convergence"]), ""]
    return "\n".join(lines)


def _mib(num_bytes: int | None) -> str:
    return "–" if num_bytes is None else f"{num_bytes / MIB:.1f}"


def _ratio(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}"
