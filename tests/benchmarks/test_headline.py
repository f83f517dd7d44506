"""The headline's and the transformers table's own sentences, from hand-written rows."""

from __future__ import annotations

import pytest

import headline
import transformers_table
from benchmarks.rows import document, memfit, row

CHECKPOINT = row("hf checkpoint", 300, 1.20)


def test_extra_time_is_told_as_a_share_of_checkpointings() -> None:
    assert headline.share_of_extra_time(memfit(400, 399, 1.05), CHECKPOINT) == 0.25
    assert headline.share_of_extra_time(memfit(400, 399, 0.98), CHECKPOINT) == -0.1
    assert headline.share_of_extra_time(memfit(400, 399, 1.05), row("hf checkpoint", 300, 0.99)) is None
    assert headline.share_of_extra_time({"error": "BudgetError: no"}, CHECKPOINT) is None


def test_the_headlines_table() -> None:
    seconds = {"wall_seconds": 42.0, "eager_wall_seconds": 40.0}
    refused = {**memfit(100, 0, 0), "error": "BudgetError: too small"}
    ours = memfit(400, 399, 1.05, messages=["step 1: the guard let go of 3 saved tensors under pressure."], **seconds)
    text = headline.draw(document(row("eager", 700, 1.0), CHECKPOINT, ours, refused, clock="wall"))
    assert "| memfit | 0.419 | 0.418 | 0.334 | 42.00 (40.00) | 1.05 | 1.05 | 0.25 | yes |" in text
    assert "| memfit | 0.105 | – | – | – | – | – | – | BudgetError: too small |" in text
    assert "- 0.419 GB: step 1: the guard let go of 3 saved tensors under pressure." in text


def test_the_headlines_aims_are_reached_or_missed_by_the_rows_at_their_budgets() -> None:
    at_peak = memfit(300, 299, 1.19, label=headline.AT_CHECKPOINT)
    small = {**memfit(0, 299, 1.17), "budget_bytes": 3_200_000_000}
    large = {**memfit(0, 299, 1.10), "budget_bytes": 5_000_000_000}
    floor = memfit(250, 249, 1.5, label="floor")
    assert headline.find_aims([CHECKPOINT, at_peak, small, large, floor], CHECKPOINT) == [
        "0.315 GB: at most 1: reached, 0.95 of checkpointing's extra time.",
        "3.200 GB: at most 0.8: **missed**, 0.85 of checkpointing's extra time.",
        "5.000 GB: at most 0.5: reached, 0.50 of checkpointing's extra time.",
        "Smallest peak (floor) at most 2.400 GB: reached, 0.261 GB.",
    ]
    refused = {**floor, "error": "BudgetError: no", "peak_bytes": None}
    assert headline.find_aims([refused], CHECKPOINT) == ["Smallest peak (floor) at most 2.400 GB: **missed**, – GB."]


def test_a_model_that_is_refused_differs_or_is_over_is_told_and_a_right_one_is_not() -> None:
    rows = [
        memfit(30, 29, 1.1),
        {**memfit(30, 0, 0, workload="Mamba"), "error": "BudgetError: 30.0 MiB is too small."},
        memfit(30, 29, 1.1, workload="T5", equal=False, differing=["gradient/a"]),
        memfit(30, 31, 1.1, workload="ViT", within_budget=False),
    ]
    assert transformers_table.describe_refusals(rows) == [
        "Mamba, memfit: BudgetError: 30.0 MiB is too small.",
        "T5, memfit: 1 parts differ, first gradient/a.",
        "ViT, memfit: 32,505,856 bytes at the peak, 31,457,280 allowed.",
    ]


@pytest.mark.parametrize(
    ("ratio", "verdict"), [(1.04, "+4.0% CPU time, within the 5%"), (1.09, "+9.0% CPU time, more than the 5%")]
)
def test_the_small_models_overhead_is_held_to_the_aim(ratio, verdict) -> None:
    name = transformers_table.SMALL.name
    rows = [row("eager", 31, 1.0, workload=name), memfit(30, 29, ratio, workload=name)]
    assert transformers_table.describe_overhead(rows) == f"{name}: {verdict} aimed at."


def test_the_transformers_table_ends_with_what_was_refused_and_with_the_small_model() -> None:
    small = memfit(30, 29, 1.04, workload=transformers_table.SMALL.name, label="90 % of the peak")
    refused = {**memfit(30, 0, 0, workload="Mamba"), "error": "BudgetError: 30.0 MiB is too small."}
    lines = transformers_table.draw(document(refused, small)).splitlines()
    assert lines[-6:] == [
        "| BERT-tiny 8x128 | memfit, 90 % of the peak | 30.0 | 29.0 | 0.04 | -51.0 | 1.04 (1.04) | yes | +0.00% |",
        "",
        "Not equal, not within budget, or refused:",
        "- Mamba, memfit: BudgetError: 30.0 MiB is too small.",
        "",
        "Small model: BERT-tiny 8x128: +4.0% CPU time, within the 5% aimed at.",
    ]
