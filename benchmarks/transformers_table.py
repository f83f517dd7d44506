"""Tiny models of the `transformers` library held to 60 % of their activations: peak, time and bits beside plain eager.

    python benchmarks/transformers_table.py -o benchmarks/results/transformers.json    # about six minutes on 2 cores

The budget is the step's start (parameters, optimizer state, inputs) and 60 % of what plain eager takes on top of it. A model
that is refused is a row with the reason. The last rows are a small BERT (hidden 128, sequence 128, batch 8) at 90 % of its peak:
there every operation is short, so it shows what recording costs. Writes JSON and a Markdown table.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from machine import PACKAGES, describe_machine, draw_machine, write_json
from measuring import Bench, Row
from table import HEADER, draw_row
from transformers_models import TINY, make_bert_workload
from worker import EAGER, MEMFIT, VariantError
from workloads import Workload

ACTIVATION_PERCENT = 60
OVERHEAD_PERCENT = 90  # of the whole peak
MAX_OVERHEAD_RATIO = 1.05
NUM_PAIRS, NUM_STEPS = 5, 8
TIMEOUT_SECONDS = 180.0
SMALL = make_bert_workload("tiny", 8, 128)


def measure_tiny(workload: Workload) -> list[Row]:
    """Plain eager against itself, and memfit at 60 % of the activations."""
    with Bench(workload, num_pairs=NUM_PAIRS, num_steps=NUM_STEPS, timeout_seconds=TIMEOUT_SECONDS) as bench:
        bench.measure(EAGER)
        above_start = bench.eager.peak - bench.eager.baseline
        budget_bytes = bench.eager.baseline + above_start * ACTIVATION_PERCENT // 100
        bench.measure(MEMFIT, budget_bytes, f"{ACTIVATION_PERCENT} % of activations")
    return bench.rows


def measure_model(name: str) -> list[Row]:
    """The rows of one model; one row with the error where not even plain eager runs."""
    try:
        return measure_overhead() if name == SMALL.name else measure_tiny(TINY[name])
    except VariantError as error:
        row: Row = {"workload": name, "variant": EAGER, "label": "", "budget_bytes": None}
        return [{**row, "error": str(error), "error_kind": error.kind}]


def measure_overhead() -> list[Row]:
    """What recording costs a model whose operations are all short: eager against itself, and memfit at 90 % of its peak."""
    with Bench(SMALL, num_pairs=NUM_PAIRS, num_steps=NUM_STEPS, timeout_seconds=TIMEOUT_SECONDS) as bench:
        bench.measure(EAGER)
        bench.measure(MEMFIT, bench.eager.peak * OVERHEAD_PERCENT // 100, f"{OVERHEAD_PERCENT} % of the peak")
    return bench.rows


def describe_refusals(rows: list[Row]) -> list[str]:
    """Whatever is not a right row within its budget, whole sentences: refusals, other errors, differences, budgets not kept."""
    sentences = []
    for row in rows:
        place = f"{row['workload']}, {row['variant']}"
        if "error" in row:
            sentences.append(f"{place}: {row['error']}")
        elif not row["equal"]:
            sentences.append(f"{place}: {len(row['differing'])} parts differ, first {row['differing'][0]}.")
        elif not row["within_budget"]:
            sentences.append(f"{place}: {row['peak_bytes']:,} bytes at the peak, {row['budget_bytes']:,} allowed.")
    return sentences


def describe_overhead(rows: list[Row]) -> str:
    """The small model's extra time in one sentence, against what is aimed at."""
    row = next(row for row in reversed(rows) if row["workload"] == SMALL.name)
    if "error" in row:
        return f"{SMALL.name}: {row['error']}"
    verdict = "within" if row["cpu_time_ratio"] < MAX_OVERHEAD_RATIO else "more than"
    return f"{SMALL.name}: {row['cpu_time_ratio'] - 1:+.1%} CPU time, {verdict} the {MAX_OVERHEAD_RATIO - 1:.0%} aimed at."


def draw(document: dict[str, Any]) -> str:
    """The whole result as Markdown."""
    rows = document["rows"]
    sentences = describe_refusals(rows)
    lines = [draw_machine(document), "", HEADER, *map(draw_row, rows), ""]
    lines += [
        "Not equal, not within budget, or refused:" + ("" if sentences else " none."),
        *(f"- {each}" for each in sentences),
    ]
    if any(row["workload"] == SMALL.name for row in rows):
        lines += ["", f"Small model: {describe_overhead(rows)}"]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [*TINY, SMALL.name]
    parser.add_argument("--models", default=",".join(names), help="comma-separated (default: all)")
    parser.add_argument("-o", "--output", type=Path, required=True, help="JSON; a Markdown table goes beside it")
    args = parser.parse_args()
    chosen = args.models.split(",")
    if unknown := [name for name in chosen if name not in names]:
        parser.error(f"unknown model {unknown[0]!r}; there are {', '.join(names)}")
    print(HEADER, file=sys.stderr)
    rows = [row for name in chosen for row in measure_model(name)]
    machine = describe_machine((*PACKAGES, "transformers"))
    document = {"format": "memfit-transformers", "version": 1, "clock": "cpu", **machine, "rows": rows}
    write_json(args.output, document)
    text = draw(document)
    args.output.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)
    refused = [row for row in rows if row.get("error_kind") == "BudgetError"]
    return 1 if len(describe_refusals(rows)) > len(refused) else 0


if __name__ == "__main__":
    sys.exit(main())
