"""Every trap program under `memfit.fit`: the same training bit for bit and within the budget, or a refusal in words.

The peak is read from the allocator's own trace (benchmarks/oracle.py), not from memfit. Step 1 runs under the guard, step 2 under
the plan, measured, and step 3 at full speed. The clock is a counter (every operation costs one tick), so that each run of these
tests plans the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from types import SimpleNamespace

import pytest

import memfit
import oracle
from engine.loops import LOOPS
from engine.programs import FORWARDS
from equality import Program, Run, differences, make, snapshot
from memfit.measurement.backends import CpuBackend
from memfit.runtime.session import Session
from runtime.conftest import MOMENT_BYTES

PROGRAMS = {
    name: program for name, program in (FORWARDS | LOOPS).items() if name != "a_chain_of_two_thousand_calls"
}  # 10 s to plan
NUM_STEPS = 3

# And states of the generator that a program itself holds (torch's checkpoint, one for each of at most three): made past the dispatcher.
# 42 KB of 2 to 13 MB here, and no more in a larger model.
OWN_BYTES = MOMENT_BYTES + 3 * 5056

TIGHT = frozenset(  # backward's own working set is more than 80 % of the step
    [
        "one_buffer_filled_again_for_every_micro_batch", "retained_graphs_and_several_backwards", "gradients_asked_for_by_name",
        "double_backward", "a_step_inside_the_step", "embeddings_sparse_and_renormalized",
        # refused since the check before the first update: the first of its optimizers steps within the first backward
        "optimizers_that_step_inside_backward",
    ]
)  # fmt: skip
OVER = {
    (
        "another_way_through_the_program_each_step",
        0.6,
    ): "no plan foresees a step that takes another way, and the valve is not enough; measured 1.10",
    (
        "a_graph_of_the_step_before",
        0.6,
    ): "the second step holds a graph more than the first, and the valve is not enough; measured 1.17 of the budget",
    (
        "an_optimizer_with_a_closure",
        0.6,
    ): "the second step holds more than the first, and the valve is not enough; measured 1.04 of the budget",
}


@pytest.fixture(autouse=True)
def _counted_time(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()

    def tick() -> float:
        return float(next(ticks))

    for module in ("backends", "recorder", "rows"):
        monkeypatch.setattr(f"memfit.measurement.{module}.time", SimpleNamespace(perf_counter=tick, thread_time=tick))
    monkeypatch.setattr(CpuBackend, "_workspaces", {})  # as in a process of its own


def train(program: Program, session: Callable[[Run], AbstractContextManager]) -> tuple[list[dict[str, str]], int]:
    """What each step leaves behind, and the allocator's peak over all steps, in bytes above what was there before."""
    elsewhere = oracle.count_live_bytes()
    run = make(program)
    left, peak = [], 0
    with session(run):
        for number in range(NUM_STEPS):
            loss, memory = oracle.measure_step(lambda number=number: run.step(number), oracle.record_shared)
            peak = max(peak, memory.peak_bytes)
            left.append(snapshot(run, loss))
            del loss
    return left, peak - elsewhere


@cache
def train_plainly(name: str) -> tuple[list[dict[str, str]], int]:
    return train(PROGRAMS[name], lambda run: nullcontext())


@pytest.mark.parametrize("share", [0.6, 0.8])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_trap_program_is_the_same_within_its_budget_or_refused(name: str, share: float) -> None:
    expected, eager_peak = train_plainly(name)
    budget = int(share * eager_peak)
    elsewhere = oracle.count_live_bytes()
    sessions: list[Session] = []

    def fit(run: Run) -> Session:
        sessions.append(memfit.fit(run.model, run.optimizers[0], budget=budget + elsewhere))
        return sessions[0]

    try:
        found, peak = train(PROGRAMS[name], fit)
    except (memfit.BudgetError, memfit.UnsupportedError):
        assert share < 0.8 or name in TIGHT
        return
    assert differences(expected, found) == []
    assert sessions[0].result().certificate.num_evicted > 0
    if peak > budget + OWN_BYTES and (name, share) in OVER:
        pytest.xfail(OVER[name, share])
    assert peak <= budget + OWN_BYTES
