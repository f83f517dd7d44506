"""Opt levels O0 to O3 on W1-W4 and BERT, in bfloat16 and float16, alone and with a budget, beside torch.autocast + GradScaler written by hand.

    python benchmarks/precision.py -o benchmarks/results/precision.json                                  # about 12 minutes
    python benchmarks/precision.py --halves fp16 -o benchmarks/results/precision.json                    # about 40 minutes on a CPU
    python benchmarks/precision.py --workloads "BERT-base 16x384" --levels O1,O2,O3 --timed 1 -o benchmarks/results/precision.json   # 12 minutes, 10 GB

Each variant runs in a process of its own, one thread. Peaks are the allocator's own trace and exact: of the second step, when all state is there; under
a budget the highest of the first three, the measured ones among them. Times are CPU seconds of the steps after these over those of float32, each in its own
process one after the other, so rough. float16 is not timed: few CPUs have fast products in it (512 x 512 x 512: 103 ms here, bfloat16 1.3 ms), and the ratio would say
nothing of a card. `equal` compares every bit of loss, parameters, gradients, buffers, optimizer state and generators after two steps with autocast +
GradScaler by hand.

Two promises are checked besides, and the exit code is 1 where one is broken: a budget is kept, and with by hand's own peak for a budget O1 is no slower than by hand
(but for 10 %, the noise).

What is measured replaces its rows in the output file; others stay. With `--seeds` the digits network of `examples/` is trained instead, and the last losses
are written: how near each level comes to float32. Drawing: precision_table.py.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
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
from machine import describe_machine, write_json
from precision_table import BY_HAND, FLOAT32, HEADER, draw_convergence, draw_document, draw_row
from workloads import WORKLOADS, Setup, Workload

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LEVELS = ("O0", "O1", "O2", "O3")
NUM_STEPS, NUM_STEPS_IN_BUDGET = 2, 3
NUM_TIMED_STEPS = 2
UNTIMED = ("fp16",)
BUDGET_PERCENTS = (100, 75)  # of what autocast by hand peaks at
NOISE = 1.1

Row = dict[str, Any]
Step = Callable[[], torch.Tensor]  # forward, backward and optimizer, gradients left in place


def find_workload(name: str) -> Workload:
    """W1 to W4, or BERT question answering of any size as 'BERT-base 16x384'. Raises KeyError for another name."""
    if bert := re.fullmatch(r"BERT-(\w+) (\d+)x(\d+)", name):
        from transformers_models import make_bert_workload

        return make_bert_workload(bert[1], int(bert[2]), int(bert[3]))
    return WORKLOADS[name]


def measure(workload: str, variant: str, half: str, budget_bytes: int | None, num_timed: int) -> Row:
    """Peak, digest, lasting bytes and seconds of one variant, in this process."""
    torch.set_num_threads(1)
    with ExitStack() as stack:
        choice = None
        if variant in LEVELS:
            from memfit.core.precision import choose
            from memfit.runtime.precision import Precision

            choice = choose(variant, half)
        if choice is not None and budget_bytes is None:
            stack.enter_context(Precision(choice))
        setup = find_workload(workload).make()
        if budget_bytes is not None:
            import memfit

            session = stack.enter_context(
                memfit.fit(setup.model, setup.optimizer, budget=budget_bytes, precision=variant, half=half)
            )
        step = _by_hand(setup, HALVES[half]) if variant == BY_HAND else _as_written(setup)
        peaks, row = [], {}
        for number in range(NUM_STEPS if budget_bytes is None else NUM_STEPS_IN_BUDGET):
            loss, memory = oracle.measure_step(step, oracle.record_alone if budget_bytes is None else oracle.record_shared)
            peaks.append(memory.peak_bytes)
            if number == NUM_STEPS - 1:
                row = {"digest": oracle.digest_state(setup.model, setup.optimizer, loss), "loss": loss.item()}
                row["lasting_bytes"] = _lasting_bytes(setup)
            setup.optimizer.zero_grad(set_to_none=True)
        row["peak_bytes"] = max(peaks)
        seconds = []
        for _ in range(num_timed):
            seconds.append(oracle.time_step(step)[0])
            setup.optimizer.zero_grad(set_to_none=True)
        if seconds:
            row["cpu_seconds"] = statistics.median(seconds)
        if budget_bytes is not None:
            row |= {"within_budget": row["peak_bytes"] <= budget_bytes, "told": list(session.result().messages)}
        return row


def _lasting_bytes(setup: Setup) -> int:
    """Parameters, gradients and optimizer state."""
    parameters = list(setup.model.parameters())
    state = [value for each in setup.optimizer.state.values() for value in each.values() if isinstance(value, torch.Tensor)]
    return sum(each.nbytes for each in (*parameters, *(p.grad for p in parameters if p.grad is not None), *state))


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


def measure_workload(workload: str, halves: list[str], levels: list[str], num_timed: int, max_seconds: float) -> list[Row]:
    """All rows of one workload."""
    rows: list[Row] = []

    def add(
        variant: str, half: str, percent: int | None = None, budget_bytes: int | None = None, like: Row | None = None
    ) -> Row:
        row: Row = {"workload": workload, "variant": variant, "half": half, "percent": percent, "budget_bytes": budget_bytes}
        if like is not None and "error" in like:
            row["error"] = f"{like['variant']} {like['error']}"
        else:
            timed = 0 if half in UNTIMED else num_timed
            row |= run_apart(measure, (workload, variant, half or "bf16", budget_bytes, timed), max_seconds)
        rows.append(row)
        plain = rows[0]
        row["peak_of_float32"] = _ratio(row, plain, "peak_bytes")
        row["cpu_time_of_float32"] = _ratio(row, plain, "cpu_seconds")
        if like is not None and "digest" in row and variant in ("O0", "O1"):
            row["equal"] = not oracle.compare_digests(row["digest"], like["digest"])
        if percent == 100 and like is not None and "cpu_seconds" in row:
            row["no_slower"] = row["cpu_seconds"] <= NOISE * like["cpu_seconds"]
        print(draw_row(row), file=sys.stderr, flush=True)
        return row

    plain = add(FLOAT32, "")
    if "O0" in levels:
        add("O0", "", like=plain)
    for half in halves:
        by_hand = add(BY_HAND, half)
        for level in levels:
            if level != "O0":
                add(level, half, like=by_hand)
        for percent in BUDGET_PERCENTS if "O1" in levels else ():
            add("O1", half, percent, by_hand.get("peak_bytes", 0) * percent // 100, like=by_hand)
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--workloads", default=",".join(WORKLOADS), help="comma-separated, 'BERT-SIZE BATCHxLENGTH' too; '' for none"
    )
    parser.add_argument("--halves", default="bf16", help="comma-separated, of bf16 and fp16")
    parser.add_argument("--levels", default=",".join(LEVELS), help="comma-separated (default: all); by hand is always measured")
    parser.add_argument("--timed", type=int, default=NUM_TIMED_STEPS, help="steps to time a variant (default: %(default)d)")
    parser.add_argument("--seconds", type=float, default=900, help="give a variant up after this many of CPU time")
    parser.add_argument("--seeds", type=int, default=0, help="also train the digits network with so many seeds a level")
    parser.add_argument("--epochs", type=int, default=10, help="of that training")
    parser.add_argument("-o", "--output", type=Path, required=True, help="JSON; a Markdown table goes beside it")
    args = parser.parse_args()
    names = [name for name in args.workloads.split(",") if name]
    halves = args.halves.split(",")
    if unknown := [half for half in halves if half not in HALVES]:
        parser.error(f"unknown half {unknown[0]!r}; there are {', '.join(HALVES)}")
    levels = args.levels.split(",")
    if unknown := [level for level in levels if level not in LEVELS]:
        parser.error(f"unknown level {unknown[0]!r}; there are {', '.join(LEVELS)}")
    for name in names:
        try:
            find_workload(name)
        except KeyError:
            parser.error(f"unknown workload {name!r}; there are {', '.join(WORKLOADS)}, and BERT as 'BERT-base 16x384'")
    print(HEADER, file=sys.stderr)
    rows: list[Row] = []
    for name in names:
        measured = measure_workload(name, halves, levels, args.timed, args.seconds)
        write(args.output, measured, [])
        rows += measured
    if args.seeds:
        write(args.output, [], measure_convergence(args.seeds, args.epochs, args.seconds))
    broken = [row for row in rows for name in ("equal", "within_budget", "no_slower") if row.get(name) is False]
    return 1 if broken else 0


def write(path: Path, rows: list[Row], convergence: list[Row]) -> None:
    """Put these rows in the place of those of the same workload and half in the result file, and draw all of it beside it."""
    machine = describe_machine()
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    measured = {(row["workload"], row["half"]) for row in rows}
    kept = [{"commit": before["commit"], **row} for row in before.get("rows", [])]
    kept = [row for row in kept if (row["workload"], row["half"]) not in measured]
    rows = sorted([*kept, *({**row, "commit": machine["commit"]} for row in rows)], key=lambda row: row["workload"])
    document: dict[str, Any] = {"format": "memfit-precision-benchmark", "version": 2, **machine, "rows": rows}
    document["convergence"] = convergence or before.get("convergence", [])
    write_json(path, document)
    path.with_suffix(".md").write_text(draw_document(document, path.parent), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
