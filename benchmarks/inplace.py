"""Every call in place that may be, against the same step as it is written: bytes at the peak, bytes until backward, equality, time.

    python benchmarks/inplace.py -o benchmarks/results/inplace.json

The workloads of workloads.py as they are, and W3 and W4 with their `nn.ReLU(inplace=True)` written as `nn.ReLU()` and as
`nn.LeakyReLU(0.1)`. Each runs in a process of its own, without a budget and without recompute. Predicted bytes are the replay of the
edited trace, measured ones the allocator's own trace (oracle.py) of the third step; equality is of every bit of loss, parameters,
gradients, buffers, optimizer state and generators after it; time is CPU seconds of steps in turn with plain ones in the same process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import memfit
import workloads
from machine import describe_machine, draw_machine
from memfit.core.inplace import edit, find_idle, find_sites, weigh
from memfit.core.plan import Move
from memfit.engine.tape import Tape
from memfit.techniques import inplace
from oracle import compare_digests, digest_state, measure_step, time_step

AS_IT_IS = "as it is"
VARIANTS = {AS_IT_IS: None, "ReLU()": lambda inplace: _RELU(), "LeakyReLU(0.1)": lambda inplace: nn.LeakyReLU(0.1)}
ROWS = [*((name, AS_IT_IS) for name in ("W1", "W2", "W3", "W4")), *((w, v) for w in ("W3", "W4") for v in list(VARIANTS)[1:])]
NUM_STEPS, MIB = 3, 2**20
_RELU = nn.ReLU
_NOTE = """\
Predicted is the replay of a trace, whose peak on convolution nets is a per cent or two below the allocator's (workspaces). The
allocator's own peak differs from run to run by some MiB on W4, in one process 614 and 617 MiB plain and 619 and 615 MiB in place, so with
`ReLU()`, where nothing is promised, nothing is measured either. W2 came out at 1046 and at 1078 MiB in two runs; why is not known. CPU time
is of few pairs on a shared machine."""


def run(name: str, places: tuple[str, ...], num_pairs: int) -> tuple[dict[str, str], int, Tape, list[float]]:
    """Digest and allocator's peak of the third step with the calls at these places in place, the tape, and time ratios to plain."""
    setup = workloads.WORKLOADS[name].make()

    def step() -> torch.Tensor:
        setup.optimizer.zero_grad()
        loss = setup.forward_backward()
        setup.optimizer.step()
        return loss

    tape = Tape()
    inplace.apply(tape, [Move("inplace", "", (), calls=places)])
    ratios = []

    def step_on_tape() -> torch.Tensor:
        tape.enter()
        try:
            return step()
        finally:
            tape.end_step()
            tape.exit()

    ours = step_on_tape if places else step
    for _ in range(NUM_STEPS - 1):
        ours()
    loss, memory = measure_step(ours)
    digest = digest_state(setup.model, setup.optimizer, loss)
    for number in range(num_pairs if places else 0):
        first, second = (ours, step) if number % 2 else (step, ours)
        seconds = [time_step(first)[0], time_step(second)[0]]
        ratios.append(seconds[0] / seconds[1] if number % 2 else seconds[1] / seconds[0])
    return digest, memory.peak_bytes, tape, ratios


def measure(name: str, variant: str, num_pairs: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    if (replacement := VARIANTS[variant]) is not None:
        nn.ReLU = replacement  # type: ignore[misc, assignment]
    setup = workloads.WORKLOADS[name].make()
    trace = memfit.trace(setup.step, 2)
    del setup
    sites = find_sites(trace)
    calls = [site.call for site in sites if not site.reason]
    worth = weigh(trace, edit(trace, calls))
    expected, plain_bytes, _, _ = run(name, (), 0)
    row: dict[str, Any] = {
        "workload": name, "variant": variant, "num_calls": len(calls), "num_refused": len(sites) - len(calls),
        "num_idle": len(find_idle(trace)), "predicted_bytes": worth.peak_bytes, "held_bytes": worth.held_bytes, "peak_bytes": plain_bytes,
    }  # fmt: skip
    if calls:
        digest, ours_bytes, tape, ratios = run(name, tuple(trace.calls[call].place for call in calls), num_pairs)
        row |= {
            "measured_bytes": plain_bytes - ours_bytes, "equal": not compare_digests(digest, expected),
            "num_overwritten": tape.counts.num_overwritten, "num_not_overwritten": tape.counts.num_not_overwritten,
            "cpu_time_ratio": statistics.median(ratios) if ratios else None,
        }  # fmt: skip
    return row


def draw(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| workload | activations | peak MiB | calls in place | refused | less at the peak, predicted | measured | less until backward | equal | CPU time | own in place for nothing |",
        "|---|---|---:|---:|---:|---:|---:|---:|---|---:|---:|",
    ]
    for row in rows:
        measured = (
            f"{row['measured_bytes'] / MIB:.2f} MiB ({row['measured_bytes'] / row['peak_bytes']:.1%})"
            if row["num_calls"]
            else "-"
        )
        ratio = f"{row['cpu_time_ratio']:.2f}x" if row.get("cpu_time_ratio") else "-"
        equal = "-" if not row["num_calls"] else "yes" if row["equal"] else "NO"
        lines.append(
            f"| {row['workload']} | {row['variant']} | {row['peak_bytes'] / MIB:.1f} | {row['num_calls']} | {row['num_refused']} "
            f"| {row['predicted_bytes'] / MIB:.2f} MiB | {measured} | {row['held_bytes'] / MIB:.2f} MiB | {equal} | {ratio} | {row['num_idle']} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path("inplace.json"))
    parser.add_argument("--pairs", type=int, default=5, help="timed pairs of steps")
    parser.add_argument("--one", nargs=2, metavar=("WORKLOAD", "VARIANT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(*options.one, options.pairs)))
        return
    rows = json.loads(options.output.read_text())["rows"] if options.output.exists() else []  # goes on where it was stopped
    for name, variant in ROWS:
        if any((row["workload"], row["variant"]) == (name, variant) for row in rows):
            continue
        command = [sys.executable, __file__, "--pairs", str(options.pairs), "--one", name, variant]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stderr)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        document = {**describe_machine(), "rows": rows}
        options.output.write_text(json.dumps(document, indent=1) + "\n")
        options.output.with_suffix(".md").write_text("\n".join([*draw(rows), "", _NOTE, "", draw_machine(document), ""]))
        print(json.dumps(rows[-1]), flush=True)
    sys.exit(not all(row.get("equal", True) and not row.get("num_not_overwritten") for row in rows))


if __name__ == "__main__":
    main()
