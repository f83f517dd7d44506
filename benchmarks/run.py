"""W1-W4 under memory budgets: peak, equality with plain eager and time, for eager, checkpoint per block and memfit.

    python benchmarks/run.py -o benchmarks/results/cpu.json           # all of it, about an hour on 2 cores
    python benchmarks/run.py --workloads W1,W3 --quick -o quick.json  # fewer budgets, fewer timed steps

Writes the JSON, a Markdown table beside it, and exits with 1 where a promise was broken.

Memory is the allocator's own trace of each of the first five steps (oracle.py). Equality is of every bit of loss,
parameters, gradients, buffers, optimizer state and generators after the fifth, against plain eager. Time is CPU seconds
of the steps after that, with one thread, each step beside one of plain eager, as the median ratio of the pairs: another
job on the machine, or a slower clock, then hits both. Eager against eager is the first row and shows the noise.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import textwrap
from importlib import metadata
from pathlib import Path
from typing import Any

from oracle import compare_digests
from worker import CHECKPOINT, EAGER, MEMFIT, Variant, VariantError
from workloads import WORKLOADS

NUM_TRACED_STEPS = 5
IDLE_PERCENT, PERCENTS, QUICK_PERCENTS = 110, (90, 75, 60, 50, 40), (60,)
NUM_PAIRS, QUICK_NUM_PAIRS = 6, 2
MAX_TIME_RATIO, MAX_PREDICTION_ERROR = 1.5, 0.01
FLOOR, FLOOR_TRIES = "floor", 8
MIB = 1024**2

Row = dict[str, Any]


def measure(variant: Variant, partner: Variant, eager_digest: dict[str, str] | None, num_pairs: int) -> Row:
    """The numbers of a running variant, its digest among them. Raises VariantError where it fails or refuses."""
    row: Row = {}
    bytes_of_steps = [variant.trace_step() for _ in range(NUM_TRACED_STEPS - 1)]
    last, digest = variant.finish_with_digest()
    bytes_of_steps.append(last)
    row["baseline_bytes"] = [baseline for baseline, _ in bytes_of_steps]
    row["step_peak_bytes"] = peaks = [peak for _, peak in bytes_of_steps]
    row["peak_bytes"] = max(peaks)
    row["activation_bytes"] = max(peak - baseline for baseline, peak in bytes_of_steps)
    row["within_budget"] = variant.budget_bytes is None or max(peaks) <= variant.budget_bytes
    differing = compare_digests(digest, digest if eager_digest is None else eager_digest)
    row |= {"equal": not differing, "num_parts_compared": len(digest), "differing": differing}
    row |= _measure_time(variant, partner, num_pairs)
    row |= variant.facts()
    if predicted := row.get("predicted_peak_bytes"):
        row["prediction_error"] = predicted / max(peaks[2:]) - 1  # the plan is settled from the third step on
    return {**row, "digest": digest}


def _measure_time(variant: Variant, partner: Variant, num_pairs: int) -> Row:
    pairs = []
    for place in range(num_pairs + 1):
        if place % 2:  # who goes second finds the other's data in the shared caches
            ours, eager = variant.time_step(), partner.time_step()
        else:
            eager, ours = partner.time_step(), variant.time_step()
        pairs.append((eager, ours))
    del pairs[0]  # warms both up
    return {
        "cpu_time_ratio": statistics.median(ours[0] / eager[0] for eager, ours in pairs),
        "wall_time_ratio": statistics.median(ours[1] / eager[1] for eager, ours in pairs),
        "eager_cpu_seconds": statistics.median(eager[0] for eager, _ in pairs),
        "num_pairs": num_pairs,
    }


def measure_workload(name: str, *, quick: bool) -> list[Row]:
    """All rows of one workload: eager against itself, checkpoint, memfit from idle down to its floor."""
    num_pairs = QUICK_NUM_PAIRS if quick else NUM_PAIRS
    with Variant(name, EAGER) as partner:
        for _ in range(NUM_TRACED_STEPS):  # as old as what it is compared with: a young process pays for page faults
            partner.trace_step()
        rows = [_try(Variant(name, EAGER), partner, None, num_pairs)]
        eager_peak_bytes, digest = rows[0]["peak_bytes"], rows[0].pop("digest")
        rows.append(_try(Variant(name, CHECKPOINT), partner, digest, num_pairs))
        for percent in (IDLE_PERCENT, *(QUICK_PERCENTS if quick else PERCENTS)):
            variant = Variant(name, MEMFIT, eager_peak_bytes * percent // 100)
            rows.append(_try(variant, partner, digest, num_pairs, percent))
        rows.append(_measure_floor(name, rows, partner, digest, num_pairs))
    for row in rows:
        row.pop("digest", None)
        if "peak_bytes" in row:
            row["peak_of_eager"] = row["peak_bytes"] / eager_peak_bytes
    return rows


def _measure_floor(name: str, rows: list[Row], partner: Variant, digest: dict[str, str], num_pairs: int) -> Row:
    """The smallest budget memfit calls feasible: what it says it needs, tried, and raised to what it then says."""
    told = [row[key] for row in rows for key in ("floor_bytes", "needed_bytes") if row.get(key)]
    if not told:
        return {"workload": name, "variant": MEMFIT, "percent": FLOOR, "error": "memfit named no smallest budget"}
    budget_bytes = min(told)
    for _ in range(FLOOR_TRIES):
        row = _try(Variant(name, MEMFIT, budget_bytes), partner, digest, num_pairs, FLOOR)
        if (row.get("needed_bytes") or 0) <= budget_bytes:
            break
        budget_bytes = row["needed_bytes"]
    return row


def _try(
    variant: Variant,
    partner: Variant,
    eager_digest: dict[str, str] | None,
    num_pairs: int,
    percent: int | str | None = None,
) -> Row:
    row: Row = {"workload": variant.workload, "variant": variant.name, "percent": percent}
    row["budget_bytes"] = variant.budget_bytes
    try:
        with variant:
            row |= measure(variant, partner, eager_digest, num_pairs)
    except VariantError as error:
        row |= {"error": str(error), "error_kind": error.kind, "needed_bytes": error.needed_bytes}
    print(draw_row(row), file=sys.stderr, flush=True)
    return row


def find_broken_promises(rows: list[Row]) -> list[str]:
    """What memfit promised and did not keep, one sentence each."""
    broken = []
    for row in (row for row in rows if row["variant"] == MEMFIT):
        place = f"{row['workload']} at {_mib(row.get('budget_bytes'))} MiB"
        if "error" in row:
            if row.get("error_kind") != "BudgetError":
                broken.append(f"{place}: {row['error']}")
            continue
        if not row["within_budget"]:
            broken.append(f"{place}: peak {_mib(row['peak_bytes'])} MiB.")
        if not row["equal"]:
            broken.append(f"{place}: {len(row['differing'])} parts differ from plain eager, first {row['differing'][0]}.")
        if row["percent"] == IDLE_PERCENT and row["installed"]:
            broken.append(f"{place}: the step fits as it is and something was installed.")
        if row["cpu_time_ratio"] > MAX_TIME_RATIO:
            broken.append(f"{place}: {row['cpu_time_ratio']:.2f} times the CPU time of plain eager.")
        if abs(row.get("prediction_error") or 0) > MAX_PREDICTION_ERROR:
            broken.append(f"{place}: the predicted peak is off by {row['prediction_error']:+.1%}.")
    for name in sorted({row["workload"] for row in rows}):
        ours = [row for row in rows if row["workload"] == name]
        floor, checkpoint = ours[-1], ours[1]
        if floor.get("peak_bytes", sys.maxsize) > checkpoint.get("peak_bytes", 0):
            text = f"{_mib(floor.get('peak_bytes'))} MiB, checkpoint per block {_mib(checkpoint.get('peak_bytes'))} MiB"
            broken.append(f"{name}: smallest feasible peak {text}.")
    return broken


HEADER = (
    "| workload | variant | budget MiB | peak MiB | of eager | over start MiB | CPU time (wall) | equal | predicted |\n"
    "|---|---|---:|---:|---:|---:|---:|---|---:|"
)


def draw_row(row: Row) -> str:
    """One line of the Markdown table."""
    percent = row.get("percent")
    variant = row["variant"] + (f" {percent}{'' if percent == FLOOR else ' %'}" if percent else "")
    start = f"| {row['workload']} | {variant} | {_mib(row.get('budget_bytes'))} "
    if "error" in row:
        return start + f"| – | – | – | – | – | {textwrap.shorten(row['error'], 90, placeholder=' …')} |"
    ratio = f"{row['peak_of_eager']:.2f}" if "peak_of_eager" in row else "–"
    equal = "yes" if row["equal"] else f"no: {len(row['differing'])} of {row['num_parts_compared']} parts"
    error = row.get("prediction_error")
    return start + (
        f"| {_mib(row['peak_bytes'])}{'' if row['within_budget'] else ' **over**'} | {ratio} "
        f"| {_mib(row['activation_bytes'])} | {row['cpu_time_ratio']:.2f} ({row['wall_time_ratio']:.2f}) "
        f"| {equal} | {'–' if error is None else f'{error:+.2%}'} |"
    )


def draw_table(document: dict[str, Any]) -> str:
    """The whole result as Markdown."""
    about = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    machine = document["hardware"]
    lines = [
        f"{about}; {machine['cpu']}, {machine['num_cores']} cores, one thread; commit {document['commit']}; {document['date']}",
        "",
        HEADER,
        *(draw_row(row) for row in document["rows"]),
        "",
        "Promises broken: " + ("none." if not document["broken_promises"] else ""),
        *(f"- {sentence}" for sentence in document["broken_promises"]),
    ]
    return "\n".join(lines).rstrip() + "\n"


def describe_machine() -> dict[str, Any]:
    """Versions, commit, hardware and date: what a number means nothing without."""
    names = ("memfit", "torch", "numpy", "scipy")
    root = Path(__file__).parent

    def git(*args: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = models[0] if models else cpu
    return {
        "versions": {"python": platform.python_version()} | {name: _find_version(name) for name in names},
        "commit": (git("rev-parse", "--short=12", "HEAD") or "unknown")
        + (" + changes" if git("status", "--porcelain") else ""),
        "hardware": {"cpu": cpu, "num_cores": os.cpu_count()},
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def _find_version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _mib(num_bytes: int | None) -> str:
    return "–" if num_bytes is None else f"{num_bytes / MIB:.1f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="comma-separated (default: all)")
    parser.add_argument("--quick", action="store_true", help="one budget and the floor, two timed pairs")
    parser.add_argument("-o", "--output", type=Path, required=True, help="JSON; a Markdown table goes beside it")
    args = parser.parse_args()
    names = args.workloads.split(",")
    if unknown := [name for name in names if name not in WORKLOADS]:
        parser.error(f"unknown workload {unknown[0]!r}; there are {', '.join(WORKLOADS)}")

    print(HEADER, file=sys.stderr)
    rows = [row for name in names for row in measure_workload(name, quick=args.quick)]
    document = {
        "format": "memfit-benchmark",
        "version": 1,
        **describe_machine(),
        "quick": args.quick,
        "rows": rows,
        "broken_promises": find_broken_promises(rows),
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    table = draw_table(document)
    args.output.with_suffix(".md").write_text(table, encoding="utf-8")
    print(table)
    return 1 if document["broken_promises"] else 0


if __name__ == "__main__":
    sys.exit(main())
