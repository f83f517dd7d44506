"""The points of a picture, and that the same file gives the same bytes."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import draw
from benchmarks.rows import document, memfit, row

ROWS = [
    row("eager", 700, 1.01),
    row("compile 0.5", 360, 1.26, equal=False, differing=["gradient/a"]),
    {**row("selective", 0, 0), "error": "RuntimeError: mutated"},
    memfit(770, 700, 1.0, label="idle"),
    memfit(600, 599, 1.05),
    memfit(230, 229, 1.30, label="floor"),
    memfit(500, 499, 1.07, equal=False, differing=["buffer/a"]),
]


def test_the_line_is_our_right_rows_by_activations_and_errors_and_the_idle_row_have_no_point() -> None:
    (curve,) = draw.read_curves(document(*ROWS))
    assert [(point.activation_mib, point.ratio) for point in curve.line] == [(149.0, 1.30), (519.0, 1.05)]
    assert [(point.variant, point.activation_mib, point.is_right) for point in curve.marks] == [
        ("eager", 620.0, True),
        ("compile 0.5", 280.0, False),
        ("memfit", 419.0, False),
    ]


def test_each_workload_has_a_curve_on_the_documents_clock() -> None:
    rows = [memfit(600, 599, 1.05, wall_time_ratio=1.2), memfit(500, 499, 1.1, workload="W2", wall_time_ratio=1.3)]
    curves = draw.read_curves(document(*rows, clock="wall"))
    assert [(curve.workload, curve.time, curve.line[0].ratio) for curve in curves] == [
        ("W1", "seconds of a step", 1.2),
        ("W2", "seconds of a step", 1.3),
    ]


def test_the_picture_is_written_beside_its_file_and_again_with_the_same_bytes(tmp_path) -> None:
    result = tmp_path / "cpu.json"
    result.write_text(json.dumps(document(*ROWS)))
    (path,) = draw.draw_curves(result)
    assert path == tmp_path / "cpu-W1.svg"
    first = path.read_bytes()
    text = " ".join(ElementTree.fromstring(first).itertext())
    assert "W1: left and down is better" in text
    assert "commit 0123456789ab" in text
    draw.draw_curves(result)
    assert path.read_bytes() == first
