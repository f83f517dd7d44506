"""The table's sections from a hand-written result: where a peer is better, aims, broken promises."""

from __future__ import annotations

import pytest

import table
from benchmarks.rows import document, memfit, row

EAGER = row("eager", 700, 1.01)
OURS = [memfit(600, 599, 1.05), memfit(400, 399, 1.10), memfit(230, 229, 1.30, label="floor", floor_bytes=220 * 1024**2)]


def test_a_peer_below_the_curve_is_told_with_the_fastest_row_within_its_peak() -> None:
    assert table.find_better_peers([EAGER, row("selective", 405, 1.04), *OURS]) == [
        "W1: selective peaks at 405.0 MiB at 1.04 times eager's CPU time; "
        "within that peak memfit's fastest takes 1.10 (at 399.0 MiB), 0.06 more."
    ]


def test_a_peer_on_or_above_the_curve_is_no_better() -> None:
    peers = [row("selective", 405, 1.10), row("checkpoint", 229, 1.31), row("compile 1", 500, 1.12)]
    assert table.find_better_peers([EAGER, *peers, *OURS]) == []


def test_a_peer_left_of_the_curve_is_told_with_what_stands_in_the_way() -> None:
    assert table.find_better_peers([EAGER, row("checkpoint", 228, 2.0), *OURS]) == [
        "W1: checkpoint peaks at 228.0 MiB at 2.00 times eager's CPU time. memfit's smallest peak is 229.0 MiB (at 1.30), 1.0 MiB more; "
        "a plan for 220.0 MiB exists, so it is the unplanned first step that needs more."
    ]
    assert table.find_better_peers([row("checkpoint", 210, 2.0), *OURS])[0].endswith(
        "19.0 MiB more; no plan for less was found."
    )


def test_peaks_within_a_thousandth_count_as_the_same() -> None:
    assert table.find_better_peers([EAGER, row("checkpoint", 229 / 1.0009, 1.4), *OURS]) == []
    assert len(table.find_better_peers([EAGER, row("checkpoint", 229 / 1.0011, 1.4), *OURS])) == 1


def test_a_gap_no_wider_than_eager_against_itself_is_called_so() -> None:
    peer = row("selective", 405, 1.09)
    assert table.find_better_peers([row("eager", 700, 0.98), peer, *OURS])[0].endswith(
        "0.01 more. No more than eager differs from itself."
    )


@pytest.mark.parametrize("wrong", [{"equal": False, "differing": ["buffer/x"]}, {"error": "Timeout: not done after 1 s"}])
def test_wrong_peers_and_wrong_rows_of_ours_do_not_count(wrong) -> None:
    assert table.find_better_peers([EAGER, row("checkpoint", 100, 0.5, **wrong), *OURS]) == []
    ours = [memfit(100, 99, 0.5, **wrong)]
    assert table.find_better_peers([EAGER, row("checkpoint", 228, 2.0), *ours])[0].endswith(
        "No memfit row of this workload is right."
    )


def test_workloads_are_not_compared_with_each_other() -> None:
    peer = row("checkpoint", 300, 1.4, workload="W2")
    ours = memfit(290, 290, 1.2, workload="W2")
    assert table.find_better_peers([EAGER, *OURS, row("eager", 700, 1.0, workload="W2"), peer, ours]) == []


def test_an_aim_is_reached_by_the_fastest_row_within_its_activations() -> None:
    rows = [memfit(400, 399, 1.10), memfit(230, 213, 1.26), memfit(220, 211, 1.28)]
    assert table.find_aims(rows) == [
        "W1: at most 324 MiB of activations at 1.12: reached, 319.0 MiB at 1.10.",
        "W1: at most 134 MiB of activations at 1.25: **missed**, 133.0 MiB at 1.26.",
        "W1: at most 115 MiB of activations: **missed**, 131.0 MiB at 1.28.",
    ]


def test_broken_promises_are_named_and_kept_ones_are_not() -> None:
    refused = {**memfit(200, 0, 0), "error": "BudgetError: too small", "error_kind": "BudgetError"}
    kept = [memfit(600, 599, 1.05), refused, memfit(230, 229, 1.3, label="floor"), row("checkpoint", 229, 1.4)]
    assert table.find_broken_promises(kept) == []
    broken = [
        memfit(600, 601, 1.05, within_budget=False, prediction_error=-0.02),
        memfit(500, 499, 1.6, equal=False, differing=["gradient/a", "gradient/b"]),
        memfit(770, 700, 1.0, label="idle"),
        {**memfit(300, 0, 0), "error": "Timeout: not done after 9 s", "error_kind": "Timeout"},
        memfit(230, 230, 1.3, label="floor"),
        row("checkpoint", 229, 1.4),
    ]
    assert table.find_broken_promises(broken) == [
        "W1 at 600.0 MiB: peak 601.0 MiB.",
        "W1 at 600.0 MiB: the predicted peak is off by -2.0%.",
        "W1 at 500.0 MiB: 2 parts differ from plain eager, first gradient/a.",
        "W1 at 500.0 MiB: 1.60 times the CPU time of plain eager.",
        "W1 at 770.0 MiB: the step fits as it is and something was installed.",
        "W1 at 300.0 MiB: Timeout: not done after 9 s",
        "W1: smallest feasible peak 230.0 MiB, checkpoint per block 229.0 MiB.",
    ]


@pytest.mark.parametrize(
    ("differing", "words"),
    [
        (["buffer/a", "buffer/b"], "**no**: 2 buffers"),
        (["gradient/a", "optimizer/a/exp_avg", "parameter/a"], "**no**: 1 gradient, 2 other parts"),
        (["gradient/a", "loss"], "**no**: loss, 1 other parts"),
        (["random/cpu"], "**no**: 1 random"),
    ],
)
def test_what_differs_is_told_loss_first_then_gradients_then_buffers(differing, words) -> None:
    assert table.describe_equality({"equal": False, "differing": differing}) == words


def test_the_whole_table() -> None:
    text = table.draw_table(document(EAGER, row("selective", 405, 1.04), *OURS))
    assert text.splitlines()[0] == (
        "python 3.11.7, torch 2.13.0; a CPU, 2 cores, 1 thread; commit 0123456789ab; 2026-11-30T12:00:00+00:00"
    )
    assert "| W1 | memfit, floor | 230.0 | 229.0 | 0.33 | 149.0 | 1.30 (1.30) | yes | +0.00% |" in text
    assert "\nWhere a peer is better:\n- W1: selective peaks at 405.0 MiB" in text
    assert "\nPromises broken: none.\n" in text
