"""A picture of each curve in a result file: activations against time, memfit as a line, peers as marks, as SVG.

    python benchmarks/draw.py benchmarks/results/cpu.json    # writes cpu-W1.svg, cpu-W2.svg, ... beside it

Filled marks are right bit for bit; hollow, crossed ones changed results or statistics. The same file gives the same bytes.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from table import IDLE, MIB, by_workload, is_right
from worker import EAGER, MEMFIT

COLOURS = {MEMFIT: "#1565c0", EAGER: "#000000", "checkpoint": "#c62828", "selective": "#ef6c00", "compile": "#6a1b9a"}
MARKERS = {MEMFIT: "o", EAGER: "s", "checkpoint": "^", "selective": "D", "compile": "v"}
CLOCKS = {"cpu": "CPU time of a step", "wall": "seconds of a step", "user": "CPU time of a step without page faults"}


@dataclass(frozen=True)
class Point:
    """One measured row. activation_mib and ratio (time over plain eager's) are its place; label may be ''."""

    variant: str
    label: str
    activation_mib: float
    ratio: float
    is_right: bool


@dataclass(frozen=True)
class Curve:
    """What one picture shows. line: memfit's right points, by activations. marks: everybody else's, and memfit's wrong ones."""

    workload: str
    time: str
    line: tuple[Point, ...]
    marks: tuple[Point, ...]


def read_curves(document: dict[str, Any]) -> list[Curve]:
    """The curves of a result file, one a workload. Rows with an error and memfit's idle row have no point."""
    clock = document["clock"]
    curves = []
    for workload, rows in by_workload(document["rows"]):
        points = [
            Point(row["variant"], row["label"], row["activation_bytes"] / MIB, row[f"{clock}_time_ratio"], is_right(row))
            for row in rows
            if "error" not in row and row["label"] != IDLE
        ]
        line = sorted((p for p in points if p.variant == MEMFIT and p.is_right), key=lambda p: p.activation_mib)
        marks = tuple(p for p in points if p not in line)
        curves.append(Curve(workload, CLOCKS[clock], tuple(line), marks))
    return curves


def draw_curves(result: Path) -> list[Path]:
    """Write one SVG for each curve of the result file, beside it; the paths."""
    document = json.loads(result.read_text(encoding="utf-8"))
    paths = []
    for curve in read_curves(document):
        paths.append(result.with_name(f"{result.stem}-{curve.workload.replace(' ', '-')}.svg"))
        draw_curve(
            curve, f"torch {document['versions']['torch']}, commit {document['commit']}, {document['date'][:10]}", paths[-1]
        )
    return paths


def draw_curve(curve: Curve, origin: str, path: Path) -> None:
    """The picture of one curve; `origin` (versions, commit, date) goes into its corner."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    with plt.rc_context({"svg.hashsalt": "memfit", "font.size": 10, "svg.fonttype": "none"}):
        figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
        axes.plot(
            [p.activation_mib for p in curve.line],
            [p.ratio for p in curve.line],
            color=COLOURS[MEMFIT],
            marker="o",
            label="memfit",
            zorder=3,
        )
        named: set[str] = set()
        for point in curve.marks:
            _draw_mark(axes, point, named)
        if any(not p.is_right for p in curve.marks):
            axes.plot([], [], "o", color="grey", markerfacecolor="white", label="hollow, crossed: results differ")
        axes.axhline(1.0, color="lightgrey", linewidth=1, zorder=0)
        axes.set_xlim(left=0, right=1.08 * max(p.activation_mib for p in (*curve.line, *curve.marks)))
        axes.set_xlabel("activations at the peak, MiB")
        axes.set_ylabel(f"{curve.time}, plain eager = 1")
        axes.set_title(f"{curve.workload}: left and down is better", loc="left")
        axes.set_title(origin, loc="right", fontsize=7, color="grey")
        axes.legend(fontsize=8)
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)


def _draw_mark(axes: Any, point: Point, named: set[str]) -> None:
    family, _, suffix = point.variant.rpartition(" ")
    family = family if family in COLOURS else point.variant
    colour, marker = COLOURS.get(family, "#2e7d32"), MARKERS.get(family, "P")
    place = ([point.activation_mib], [point.ratio])
    name = None if family in named or family == MEMFIT else family
    face = colour if point.is_right else "white"
    axes.plot(*place, marker, color=colour, markerfacecolor=face, markersize=8, label=name, zorder=4)
    named.add(family)
    if not point.is_right:
        axes.plot(*place, "x", color=colour, markersize=5, zorder=4)
    if family == "compile":
        axes.annotate(suffix, (point.activation_mib, point.ratio), (5, 5), textcoords="offset points", fontsize=7)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("result", type=Path, nargs="+", help="JSON written by run.py or headline.py")
    for result in parser.parse_args().result:
        for path in draw_curves(result):
            print(path)


if __name__ == "__main__":
    main()
