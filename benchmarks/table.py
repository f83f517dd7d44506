"""Rows into words: the Markdown table, what was promised and broken, where a peer is better. From a result file alone.

A row is right where every bit equals plain eager's. A peer whose results are right is better than memfit where it lies left of memfit's
curve (a smaller peak than memfit ever had) or below it (less time than any memfit row of no larger peak); no interpolation: both
sides were measured. Peaks are the whole step's, for that is what a budget is about; within 0.1 % they count as the same.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable
from typing import Any

from machine import draw_machine
from peers import CHECKPOINT
from worker import EAGER, MEMFIT

IDLE, FLOOR, PLANNED_FLOOR = "idle", "floor", "floor, planned from a trace"
MAX_TIME_RATIO, MAX_PREDICTION_ERROR = 1.5, 0.01
SAME_PEAK = 0.001  # what a plan leaves free of its budget
MIB = 1024**2

# What we aim at: workload, MiB of activations, CPU time over plain eager's (None: any). Beside them, what the best peers take.
AIMS = (
    ("W1", 324, 1.12),  # selective 324 at 1.22
    ("W1", 134, 1.25),  # checkpoint 134 at 1.35
    ("W1", 115, None),
    ("W2", 780, 1.01),  # checkpoint 780 at 1.06
    ("W3", 350, 1.06),
    ("W3", 264, 1.12),  # checkpoint 264 at 1.26, statistics wrong
    ("W4", 351, 1.10),  # checkpoint 351 at 1.25, statistics wrong
    ("W4", 280, None),
)

Row = dict[str, Any]

HEADER = (
    "| workload | variant | budget MiB | peak MiB | of eager | activations MiB | CPU time (wall) | equal | predicted |\n"
    "|---|---|---:|---:|---:|---:|---:|---|---:|"
)


def draw_row(row: Row) -> str:
    """One line of the Markdown table."""
    variant = row["variant"] + (f", {row['label']}" if row["label"] else "")
    start = f"| {row['workload']} | {variant} | {mib(row['budget_bytes'])} "
    if "error" in row:
        return start + f"| – | – | – | – | – | {textwrap.shorten(row['error'], 90, placeholder=' …')} |"
    error = row.get("prediction_error")
    return start + (
        f"| {mib(row['peak_bytes'])}{'' if row['within_budget'] else ' **over**'} | {row['peak_of_eager']:.2f} "
        f"| {mib(row['activation_bytes'])} | {row['cpu_time_ratio']:.2f} ({row['wall_time_ratio']:.2f}) "
        f"| {describe_equality(row)} | {'–' if error is None else f'{error:+.2%}'} |"
    )


def describe_equality(row: Row) -> str:
    """'yes', or what differs from plain eager: 'no: 101 gradients, 303 other parts', 'no: 60 buffers'."""
    if row["equal"]:
        return "yes"
    counts = Counter(part.split("/")[0] for part in row["differing"])
    kind = next((kind for kind in ("loss", "gradient", "buffer") if counts[kind]), counts.most_common(1)[0][0])
    count = counts.pop(kind)
    first = "loss" if kind == "loss" else f"{count} {kind}{'s' if count > 1 else ''}"
    return f"**no**: {first}" + (f", {counts.total()} other parts" if counts else "")


def is_right(row: Row) -> bool:
    """Whether the row was measured and all its bits are plain eager's."""
    return "error" not in row and row["equal"]


def find_better_peers(rows: list[Row]) -> list[str]:
    """A sentence for each right row of a peer that lies left of or below memfit's curve: where, by how much, and what stands in the way."""
    sentences = []
    for name, ours_and_theirs in by_workload(rows):
        ours = [row for row in ours_and_theirs if row["variant"] == MEMFIT and is_right(row)]
        noise = max((abs(row["cpu_time_ratio"] - 1) for row in ours_and_theirs if row["variant"] == EAGER), default=0.0)
        for peer in ours_and_theirs:
            if peer["variant"] in (EAGER, MEMFIT) or not is_right(peer):
                continue
            peak_bytes, ratio = peer["peak_bytes"], peer["cpu_time_ratio"]
            there = f"{name}: {peer['variant']} peaks at {mib(peak_bytes)} MiB at {ratio:.2f} times eager's CPU time"
            within = [row for row in ours if row["peak_bytes"] <= peak_bytes * (1 + SAME_PEAK)]
            if not within:
                sentences.append(f"{there}. {_describe_floor(ours_and_theirs, ours, peak_bytes)}")
                continue
            best = min(within, key=lambda row: row["cpu_time_ratio"])
            gap = best["cpu_time_ratio"] - ratio
            if gap > 0:
                words = (
                    f"within that peak memfit's fastest takes {best['cpu_time_ratio']:.2f} (at {mib(best['peak_bytes'])} MiB)"
                )
                noisy = " No more than eager differs from itself." if gap <= noise else ""
                sentences.append(f"{there}; {words}, {gap:.2f} more.{noisy}")
    return sentences


def _describe_floor(rows: list[Row], ours: list[Row], peak_bytes: int) -> str:
    """Why no right memfit row has a peak this small, as far as the rows tell."""
    if not ours:
        return "No memfit row of this workload is right."
    smallest = min(ours, key=lambda row: row["peak_bytes"])
    text = (
        f"memfit's smallest peak is {mib(smallest['peak_bytes'])} MiB (at {smallest['cpu_time_ratio']:.2f}), "
        f"{mib(smallest['peak_bytes'] - peak_bytes)} MiB more"
    )
    planned = [row["floor_bytes"] for row in rows if row["variant"] == MEMFIT and row.get("floor_bytes")]
    if planned and min(planned) <= peak_bytes:
        return f"{text}; a plan for {mib(min(planned))} MiB exists, so it is the unplanned first step that needs more."
    return text + "; no plan for less was found."


def find_aims(rows: list[Row]) -> list[str]:
    """Of each aim whose workload is in the rows: reached or missed, and the row that shows it."""
    sentences = []
    for name, activation_mib, ratio in AIMS:
        ours = [row for row in rows if row["workload"] == name and row["variant"] == MEMFIT and is_right(row)]
        if not ours:
            continue
        aim = f"{name}: at most {activation_mib} MiB of activations" + (f" at {ratio:.2f}" if ratio is not None else "")
        within = [row for row in ours if row["activation_bytes"] <= activation_mib * MIB]
        best = min(within or ours, key=lambda row: row["cpu_time_ratio"] if within else row["activation_bytes"])
        found = f"{mib(best['activation_bytes'])} MiB at {best['cpu_time_ratio']:.2f}"
        is_reached = bool(within) and (ratio is None or best["cpu_time_ratio"] <= ratio)
        sentences.append(f"{aim}: {'reached' if is_reached else '**missed**'}, {found}.")
    return sentences


def find_broken_promises(rows: list[Row]) -> list[str]:
    """What memfit promised and did not keep, one sentence each."""
    broken = []
    for row in (row for row in rows if row["variant"] == MEMFIT):
        place = f"{row['workload']} at {mib(row['budget_bytes'])} MiB"
        if "error" in row:
            if row["error_kind"] != "BudgetError":
                broken.append(f"{place}: {row['error']}")
            continue
        if not row["within_budget"]:
            broken.append(f"{place}: peak {mib(row['peak_bytes'])} MiB.")
        if not row["equal"]:
            broken.append(f"{place}: {len(row['differing'])} parts differ from plain eager, first {row['differing'][0]}.")
        if row["label"] == IDLE and row["installed"]:
            broken.append(f"{place}: the step fits as it is and something was installed.")
        if row["cpu_time_ratio"] > MAX_TIME_RATIO:
            broken.append(f"{place}: {row['cpu_time_ratio']:.2f} times the CPU time of plain eager.")
        if abs(row.get("prediction_error") or 0) > MAX_PREDICTION_ERROR:
            broken.append(f"{place}: the predicted peak is off by {row['prediction_error']:+.1%}.")
    for name, all_rows in by_workload(rows):
        peaks = {
            row["variant"]: row.get("peak_bytes") for row in all_rows if row["label"] == FLOOR or row["variant"] == CHECKPOINT
        }
        ours, theirs = peaks.get(MEMFIT), peaks.get(CHECKPOINT)
        if theirs is not None and (ours is None or ours > theirs):
            broken.append(f"{name}: smallest feasible peak {mib(ours)} MiB, checkpoint per block {mib(theirs)} MiB.")
    return broken


def draw_table(document: dict[str, Any]) -> str:
    """The whole result as Markdown."""
    rows = document["rows"]
    lines = [draw_machine(document), "", HEADER, *(draw_row(row) for row in rows)]
    for title, sentences in (
        ("Where a peer is better", find_better_peers(rows)),
        ("Aims", find_aims(rows)),
        ("Promises broken", find_broken_promises(rows)),
    ):
        lines += ["", f"{title}:" if sentences else f"{title}: none.", *(f"- {sentence}" for sentence in sentences)]
    return "\n".join(lines) + "\n"


def by_workload(rows: Iterable[Row]) -> list[tuple[str, list[Row]]]:
    """Each workload's name and rows, in the order of first appearance."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["workload"], []).append(row)
    return list(groups.items())


def mib(num_bytes: int | None) -> str:
    return "–" if num_bytes is None else f"{num_bytes / MIB:.1f}"
