"""What memfit costs a small model, part by part, in CPU time beside plain eager.

    python benchmarks/small_models.py -o benchmarks/results/small_models.json    # about five minutes

Where every operation is short, what stands around it is dear. Three tapes do one part more each: idle (mode and hooks are on, nothing is
planned), recording (the calls of the plan become recipes, and everything is kept), restoring (the plan itself). The plans are for
60 % of the activations, and for 90 % of the peak of a BERT of hidden size 128 at 8 x 128 tokens. One process and one thread; the
settings take turns, 3 steps each, the first of which does not count; the lower quartile of all their steps is told.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import memfit
import oracle
from machine import PACKAGES, describe_machine, draw_machine
from memfit.core.plan import Move
from memfit.engine.tape import Tape
from memfit.techniques import recompute
from transformers_models import TINY, make_bert_workload
from workloads import Workload

SMALL = make_bert_workload("tiny", 8, 128)
MODELS = {SMALL.name: SMALL, **TINY}
NUM_ROUNDS = 40
MAX_RECORDING_RATIO = 1.05  # what we aim at


@dataclass(frozen=True)
class Costs:
    """One model. plain_seconds: a step in plain eager; the others: what a step takes longer with one part more each.

    num_recorded, num_evicted, num_replayed: calls, saved tensors and calls again in one step of the plan.
    """

    model: str
    budget_bytes: int
    num_recorded: int
    num_evicted: int
    num_replayed: int
    plain_seconds: float
    idle_seconds: float
    recording_seconds: float
    restoring_seconds: float


def measure(workload: Workload, num_rounds: int = NUM_ROUNDS) -> Costs:
    """Raises BudgetError where the plan's budget is out of reach."""
    torch.manual_seed(0)
    setup = workload.build(torch.device("cpu"))
    setup.step()
    _, memory = oracle.measure_step(setup.step, oracle.record_shared)
    budget_bytes = memory.peak_bytes * 9 // 10
    if workload is not SMALL:
        budget_bytes = memory.baseline_bytes + (memory.peak_bytes - memory.baseline_bytes) * 6 // 10
    plan = memfit.plan(memfit.trace(setup.step), budget_bytes)
    kept = [replace(move, keep=move.keep + move.evict, evict=()) for move in plan.moves]
    settings: dict[str, tuple[Move, ...] | None] = {"plain": None, "idle": (), "recording": (*kept,), "restoring": plan.moves}
    seconds: dict[str, list[float]] = {name: [] for name in settings}
    counts = Tape().counts
    for _ in range(num_rounds):
        for name, moves in settings.items():
            if moves is None:
                seconds[name] += _time_steps(setup.step)
                continue
            tape = Tape()
            recompute.apply(tape, moves, plan.untouched)
            hooks = (
                register_optimizer_step_pre_hook(tape.before_optimizer),
                register_optimizer_step_post_hook(tape.after_optimizer),
            )
            tape.enter()
            try:
                seconds[name] += _time_steps(setup.step, tape.end_step)
            finally:
                tape.exit()
                for hook in hooks:
                    hook.remove()
            counts = tape.counts
    low = {name: statistics.quantiles(each, n=4)[0] for name, each in seconds.items()}
    return Costs(
        workload.name,
        budget_bytes,
        sum(len(move.calls) for move in plan.moves),
        counts.num_restored // 3,
        counts.num_replayed_calls // 3,
        low["plain"],
        low["idle"] - low["plain"],
        low["recording"] - low["idle"],
        low["restoring"] - low["recording"],
    )


def _time_steps(step: Callable[[], object], end_step: Callable[[], None] = lambda: None) -> list[float]:
    """CPU seconds of the second and the third of three steps."""
    seconds = []
    for _ in range(3):
        start = time.process_time()
        step()
        end_step()
        seconds.append(time.process_time() - start)
    return seconds[1:]


def draw(document: dict[str, object], rows: list[Costs]) -> str:
    """The result as Markdown."""
    lines = [
        draw_machine(document),
        "",
        "| model | plain, ms | idle | + recording | + evicting and restoring | calls recorded | evicted | replayed |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        parts = (row.idle_seconds, row.recording_seconds, row.restoring_seconds)
        ratios = " | ".join(f"{seconds / row.plain_seconds:+.1%}" for seconds in parts)
        numbers = f"{row.num_recorded} | {row.num_evicted} | {row.num_replayed}"
        lines.append(f"| {row.model} | {row.plain_seconds * 1e3:.2f} | {ratios} | {numbers} |")
    for row in rows:
        if row.model == SMALL.name:
            ratio = 1 + (row.idle_seconds + row.recording_seconds) / row.plain_seconds
            verdict = "within" if ratio < MAX_RECORDING_RATIO else "more than"
            aim = f"{verdict} the {MAX_RECORDING_RATIO - 1:.0%} aimed at"
            lines += ["", f"{row.model}: {ratio - 1:+.1%} for recording what its plan needs, {aim}."]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated (default: all)")
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS, help="(default: %(default)s)")
    parser.add_argument("-o", "--output", type=Path, help="JSON; Markdown goes beside it")
    args = parser.parse_args()
    if unknown := [name for name in args.models.split(",") if name not in MODELS]:
        parser.error(f"unknown model {unknown[0]!r}; there are {', '.join(MODELS)}")
    torch.set_num_threads(1)
    rows = []
    for name in args.models.split(","):
        try:
            rows.append(measure(MODELS[name], args.rounds))
        except memfit.BudgetError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
    machine = describe_machine((*PACKAGES, "transformers"))
    document = {"format": "memfit-small-models", "version": 1, "clock": "cpu", "num_rounds": args.rounds, **machine}
    text = draw(document, rows)
    print(text)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps({**document, "rows": [*map(asdict, rows)]}, indent=1) + "\n", encoding="utf-8")
        args.output.with_suffix(".md").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
