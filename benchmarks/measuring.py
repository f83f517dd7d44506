"""One workload's variants measured beside plain eager: bytes, bits and time as rows, each a plain dictionary.

    with Bench(WORKLOADS["W1"], num_pairs=4) as bench:
        bench.measure("checkpoint")
        bench.measure("memfit", 300 << 20)
        bench.measure_floor()
    bench.rows, bench.eager.peak

Memory is the allocator's own trace of a step (oracle.py): of memfit every traced step counts, the unplanned first one too;
of the others the first is left out, in which state arrives and code is compiled. "Activations" are the last traced step's
peak less its start and less complete gradients. Equality is of every bit of loss, parameters, gradients, buffers, optimizer
state and generators after the last traced step, against plain eager. Time is that of the steps after it, each beside one of plain eager in
another process, as the median ratio of the pairs: another job on the machine, or a slower clock, then hits both.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
from collections.abc import Iterable
from typing import Any

from oracle import StepTime, compare_digests
from table import FLOOR, PLANNED_FLOOR, draw_row
from worker import EAGER, MEMFIT, StepBytes, Variant, VariantError
from workloads import Workload

NUM_TRACED_STEPS = 4  # memfit measures three at most: the fourth shows what all later ones take
FLOOR_TRIES = 6

Row = dict[str, Any]


class Bench:
    """Plain eager of one workload, alive and stepped in turn with each variant that is measured.

    num_pairs: timed pairs of steps; num_steps: how many a sample is the average of, for steps of a few milliseconds.
    timeout_seconds: of one row. eager: the memory of plain eager's last traced step. rows: all measured so far.
    """

    def __init__(
        self,
        workload: Workload,
        *,
        num_pairs: int,
        num_steps: int = 1,
        num_threads: int = 1,
        timeout_seconds: float | None = None,
    ) -> None:
        self.workload, self.num_pairs, self.num_steps = workload, num_pairs, num_steps
        self.num_threads, self.timeout_seconds = num_threads, timeout_seconds
        self.rows: list[Row] = []
        self._partner = Variant(workload, EAGER, num_threads=num_threads)

    def __enter__(self) -> Bench:
        self._partner.__enter__()
        try:
            self.steps, self._digest = _trace(self._partner)
        except BaseException:
            self._partner.__exit__()
            raise
        self.eager = self.steps[-1]
        return self

    def __exit__(self, *_: object) -> None:
        self._partner.__exit__()

    def measure(
        self,
        name: str,
        budget_bytes: int | None = None,
        label: str = "",
        num_pairs: int | None = None,
        *,
        is_planned: bool = False,
    ) -> Row:
        """The row of one variant, in `rows` as well; with 'error' instead of numbers where it fails or refuses. is_planned: see Variant."""
        row = self._start_row(name, budget_bytes, label)
        variant = Variant(self.workload, name, budget_bytes, self.num_threads, self.timeout_seconds, is_planned)
        try:
            with variant:
                row |= self._measure(variant, num_pairs or self.num_pairs)
        except VariantError as error:
            row |= _describe_error(error)
        self.rows.append(row)
        print(draw_row(row), file=sys.stderr, flush=True)
        return row

    def measure_floor(self) -> Row:
        """The smallest budget memfit calls feasible: what it said it needs, tried, and raised to what it then says.

        Of the tries only the last is in `rows`.
        """
        told = [row[key] for row in self.rows for key in ("floor_bytes", "needed_bytes") if row.get(key)]
        if not told:
            row = self._start_row(MEMFIT, None, FLOOR)
            row["error"], row["error_kind"] = "memfit named no smallest budget", None
            self.rows.append(row)
            return row
        budget_bytes = min(told)
        for number in range(FLOOR_TRIES):
            if number:
                self.rows.pop()
            row = self.measure(MEMFIT, budget_bytes, FLOOR)
            if (row.get("needed_bytes") or 0) <= budget_bytes:
                break
            budget_bytes = row["needed_bytes"]
        return row

    def measure_planned_floor(self) -> Row:
        """The smallest plan there is, made from a trace of the step and followed from the first step on, in a budget of its size."""
        self._partner.give_back()  # the trace is of the plain step, which takes as much once more
        return self.measure(MEMFIT, label=PLANNED_FLOOR, is_planned=True)

    def measure_together(self, wanted: list[tuple[str, int | None, str]], num_rounds: int) -> list[Row]:
        """The rows of (name, budget, label), all alive at once and stepped in turn with plain eager: each round takes a ratio of each, so
        that a machine that changes from minute to minute changes all alike. For workloads that fit into memory together."""
        with contextlib.ExitStack() as stack:
            rows: list[Row] = []
            alive: list[tuple[Variant, Row]] = []
            for name, budget_bytes, label in wanted:
                variant = stack.enter_context(
                    Variant(self.workload, name, budget_bytes, self.num_threads, self.timeout_seconds)
                )
                row = self._start_row(name, budget_bytes, label)
                rows.append(row)
                try:
                    row |= self._weigh(variant) | variant.facts()
                    alive.append((variant, row))
                except VariantError as error:
                    row |= _describe_error(error)
            rounds = [
                [each.time_step(self.num_steps) for each in (self._partner, *(variant for variant, _ in alive))]
                for _ in range(num_rounds + 1)  # the first warms all up
            ]
            for number, (_, row) in enumerate(alive, 1):
                row |= _compare_times([(times[0], times[number]) for times in rounds[1:]])
            for row in rows:
                print(draw_row(row), file=sys.stderr, flush=True)
        self.rows += rows
        return rows

    def _start_row(self, name: str, budget_bytes: int | None, label: str) -> Row:
        return {"workload": self.workload.name, "variant": name, "label": label, "budget_bytes": budget_bytes}

    def _measure(self, variant: Variant, num_pairs: int) -> Row:
        row = self._weigh(variant) | self._time(variant, num_pairs) | variant.facts()
        if variant.is_planned:
            row["within_budget"] = row["peak_bytes"] <= row["budget_bytes"]
        if predicted := row.get("predicted_peak_bytes"):
            row["prediction_error"] = predicted / max(row["step_peak_bytes"][2:]) - 1  # settled from the third step on
        return row

    def _weigh(self, variant: Variant) -> Row:
        """The bytes of its traced steps, and its bits after the last beside plain eager's."""
        steps, digest = _trace(variant)
        differing = compare_digests(digest, self._digest)
        peak = max(step.peak for step in steps)
        return {
            "baseline_bytes": [step.baseline for step in steps],
            "step_peak_bytes": [step.peak for step in steps],
            "peak_bytes": peak,
            "peak_of_eager": peak / self.eager.peak,
            "activation_bytes": steps[-1].activations,
            "within_budget": variant.budget_bytes is None or peak <= variant.budget_bytes,
            "equal": not differing,
            "num_parts_compared": len(digest),
            "differing": differing,
        }

    def _time(self, variant: Variant, num_pairs: int) -> Row:
        pairs = []
        for place in range(num_pairs + 1):
            if place % 2:  # who goes second finds the other's data in the shared caches
                ours, eager = variant.time_step(self.num_steps), self._partner.time_step(self.num_steps)
            else:
                eager, ours = self._partner.time_step(self.num_steps), variant.time_step(self.num_steps)
            pairs.append((eager, ours))
        return _compare_times(pairs[1:])  # the first warms both up


def _describe_error(error: VariantError) -> Row:
    return {"error": str(error), "error_kind": error.kind, "needed_bytes": error.needed_bytes}


def _compare_times(pairs: list[tuple[StepTime, StepTime]]) -> Row:
    """Pairs of a step of plain eager and one of a variant."""
    row: Row = {"num_pairs": len(pairs)}
    for number, clock in enumerate(StepTime._fields):
        row[f"{clock}_time_ratio"] = statistics.median(ours[number] / eager[number] for eager, ours in pairs)
        row[f"{clock}_seconds"] = statistics.median(ours[number] for _, ours in pairs)
        row[f"eager_{clock}_seconds"] = statistics.median(eager[number] for eager, _ in pairs)
    return row


def _trace(variant: Variant) -> tuple[list[StepBytes], dict[str, str]]:
    """The memory of NUM_TRACED_STEPS steps, of all but memfit without the first, and the digest after the last."""
    steps = []
    if variant.name == MEMFIT:
        steps.append(variant.trace_step())
    else:
        variant.time_step()
    steps += [variant.trace_step() for _ in range(NUM_TRACED_STEPS - 2)]
    last, digest = variant.finish_with_digest()
    return [*steps, last], digest


def choose_budgets(
    floor_bytes: int, eager_bytes: int, peer_peaks: Iterable[tuple[str, int]], num_budgets: int
) -> list[tuple[int, str]]:
    """`num_budgets` budgets, evenly from plain eager's peak down to the floor, largest first, each with a label.

    The inner ones are moved to the peers' own peaks where these lie in between, so that both can be compared at the same bytes.

    >>> choose_budgets(100, 400, [("checkpoint", 210), ("selective", 90)], 4)
    [(400, "eager's peak"), (300, ''), (210, "checkpoint's peak"), (100, 'floor')]
    """
    span = eager_bytes - floor_bytes
    inner = [(floor_bytes + span * place // (num_budgets - 1), "") for place in range(num_budgets - 2, 0, -1)]
    for name, peak_bytes in peer_peaks:
        free = [place for place, (_, label) in enumerate(inner) if not label]
        if free and floor_bytes < peak_bytes < eager_bytes:
            nearest = min(free, key=lambda place: abs(inner[place][0] - peak_bytes))
            inner[nearest] = (peak_bytes, f"{name}'s peak")
    return [(eager_bytes, "eager's peak"), *sorted(inner, reverse=True), (floor_bytes, FLOOR)]
