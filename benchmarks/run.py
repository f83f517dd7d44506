"""W1-W4 under memory budgets: curves of memfit from plain eager's peak to the smallest feasible, beside what else there is.

    python benchmarks/run.py -o benchmarks/results/cpu.json           # all of it, about 35 minutes on 2 idle cores
    python benchmarks/run.py --workloads W1,W3 --quick -o quick.json  # fewer budgets and peers, fewer timed steps

Writes the JSON, a Markdown table and a picture of each curve beside it, and exits with 1 where a promise was broken. How it is
measured: measuring.py; the peers: peers.py; what counts as better: table.py. One thread. Eager against eager is the first row
and shows the noise. glibc's malloc keeps what is freed (worker.KEEP_FREED says why). No row takes longer than its timeout; what does is a row with an error.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import table
from draw import draw_curves
from machine import describe_machine, write_json
from measuring import Bench, Row, choose_budgets
from peers import CHECKPOINT, COMPILE_BUDGETS, SELECTIVE, name_of_compiled
from worker import EAGER, KEEP_FREED, MEMFIT
from workloads import WORKLOADS

QUICK_PEERS = (CHECKPOINT, SELECTIVE)
PEERS = (*QUICK_PEERS, *map(name_of_compiled, COMPILE_BUDGETS))
IDLE_PERCENT = 110
NUM_BUDGETS, QUICK_NUM_BUDGETS = 8, 3
NUM_PAIRS, NUM_PEER_PAIRS, QUICK_NUM_PAIRS = 4, 3, 1
TIMEOUT_SECONDS = 300.0


def measure_workload(name: str, *, quick: bool, timeout_seconds: float) -> list[Row]:
    """All rows of one workload: eager against itself, the peers, memfit from idle down to its floor, and where it aims."""
    num_pairs, num_peer_pairs = (QUICK_NUM_PAIRS, QUICK_NUM_PAIRS) if quick else (NUM_PAIRS, NUM_PEER_PAIRS)
    with Bench(WORKLOADS[name], num_pairs=num_pairs, timeout_seconds=timeout_seconds) as bench:
        bench.measure(EAGER)
        peers = [bench.measure(peer, num_pairs=num_peer_pairs) for peer in (QUICK_PEERS if quick else PEERS)]
        bench.measure(MEMFIT, bench.eager.peak * IDLE_PERCENT // 100, table.IDLE, num_peer_pairs)
        bench.measure(MEMFIT, bench.eager.peak // 2, "half of eager's peak")  # its plan names the smallest budget
        if floor_bytes := bench.measure_floor()["budget_bytes"]:
            peaks = [(row["variant"], row["peak_bytes"]) for row in peers if "error" not in row]
            num_budgets = QUICK_NUM_BUDGETS if quick else NUM_BUDGETS
            for budget_bytes, label in choose_budgets(floor_bytes, bench.eager.peak, peaks, num_budgets):
                if label != table.FLOOR:
                    bench.measure(MEMFIT, budget_bytes, label)
            for activation_mib in (mib for workload, mib, ratio in table.AIMS if workload == name and ratio is not None):
                aim_bytes = activation_mib * table.MIB + bench.eager.peak - bench.eager.activations
                if not quick and aim_bytes >= floor_bytes:
                    bench.measure(MEMFIT, aim_bytes, f"{activation_mib} MiB of activations")
        bench.measure_planned_floor()
    others = [row for row in bench.rows if row["variant"] != MEMFIT]
    ours = [row for row in bench.rows if row["variant"] == MEMFIT]
    return [*others, *sorted(ours, key=lambda row: -(row["budget_bytes"] or 0))]


def make_document(rows: list[Row], *, quick: bool, run_seconds: int) -> dict[str, Any]:
    """The result file: the rows, what they show, and on what they were measured."""
    return {
        "format": "memfit-benchmark",
        "version": 2,
        "clock": "cpu",
        **describe_machine(),
        "environment": KEEP_FREED,
        "quick": quick,
        "run_seconds": run_seconds,
        "rows": rows,
        "better_peers": table.find_better_peers(rows),
        "aims": table.find_aims(rows),
        "broken_promises": table.find_broken_promises(rows),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="comma-separated (default: all)")
    parser.add_argument("--quick", action="store_true", help="three budgets, two peers, one timed pair")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_SECONDS, help="seconds a row may take (default: %(default)g)")
    parser.add_argument("-o", "--output", type=Path, required=True, help="JSON; a Markdown table and pictures go beside it")
    args = parser.parse_args()
    names = args.workloads.split(",")
    if unknown := [name for name in names if name not in WORKLOADS]:
        parser.error(f"unknown workload {unknown[0]!r}; there are {', '.join(WORKLOADS)}")

    os.environ.update(KEEP_FREED)  # of the processes that are measured
    start = time.monotonic()
    print(table.HEADER, file=sys.stderr)
    rows: list[Row] = []
    for name in names:
        rows += measure_workload(name, quick=args.quick, timeout_seconds=args.timeout)
        document = make_document(rows, quick=args.quick, run_seconds=round(time.monotonic() - start))
        write_json(args.output, document)  # after each, so that a run cut short is no run lost
    text = table.draw_table(document)
    args.output.with_suffix(".md").write_text(text, encoding="utf-8")
    draw_curves(args.output)
    print(text)
    return 1 if document["broken_promises"] else 0


if __name__ == "__main__":
    sys.exit(main())
