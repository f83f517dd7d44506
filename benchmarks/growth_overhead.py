"""What the growth watch costs: CPU seconds of a W1 step (`workloads.py`) with and without it, and microseconds an operation.

    python benchmarks/growth_overhead.py [-o results/growth_overhead.json] [--steps 13]

Plain and watched loops alternate in pairs, and the figure is the median of the pairs' ratios; the watched ones include all samples and
looks at the heap of a loop of that many steps (in a longer loop looks are rarer). One thread.

On a shared machine seconds of CPU time differ by more than the watch costs. So the same is measured again on the same operations with
tiny tensors, where little but the watch weighs: its milliseconds a step, which tensors of any size leave as they are, and their share of
the plain W1 step above.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from unittest import mock

import torch

import workloads
from memfit import watch_growth
from workloads import WORKLOADS, Setup

NUM_ROUNDS = 3
NUM_CALLS = 2000


def seconds_of(setup: Setup, num_steps: int, *, watched: bool) -> float:
    """CPU seconds of a loop of steps, divided by their number."""
    start = time.process_time()
    items = range(num_steps)
    for _ in watch_growth(items) if watched else items:
        setup.step()
    return (time.process_time() - start) / num_steps


def milliseconds_of_watching(num_steps: int) -> float:
    """CPU milliseconds a step that watching adds, looks included; from W1's operations on tiny tensors."""
    with mock.patch.multiple(workloads, W1_BATCH=1, W1_LENGTH=8, W1_VOCABULARY=50, W1_WIDTH=16):
        setup = WORKLOADS["W1"].make()
    setup.step()
    added = []
    for _ in range(2 * NUM_ROUNDS):
        plain, watched = (seconds_of(setup, num_steps, watched=on) for on in (False, True))
        added.append(watched - plain)
    return statistics.median(added) * 1e3


def microseconds_of_call(*, watched: bool) -> float:
    """CPU microseconds of one tiny operation; the code is written out, so that no loop goes around."""
    code = compile("x = torch.exp(x)\n" * NUM_CALLS, __file__, "exec")
    names = {"torch": torch, "x": torch.zeros(4)}
    seconds = []
    for _ in watch_growth(range(1)) if watched else range(1):
        for _ in range(6):  # in the first the code is read for loops
            start = time.process_time()
            exec(code, names)
            seconds.append(time.process_time() - start)
    return min(seconds) / NUM_CALLS * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--steps", type=int, default=13)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    setup = WORKLOADS["W1"].make()
    setup.step()
    plain, watched = [], []
    for _ in range(NUM_ROUNDS):
        plain.append(seconds_of(setup, arguments.steps, watched=False))
        watched.append(seconds_of(setup, arguments.steps, watched=True))
    added = milliseconds_of_watching(arguments.steps)
    calls = [microseconds_of_call(watched=on) for on in (False, True)]
    figures = {
        "torch": torch.__version__,
        "num_steps": arguments.steps,
        "plain_seconds_per_step": plain,
        "watched_seconds_per_step": watched,
        "overhead_of_a_W1_step": statistics.median(on / off for off, on in zip(plain, watched, strict=True)) - 1,
        "milliseconds_of_watching_per_step": added,
        "share_of_a_W1_step": added / 1e3 / statistics.median(plain),
        "microseconds_per_call_plain": calls[0],
        "microseconds_per_call_watched": calls[1],
    }
    print(json.dumps(figures, indent=1))
    if arguments.output:
        arguments.output.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
