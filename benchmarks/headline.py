"""The headline: BERT-base question answering, batch 20 of 384 tokens, plain, with Hugging Face's checkpointing, and under budgets.

    python benchmarks/headline.py -o benchmarks/results/headline.json                            # about 35 minutes on 2 cores, 16 GB
    python benchmarks/headline.py --batch 14 --together 3 --budgets 2.65GB,3.9GB -o fourteen.json    # about 20 minutes, 20 GB
    python benchmarks/headline.py --size tiny --batch 8 --length 128 --budgets 45MB -o quick.json    # a minute, to try the script

`transformers` BertForQuestionAnswering, eager attention, dropout, float32, Adam. Budgets: gradient checkpointing's own peak, those
given, and the smallest that is feasible. Each variant is a process of its own beside one that runs plain eager, stepped in
turn; bytes from the allocator's trace, bits compared after four steps, seconds of steps under the plan alone: memfit's first, measured
ones are slow, and their seconds stand in the file by themselves. Writes JSON, Markdown and a picture.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from draw import CLOCKS, draw_curves
from machine import PACKAGES, describe_machine, draw_machine, write_json
from measuring import Bench, Row
from memfit.core.sizes import parse_size
from oracle import StepTime
from peers import HF_CHECKPOINT
from table import FLOOR, PLANNED_FLOOR, describe_equality, is_right
from transformers_models import BERT_SIZES, make_bert_workload
from worker import EAGER, MEMFIT, NOTHING_TO_LEARN, Variant

BUDGETS = "3.2GB,5GB"
TIMEOUT_SECONDS = 1200.0
GB = 1000**3

# What we aim at for BERT-base, 20 x 384: of checkpointing's extra time at most this share, by budget; and the smallest peak.
AIMED_SHARES = {int(3.2 * GB): 0.8, 5 * GB: 0.5}
AIMED_FLOOR_BYTES = int(2.4 * GB)
AT_CHECKPOINT = "checkpointing's peak"

HEADER = (
    "| variant | budget GB | peak GB | activations GB | seconds of a step (eager beside it) | ratio | wall-time ratio | of checkpointing's extra time | equal |\n"
    "|---|---:|---:|---:|---:|---:|---:|---:|---|"
)


def measure(bench: Bench, budgets: list[int]) -> Iterator[Row]:
    """Plain eager, checkpointing, and memfit at checkpointing's peak, at each budget and at its smallest."""
    yield eager_row(bench)
    checkpoint = bench.measure(HF_CHECKPOINT)
    yield checkpoint
    at_checkpoint = [(checkpoint["peak_bytes"], AT_CHECKPOINT)] if "error" not in checkpoint else []
    for budget_bytes, label in (*at_checkpoint, *((each, "") for each in budgets)):
        yield bench.measure(MEMFIT, budget_bytes, label)
    yield bench.measure_planned_floor()
    yield bench.measure_floor()


def measure_together(bench: Bench, budgets: list[int], num_rounds: int) -> list[Row]:
    """The same without the smallest, all alive at once; see Bench.measure_together."""
    with Variant(bench.workload, HF_CHECKPOINT, num_threads=bench.num_threads) as variant:
        variant.time_step()
        peak_bytes = variant.trace_step().peak
    ours = [(MEMFIT, peak_bytes, AT_CHECKPOINT), *((MEMFIT, each, "") for each in budgets)]
    return [eager_row(bench), *bench.measure_together([(HF_CHECKPOINT, None, ""), *ours], num_rounds)]


def eager_row(bench: Bench) -> Row:
    """Plain eager's own bytes, without a second process of plain eager beside it; its seconds stand in the other rows."""
    ratios = {f"{clock}_time_ratio": 1.0 for clock in StepTime._fields}
    return {
        "workload": bench.workload.name,
        "variant": EAGER,
        "label": "",
        "budget_bytes": None,
        "peak_bytes": max(step.peak for step in bench.steps),
        "peak_of_eager": 1.0,
        "activation_bytes": bench.eager.activations,
        "within_budget": True,
        "equal": True,
        **ratios,
    }


def share_of_extra_time(row: Row, checkpoint: Row, clock: str = "user") -> float | None:
    """A row's extra time over plain eager as a share of checkpointing's; None where one of the two is not there.

    >>> share_of_extra_time({"user_time_ratio": 1.05}, {"user_time_ratio": 1.2})
    0.25
    """
    ratio = f"{clock}_time_ratio"
    if "error" in row or "error" in checkpoint or checkpoint[ratio] <= 1:
        return None
    return round((row[ratio] - 1) / (checkpoint[ratio] - 1), 3)


def find_aims(rows: list[Row], checkpoint: Row, clock: str = "user") -> list[str]:
    """Of each aim that the rows can show: reached or missed, with the number."""
    sentences = []
    for row in rows:
        if row["variant"] != MEMFIT:
            continue
        share = share_of_extra_time(row, checkpoint, clock)
        aimed = 1.0 if row["label"] == AT_CHECKPOINT else AIMED_SHARES.get(row["budget_bytes"])
        if aimed is not None:
            found = "nothing to compare" if share is None else f"{share:.2f} of checkpointing's extra time"
            verdict = "reached" if share is not None and share <= aimed and row["equal"] else "**missed**"
            sentences.append(f"{_gb(row['budget_bytes'])} GB: at most {aimed:g}: {verdict}, {found}.")
        if row["label"] in (FLOOR, PLANNED_FLOOR):
            peak_bytes = row.get("peak_bytes")
            verdict = "reached" if is_right(row) and row["peak_bytes"] <= AIMED_FLOOR_BYTES else "**missed**"
            sentences.append(
                f"Smallest peak ({row['label']}) at most {_gb(AIMED_FLOOR_BYTES)} GB: {verdict}, {_gb(peak_bytes)} GB."
            )
    return sentences


def draw_line(row: Row, checkpoint: Row, clock: str = "user") -> str:
    """One line of the Markdown table."""
    start = f"| {row['variant']}{', ' + row['label'] if row['label'] else ''} | {_gb(row['budget_bytes'])} "
    if "error" in row:
        return start + f"| – | – | – | – | – | – | {row['error']} |"
    share = share_of_extra_time(row, checkpoint, clock) if row["variant"] == MEMFIT else None
    seconds = "–"
    if f"{clock}_seconds" in row:
        seconds = f"{row[f'{clock}_seconds']:.2f} ({row[f'eager_{clock}_seconds']:.2f})"
    return start + (
        f"| {_gb(row['peak_bytes'])}{'' if row['within_budget'] else ' **over**'} | {_gb(row['activation_bytes'])} | {seconds} "
        f"| {row[f'{clock}_time_ratio']:.2f} | {row['wall_time_ratio']:.2f} | {'–' if share is None else f'{share:.2f}'} | {describe_equality(row)} |"
    )


def draw(document: dict[str, Any]) -> str:
    """The whole result as Markdown."""
    rows = document["rows"]
    checkpoint = next(row for row in rows if row["variant"] == HF_CHECKPOINT)
    clock = document["clock"]
    about = f"{rows[0]['workload']}, {CLOCKS[clock]}"
    lines = [draw_machine(document), "", about, "", HEADER, *(draw_line(row, checkpoint, clock) for row in rows)]
    lines += ["", "Aims (of the full size):", *(f"- {each}" for each in find_aims(rows, checkpoint, clock))]
    told = [f"- {row['label'] or _gb(row['budget_bytes']) + ' GB'}: {each}" for row in rows for each in row.get("messages", ())]
    if told:
        lines += ["", "What memfit said:", *told]
    lines += [f"\n{note}" for note in document.get("notes", ())]  # put in by hand, of a run that needs a word
    return "\n".join(lines) + "\n"


def _gb(num_bytes: int | None) -> str:
    return "–" if num_bytes is None else f"{num_bytes / GB:.3f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=BERT_SIZES, default="base")
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--length", type=int, default=384)
    parser.add_argument("--budgets", default=BUDGETS, help="comma-separated (default: %(default)s)")
    parser.add_argument("--steps", type=int, choices=(1, 2, 3), default=2, help="timed pairs of steps after one to warm up")
    parser.add_argument(
        "--together", type=int, metavar="ROUNDS", help="all alive at once and stepped in turn, for small batches"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of PyTorch (default: all cores, %(default)s)")
    parser.add_argument(
        "--clock", choices=CLOCKS, default="user", help="which ratio is told, and judged by (default: %(default)s)"
    )
    parser.add_argument("--timeout", type=float, default=TIMEOUT_SECONDS, help="seconds a row may take (default: %(default)g)")
    parser.add_argument("-o", "--output", type=Path, required=True, help="JSON; Markdown and a picture go beside it")
    args = parser.parse_args()
    budgets = [parse_size(each) for each in args.budgets.split(",")]

    os.environ.update(NOTHING_TO_LEARN)  # of the processes that are measured
    start = time.monotonic()
    workload = make_bert_workload(args.size, args.batch, args.length)
    rows: list[Row] = []
    with Bench(workload, num_pairs=args.steps, num_threads=args.threads, timeout_seconds=args.timeout) as bench:
        print(f"plain eager: {_gb(bench.eager.peak)} GB at the peak", file=sys.stderr, flush=True)
        for row in measure_together(bench, budgets, args.together) if args.together else measure(bench, budgets):
            rows.append(row)
            if row["variant"] == MEMFIT:
                row["share_of_checkpoint_extra_time"] = share_of_extra_time(row, rows[1], args.clock)
            document = {
                "format": "memfit-headline",
                "version": 1,
                "clock": args.clock,
                "environment": NOTHING_TO_LEARN,
                **describe_machine((*PACKAGES, "transformers"), args.threads),
                "run_seconds": round(time.monotonic() - start),
                "rows": rows,
            }
            write_json(args.output, document)  # after each, so that a run cut short is no run lost
    text = draw(document)
    args.output.with_suffix(".md").write_text(text, encoding="utf-8")
    draw_curves(args.output)
    print(text)
    ours = [row for row in rows if row["variant"] == MEMFIT]
    return 0 if all(is_right(row) and row["within_budget"] for row in ours) else 1


if __name__ == "__main__":
    sys.exit(main())
