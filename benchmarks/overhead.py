"""What the tape costs in microseconds of CPU time: a recorded call, a saved tensor, an unpacked handle, a restored cell.

    python benchmarks/overhead.py -o benchmarks/results/overhead.json    # about a minute

Two chains of tiny calls, beside plain PyTorch and beside saved_tensors_hooks that hand the tensor through: `neg` saves nothing for
backward, `sigmoid` its result. One thread; each figure is the smallest of several rounds, all settings taken in turn in each round.
The file also holds the first 15 lines of a profile (cProfile, by own time) of each of the four.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import memfit
from machine import describe_machine, draw_machine, write_json
from memfit.core.plan import Move
from memfit.engine.tape import Tape
from memfit.techniques import recompute

NUM_CALLS, NUM_ROUNDS, NUM_PROFILE_LINES = 1000, 15, 15
MAX_CALL_MICROSECONDS, MAX_SAVED_MICROSECONDS = 2.0, 3.0  # what we aim at

FORWARD, BACKWARD = "forward", "backward"


class Chain(nn.Module):
    """NUM_CALLS calls of one function, each on the result of the one before."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.start = nn.Parameter(torch.zeros(4))

    def forward(self) -> torch.Tensor:
        x = self.start
        for _ in range(NUM_CALLS):
            x = self.function(x)
        return x.sum()


@dataclass(frozen=True)
class Setting:
    """What is on while a chain runs. enter: a fresh context manager for one step; num_evicted: results that leave after forward."""

    name: str
    chain: Chain
    enter: Callable[[], Any]
    num_evicted: int = 0


def make_settings() -> dict[str, Setting]:
    """All settings by name, plain PyTorch first for each chain."""
    settings = []
    for function in (torch.neg, torch.sigmoid):
        chain, name = Chain(function), function.__name__
        keys = tuple(f"{place}|out0" for place in _places(chain, name))
        calls = tuple(key.rpartition("|")[0] for key in keys)
        settings += [
            Setting(f"{name}, plain", chain, nullcontext),
            Setting(f"{name}, hooks that do nothing", chain, _identity_hooks),
            Setting(f"{name}, not in the plan", chain, _tape),
            Setting(f"{name}, recorded", chain, partial(_tape, _move(calls, keep=keys))),
            Setting(f"{name}, measured", chain, partial(_tape, record_all=True)),
        ]
        if function is torch.sigmoid:  # every other result leaves, so that one call brings it back
            move = _move(calls, keep=keys[::2], evict=keys[1::2])
            settings.append(Setting(f"{name}, evicted", chain, partial(_tape, move), len(keys[1::2])))
    return {setting.name: setting for setting in settings}


def _places(chain: Chain, function: str) -> list[str]:
    """The identities of the chain's calls, as a plan names them."""
    optimizer = torch.optim.SGD(chain.parameters(), lr=0.0)

    def step() -> None:
        chain().backward()
        optimizer.step()
        optimizer.zero_grad()

    places = [call.place for call in memfit.trace(step).calls if call.function == function]
    assert len(places) == NUM_CALLS, f"{len(places)} calls of {function} in the trace"
    return places


def _move(calls: tuple[str, ...], keep: tuple[str, ...], evict: tuple[str, ...] = ()) -> Move:
    return Move(recompute.name, "chain", evict=evict, calls=calls, keep=keep)


def _identity_hooks() -> Any:
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


@contextmanager
def _tape(move: Move | None = None, *, record_all: bool = False) -> Iterator[Tape]:
    tape = Tape()
    recompute.apply(tape, [move] if move is not None else [])
    tape.record_all = record_all
    tape.enter()
    try:
        yield tape
        tape.end_step()
    finally:
        tape.exit()


def run_step(setting: Setting, profiles: dict[str, cProfile.Profile] | None = None) -> dict[str, float]:
    """Seconds of one forward and one backward pass. Raises RuntimeError where not exactly the planned results left and came back."""
    seconds = {}
    profiles = profiles or {}
    setting.chain.start.grad = None
    with setting.enter() as tape:
        loss = None
        for phase in (FORWARD, BACKWARD):
            with profiles.get(phase) or nullcontext():
                start = time.process_time()
                if loss is None:
                    loss = setting.chain()
                else:
                    loss.backward()
                seconds[phase] = time.process_time() - start
        if isinstance(tape, Tape) and tape.counts.num_restored != setting.num_evicted:
            raise RuntimeError(f"{setting.name}: {tape.counts.num_restored} results came back, {setting.num_evicted} were to.")
    return seconds


def measure(settings: dict[str, Setting] | None = None, num_rounds: int = NUM_ROUNDS) -> dict[str, float]:
    """'<setting>, <phase>' -> microseconds per call of the chain."""
    settings = settings or make_settings()
    best: dict[str, float] = {}
    for _ in range(num_rounds):
        for name, setting in settings.items():
            for phase, seconds in run_step(setting).items():
                key = f"{name}, {phase}"
                best[key] = min(best.get(key, float("inf")), seconds)
    return {key: seconds / NUM_CALLS * 1e6 for key, seconds in best.items()}


def derive_costs(per_call: dict[str, float]) -> dict[str, float]:
    """What one of each costs, in microseconds, from what `measure` found.

    'above hooks' is above saved_tensors_hooks that do nothing, which every way of keeping less for backward pays. A restored cell is told
    without the call that computes it; every other call of the chain brings one back.
    """

    def difference(phase: str, ours: str, theirs: str) -> float:
        return per_call[f"{ours}, {phase}"] - per_call[f"{theirs}, {phase}"]

    hooks = "sigmoid, hooks that do nothing"
    recorded = difference(FORWARD, "neg, recorded", "neg, plain")
    restored = 2 * difference(BACKWARD, "sigmoid, evicted", "sigmoid, recorded")
    return {
        "plain call": per_call["neg, plain, forward"],
        "hooks that do nothing, pack": difference(FORWARD, hooks, "sigmoid, plain"),
        "hooks that do nothing, unpack": difference(BACKWARD, hooks, "sigmoid, plain"),
        "call outside the plan": difference(FORWARD, "neg, not in the plan", "neg, plain"),
        "recorded call": recorded,
        "measured call": difference(FORWARD, "neg, measured", "neg, plain"),
        "saved tensor outside the plan, above hooks": difference(FORWARD, "sigmoid, not in the plan", hooks)
        - difference(FORWARD, "neg, not in the plan", "neg, plain"),
        "saved tensor of a recorded call, above hooks": difference(FORWARD, "sigmoid, recorded", hooks) - recorded,
        "unpacked handle outside the plan, above hooks": difference(BACKWARD, "sigmoid, not in the plan", hooks),
        "unpacked handle of a recorded call, above hooks": difference(BACKWARD, "sigmoid, recorded", hooks),
        "restored cell": restored - per_call["sigmoid, plain, forward"],
    }


PROFILED = {  # what is profiled for each cost: setting, phase, and the number of them in the phase
    "recorded call": ("neg, recorded", FORWARD, NUM_CALLS),
    "saved tensor outside the plan, above hooks": ("sigmoid, not in the plan", FORWARD, NUM_CALLS),
    "saved tensor of a recorded call, above hooks": ("sigmoid, recorded", FORWARD, NUM_CALLS),
    "unpacked handle of a recorded call, above hooks": ("sigmoid, recorded", BACKWARD, NUM_CALLS),
    "restored cell": ("sigmoid, evicted", BACKWARD, NUM_CALLS // 2),
}


def profile(settings: dict[str, Setting]) -> dict[str, list[dict[str, Any]]]:
    """The functions that take most own time in each of PROFILED, told for one of them. The profiler itself makes all slower."""
    found = {}
    for cost, (name, phase, number) in PROFILED.items():
        profiler = cProfile.Profile(time.process_time)  # another job on the core is not our cost
        run_step(settings[name], {phase: profiler})
        rows = pstats.Stats(profiler).stats.items()  # type: ignore[attr-defined]
        found[cost] = [
            {
                "function": _describe_function(*function),
                "calls": round(num_calls / number, 2),
                "own_microseconds": round(own / number * 1e6, 3),
                "cumulative_microseconds": round(cumulative / number * 1e6, 3),
            }
            for function, (_, num_calls, own, cumulative, _) in sorted(rows, key=lambda row: -row[1][2])[:NUM_PROFILE_LINES]
        ]
    return found


def _describe_function(path: str, line: int, name: str) -> str:
    return name if path == "~" else f"{'/'.join(Path(path).parts[-2:])}:{line} {name}"


def draw(document: dict[str, Any]) -> str:
    """Costs and profiles as Markdown."""
    costs = document["microseconds"]
    lines = [
        draw_machine(document),
        "",
        "| | microseconds |",
        "|---|---:|",
        *(f"| {what} | {us:.2f} |" for what, us in costs.items()),
    ]
    saved = costs["saved tensor of a recorded call, above hooks"]
    for what, cost, limit in (
        ("A recorded call", costs["recorded call"], MAX_CALL_MICROSECONDS),
        ("A saved tensor, above hooks", saved, MAX_SAVED_MICROSECONDS),
    ):
        lines += ["", f"{what}: {cost:.2f} us, {'within' if cost <= limit else 'more than'} the {limit:g} us aimed at."]
    for cost, rows in document["profiles"].items():
        lines += ["", f"Profile: {cost}", "", "| function | calls | own us | cumulative us |", "|---|---:|---:|---:|"]
        lines += [
            f"| `{row['function']}` | {row['calls']:g} | {row['own_microseconds']:.2f} | {row['cumulative_microseconds']:.2f} |"
            for row in rows
        ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS, help="(default: %(default)s)")
    parser.add_argument("-o", "--output", type=Path, help="JSON; Markdown goes beside it")
    args = parser.parse_args()
    torch.set_num_threads(1)
    settings = make_settings()
    per_call = measure(settings, args.rounds)
    document = {
        "format": "memfit-overhead",
        "version": 1,
        **describe_machine(),
        "num_calls": NUM_CALLS,
        "num_rounds": args.rounds,
        "microseconds": {what: round(us, 3) for what, us in derive_costs(per_call).items()},
        "microseconds_per_call": {setting: round(us, 3) for setting, us in per_call.items()},
        "profiles": profile(settings),
    }
    text = draw(document)
    print(text)
    if args.output:
        write_json(args.output, document)
        args.output.with_suffix(".md").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
