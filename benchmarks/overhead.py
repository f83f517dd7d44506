"""What the tape costs per call and per saved tensor, in microseconds of CPU time, beside plain PyTorch.

    python benchmarks/overhead.py [-o results/overhead.json]

One thread; each figure is the smallest of several rounds, taken alternately with the plain one.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

from memfit.engine.policy import Policy
from memfit.engine.tape import Tape

NUM_CALLS = 2000
NUM_ROUNDS = 15


def chain(x: torch.Tensor) -> torch.Tensor:
    """NUM_CALLS tiny calls, each of which saves one tensor (exp saves its result)."""
    for _ in range(NUM_CALLS):
        x = torch.exp(x)
    return x


def seconds_of(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def measure() -> dict[str, float]:
    """Microseconds above plain PyTorch, per call that saves one tensor, by what the tape is doing."""
    x = torch.zeros(4, requires_grad=True)
    places = [f"0|#0/{number}:exp" for number in range(NUM_CALLS)]
    settings: dict[str, tuple[Policy | None, bool]] = {
        "installed, nothing planned here": (None, False),
        "recorded and kept": (Policy(places, [], [f"{place}|out0" for place in places], []), False),
        "recorded and evicted": (Policy(places, [f"{place}|out0" for place in places[1::2]], [f"{p}|out0" for p in places[::2]], []), False),
        "everything recorded (measuring, guarding)": (None, True),
    }  # fmt: skip
    best: dict[str, float] = {"plain": float("inf")} | dict.fromkeys(settings, float("inf"))
    for _ in range(NUM_ROUNDS):
        best["plain"] = min(best["plain"], seconds_of(lambda: chain(x)))
        for name, (policy, record_all) in settings.items():
            tape = Tape()
            tape.policy, tape.record_all = policy, record_all
            tape.enter()
            try:
                best[name] = min(best[name], seconds_of(lambda: chain(x)))
            finally:
                tape.exit()
    plain = best.pop("plain")
    figures = {name: (seconds - plain) / NUM_CALLS * 1e6 for name, seconds in best.items()}
    return {"plain call": plain / NUM_CALLS * 1e6, **figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    figures = measure()
    for name, microseconds in figures.items():
        print(f"{microseconds:8.2f} us  {name}")
    if arguments.output:
        document = {"torch": torch.__version__, "num_threads": 1, "microseconds_per_call": figures}
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
