"""Opt levels O0 to O3 on W1-W4, in bfloat16 and float16, alone and with a budget, beside torch.autocast + GradScaler written by hand.

    python benchmarks/precision.py -o benchmarks/results/precision.json --seconds 120

Each variant runs in a process of its own, one thread, and is given up after `--seconds` of CPU time (float16 has no fast matrix products on many CPUs: such
rows say so). Peaks are the allocator's own trace of the third step and exact. Times are CPU seconds of the steps after it over those of float32, each
in its own process one after the other, so rough. `equal` compares every bit of loss, parameters, gradients, buffers, optimizer state and generators after three
steps with autocast + GradScaler by hand.

With `--seeds` it trains the digits network of `examples/` instead and writes the last losses: how near each level comes to float32.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import signal
import statistics
import sys
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # before torch: the profiler else writes a line on every start and stop

import torch

import oracle
from run import describe_machine
from workloads import WORKLOADS, Setup

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
FLOAT32, BY_HAND = "float32", "by hand"
LEVELS = ("O0", "O1", "O2", "O3")
NUM_TIMED_STEPS = 2
BUDGET_PERCENT = 75  # of what autocast by hand peaks at
MIB = 1024**2

Row = dict[str, Any]
Step = Callable[[], torch.Tensor]  # forward, backward and optimizer, gradients left in place


def measure(workload: str, variant: str, half: str, budget_bytes: int | None) -> Row:
    """Peak, digest and seconds of one variant, in this process."""
    torch.set_num_threads(1)
    with ExitStack() as stack:
        session = None
        if variant in LEVELS:
            from memfit.core.precision import choose
            from memfit.runtime.precision import Precision

            applied = stack.enter_context(Precision(choose(variant, half), lambda: session and session.leave_out_step()))
        setup = WORKLOADS[workload].make()
        if budget_bytes is not None:
            import memfit

            session = stack.enter_context(memfit.fit(setup.model, setup.optimizer, budget=budget_bytes))
        step = _by_hand(setup, HALVES[half]) if variant == BY_HAND else _as_written(setup)
        record = oracle.record_alone if session is None else oracle.record_shared
        peaks = []
        for _ in range(3):
            loss, memory = oracle.measure_step(step, record)
            peaks.append(memory.peak_bytes)
            digest = oracle.digest_state(setup.model, setup.optimizer, loss)
            setup.optimizer.zero_grad(set_to_none=True)
        row: Row = {"peak_bytes": peaks[-1] if session is None else max(peaks), "digest": digest, "loss": loss.item()}
        seconds = []
        for _ in range(NUM_TIMED_STEPS):
            seconds.append(oracle.time_step(step)[0])
            setup.optimizer.zero_grad(set_to_none=True)
        row["cpu_seconds"] = statistics.median(seconds)
        if variant in LEVELS:
            row["told"] = applied.messages()
        if session is not None:
            row["within_budget"] = max(peaks) <= budget_bytes
        return row


def _as_written(setup: Setup) -> Step:
    def step() -> torch.Tensor:
        loss = setup.forward_backward()
        setup.optimizer.step()
        return loss

    return step


def _by_hand(setup: Setup, half: torch.dtype) -> Step:
    scaler = torch.amp.GradScaler("cpu", enabled=half is torch.float16)

    def step() -> torch.Tensor:
        with torch.autocast("cpu", half):
            loss = setup.compute_loss(setup.model, setup.batch)
        scaler.scale(loss).backward()
        scaler.step(setup.optimizer)
        scaler.update()
        return loss.detach()

    return step


# ---- in a process of its own -----------------------------------------------------------------------------------------


def run_apart(function: Callable[..., Any], arguments: tuple[Any, ...], max_seconds: float) -> Any:
    """`function(*arguments)` in a fresh process; a row with 'error' if it raises or takes more CPU seconds."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(theirs, function, arguments, max_seconds), daemon=True)
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        process.join()
        late = process.exitcode == -signal.SIGXCPU
        return {
            "error": f"not finished in {max_seconds:.0f} s of CPU time" if late else f"the process died ({process.exitcode})"
        }
    finally:
        process.join()


def _serve(pipe: Connection, function: Callable[..., Any], arguments: tuple[Any, ...], max_seconds: float) -> None:
    resource.setrlimit(
        resource.RLIMIT_CPU, (int(max_seconds), int(max_seconds) + 5)
    )  # wall time says nothing on a shared machine
    try:
        pipe.send(function(*arguments))
    except Exception as error:
        pipe.send({"error": f"{type(error).__name__}: {error}"})


def measure_workload(workload: str, halves: list[str], max_seconds: float) -> list[Row]:
    """All rows of one workload."""
    plain = run_apart(measure, (workload, FLOAT32, "bf16", None), max_seconds)
    rows = [{"workload": workload, "variant": FLOAT32, "half": "", **plain}]
    variants: list[tuple[str, int | None]] = [(BY_HAND, None), *((level, None) for level in LEVELS[1:]), ("O1", BUDGET_PERCENT)]
    for half in halves:
        by_hand: Row = {}
        for variant, percent in variants:
            row: Row = {"workload": workload, "variant": variant, "half": half, "percent": percent}
            if "error" in by_hand:  # the same kernels: it would not end sooner
                rows.append({**row, "error": f"by hand {by_hand['error']}"})
                continue
            row["budget_bytes"] = None if percent is None else by_hand["peak_bytes"] * percent // 100
            row |= run_apart(measure, (workload, variant, half, row["budget_bytes"]), max_seconds)
            if variant == BY_HAND:
                by_hand = row
            if "digest" in row and variant == "O1":
                row["equal"] = "digest" in by_hand and not oracle.compare_digests(row["digest"], by_hand["digest"])
            rows.append(row)
            print(draw_row(row, rows[0]), file=sys.stderr, flush=True)
    if "peak_bytes" in rows[0]:
        zero = run_apart(measure, (workload, "O0", "bf16", None), max_seconds)
        zero["equal"] = "digest" in zero and not oracle.compare_digests(zero["digest"], rows[0]["digest"])
        rows.insert(1, {"workload": workload, "variant": "O0", "half": "", **zero})
    for row in rows:
        row["peak_of_float32"] = _ratio(row, rows[0], "peak_bytes")
        row["cpu_time_of_float32"] = _ratio(row, rows[0], "cpu_seconds")
    for row in rows:
        row.pop("digest", None)
    return rows


def _ratio(row: Row, plain: Row, name: str) -> float | None:
    return row[name] / plain[name] if name in row and name in plain else None


# ---- convergence -----------------------------------------------------------------------------------------------------


def train_digits(level: str, half: str, seed: int, num_epochs: int) -> Row:
    """The mean loss of the last epoch, and the accuracy, of the digits network."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    import torch.nn.functional as F
    from sklearn.datasets import load_digits

    import digits_cnn
    from memfit.core.precision import choose
    from memfit.runtime.precision import Precision

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)
    num_test = len(labels) // 5
    with Precision(choose(level, half)) as applied:
        model = digits_cnn.build_model(16, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)
        for _ in range(num_epochs):
            losses = []
            for places in (torch.randperm(len(labels) - num_test) + num_test).split(120):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(images[places]), labels[places])
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        accuracy = digits_cnn.evaluate(model, images[:num_test], labels[:num_test])
    return {"loss": statistics.mean(losses), "accuracy": accuracy, "told": applied.messages()}


def measure_convergence(num_seeds: int, num_epochs: int, max_seconds: float) -> list[Row]:
    """Last losses of every level over the seeds, beside float32's."""
    rows = []
    for level, half in [("O0", "bf16"), *((level, half) for half in HALVES for level in LEVELS[1:])]:
        runs = [run_apart(train_digits, (level, half, seed, num_epochs), max_seconds) for seed in range(num_seeds)]
        rows.append({"level": level, "half": "" if level == "O0" else half, "runs": runs})
        print(draw_convergence(rows[-1], rows[0]), file=sys.stderr, flush=True)
    return rows


# ---- drawing ---------------------------------------------------------------------------------------------------------

HEADER = (
    "| workload | variant | half | budget MiB | peak MiB | of float32 | CPU time of float32 | bit for bit |\n"
    "|---|---|---|---:|---:|---:|---:|---|"
)
CONVERGENCE_HEADER = "| level | half | last loss, each seed | from float32, same seed | accuracy |\n|---|---|---|---|---|"


def draw_row(row: Row, plain: Row) -> str:
    """One line of the Markdown table."""
    name = row["variant"] + (f" at {row['percent']} % of by hand" if row.get("percent") else "")
    start = f"| {row['workload']} | {name} | {row['half']} | {_mib(row.get('budget_bytes'))} "
    if "error" in row:
        return start + f"| – | – | – | not run: {row['error'][:90]} |"
    peak, seconds = _ratio(row, plain, "peak_bytes"), _ratio(row, plain, "cpu_seconds")
    equal = {True: "yes", False: "NO", None: ""}[row.get("equal")]
    over = "" if row.get("within_budget", True) else " **over**"
    return start + f"| {_mib(row['peak_bytes'])}{over} | {peak or 0:.2f} | {seconds or 0:.2f} | {equal} |"


def draw_convergence(row: Row, plain: Row) -> str:
    """One line of the convergence table."""
    start = f"| {row['level']} | {row['half']} "
    if any("error" in run for run in row["runs"]):
        return start + "| not run: " + next(run["error"] for run in row["runs"] if "error" in run) + " | | |"
    losses = ", ".join(f"{run['loss']:.4f}" for run in row["runs"])
    apart = [run["loss"] / base["loss"] - 1 for run, base in zip(row["runs"], plain["runs"], strict=True)]
    accuracy = statistics.mean(run["accuracy"] for run in row["runs"])
    return start + f"| {losses} | {min(apart):+.1%} to {max(apart):+.1%} | {accuracy:.1%} |"


def draw_document(document: dict[str, Any]) -> str:
    """The whole result as Markdown."""
    about = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    machine = document["hardware"]
    lines = [
        f"{about}; {machine['cpu']}, {machine['num_cores']} cores, one thread; commit {document['commit']}; {document['date']}",
        "",
        "Peaks are exact; times were taken on a shared machine, one variant after the other, and are rough.",
        "",
    ]
    if document["rows"]:
        plain = {row["workload"]: row for row in document["rows"] if row["variant"] == FLOAT32}
        lines += [HEADER, *(draw_row(row, plain[row["workload"]]) for row in document["rows"]), ""]
    if document["convergence"]:
        lines += [
            CONVERGENCE_HEADER,
            *(draw_convergence(row, document["convergence"][0]) for row in document["convergence"]),
            "",
        ]
    return "\n".join(lines)


def _mib(num_bytes: int | None) -> str:
    return "–" if num_bytes is None else f"{num_bytes / MIB:.1f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="comma-separated; '' for none")
    parser.add_argument("--halves", default=",".join(HALVES), help="comma-separated")
    parser.add_argument("--seconds", type=float, default=120, help="give a variant up after this many of CPU time")
    parser.add_argument("--seeds", type=int, default=0, help="also train the digits network with so many seeds a level")
    parser.add_argument("--epochs", type=int, default=10, help="of that training")
    parser.add_argument("-o", "--output", type=Path, required=True, help="JSON; a Markdown table goes beside it")
    args = parser.parse_args()
    names = [name for name in args.workloads.split(",") if name]
    if unknown := [name for name in names if name not in WORKLOADS]:
        parser.error(f"unknown workload {unknown[0]!r}; there are {', '.join(WORKLOADS)}")
    print(HEADER, file=sys.stderr)
    document: dict[str, Any] = {"format": "memfit-precision-benchmark", "version": 1, **describe_machine()}
    document["rows"] = [row for name in names for row in measure_workload(name, args.halves.split(","), args.seconds)]
    document["convergence"] = measure_convergence(args.seeds, args.epochs, args.seconds) if args.seeds else []
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    args.output.with_suffix(".md").write_text(draw_document(document), encoding="utf-8")
    print(draw_document(document))
    differing = [row for row in document["rows"] if row.get("equal") is False or row.get("within_budget") is False]
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
