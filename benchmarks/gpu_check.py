"""One check on a CUDA card, at most five minutes: W1-W4 under budgets, equal to eager, peaks beside the caching allocator's.

    python benchmarks/gpu_check.py [-o results/gpu.json] [--minutes 5]

Deterministic algorithms are on (and TF32 off), so that eager equals itself. Peaks are `torch.cuda.max_memory_allocated` and
`max_memory_reserved` of whole steps; the budget is on the process's reserved bytes. Where there is no card it says so and exits 2.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from rich.console import Console
from rich.table import Table

import memfit
from oracle import compare_digests, digest_state
from workloads import WORKLOADS

NUM_STEPS = 5
PERCENTS = (110, 75, 60)
MIB = 1024**2
Row = dict[str, Any]


def train(name: str, budget_bytes: int | None) -> Row:
    """NUM_STEPS steps of a workload on the card, plain or inside a budget; peaks and times of each step, state at the end."""
    setup = WORKLOADS[name].make("cuda")
    torch.cuda.empty_cache()
    session = memfit.fit(setup.model, setup.optimizer, budget=budget_bytes) if budget_bytes else None
    allocated, reserved, seconds = [], [], []
    digest: dict[str, str] = {}
    if session is not None:
        session.__enter__()
    try:
        for step in range(NUM_STEPS):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            loss = setup.forward_backward()
            if step == NUM_STEPS - 1:
                torch.cuda.synchronize()
                digest = digest_state(setup.model, setup.optimizer, loss)
            setup.update()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
            allocated.append(torch.cuda.max_memory_allocated())
            reserved.append(torch.cuda.max_memory_reserved())
    finally:
        if session is not None:
            session.__exit__(*sys.exc_info())
    row: Row = {"allocated_bytes": allocated, "reserved_bytes": reserved, "step_seconds": seconds, "digest": digest}
    if session is not None:
        row["predicted_peak_bytes"] = session.result().predicted_peak_bytes
        row["messages"] = session.messages
    return row


def check_workload(name: str) -> list[Row]:
    """Eager, then the budgets in percent of eager's reserved peak."""
    eager = train(name, None)
    _clear()
    eager_peak = max(eager["reserved_bytes"])
    rows = [{"workload": name, "variant": "eager", **eager}]
    for percent in PERCENTS:
        budget_bytes = eager_peak * percent // 100
        row: Row = {"workload": name, "variant": f"{percent} %", "budget_bytes": budget_bytes}
        try:
            row |= train(name, budget_bytes)
            row["differing"] = compare_digests(row["digest"], eager["digest"])
            row["within_budget"] = max(row["reserved_bytes"]) <= budget_bytes
            row["time_ratio"] = min(row["step_seconds"][2:-1]) / min(eager["step_seconds"][2:-1])
        except memfit.MemfitError as error:
            row["error"] = f"{type(error).__name__}: {error}"
        rows.append(row)
        _clear()
    for row in rows:
        row.pop("digest", None)
    return rows


def _clear() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def draw(rows: list[Row]) -> Table:
    table = Table(title=f"{torch.cuda.get_device_name()}, torch {torch.__version__}, MiB of whole steps")
    for heading in ("", "variant", "budget", "reserved", "allocated", "predicted", "time", "equal", "within"):
        table.add_column(heading, justify="left" if heading in ("", "variant") else "right")
    for row in rows:
        if "error" in row:
            table.add_row(row["workload"], row["variant"], _mib(row.get("budget_bytes")), row["error"][:60])
            continue
        equal = "" if row["variant"] == "eager" else "yes" if not row["differing"] else f"NO ({len(row['differing'])})"
        table.add_row(
            row["workload"],
            row["variant"],
            _mib(row.get("budget_bytes")),
            _mib(max(row["reserved_bytes"])),
            _mib(max(row["allocated_bytes"])),
            _mib(row.get("predicted_peak_bytes")),
            f"{row['time_ratio']:.2f}x" if "time_ratio" in row else "",
            equal,
            {True: "yes", False: "NO", None: ""}[row.get("within_budget")],
        )
    return table


def _mib(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / MIB:.1f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--minutes", type=float, default=5.0, help="start no further workload after this")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("There is no CUDA device: nothing was checked.", file=sys.stderr)
        return 2
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    start = time.monotonic()
    rows: list[Row] = []
    for name in WORKLOADS:
        if time.monotonic() - start < arguments.minutes * 60:
            rows += check_workload(name)
    Console(width=110).print(draw(rows))
    import overhead

    figures = overhead.measure()
    for what, microseconds in figures.items():
        print(f"{microseconds:8.2f} us  {what}")
    if arguments.output:
        document = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows, "overhead_us": figures}
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")
    failed = [row for row in rows if row.get("differing") or row.get("within_budget") is False]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
