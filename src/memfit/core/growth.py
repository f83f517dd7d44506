"""What grows from step to step, judged from samples of what was alive at the start of each; pure, no torch.

Growth is told from plateaus by shape alone: it must still rise in every third of the last two thirds of the samples. State that
arrives once (an optimizer's), queues that fill up and caches that have seen all their keys have stopped rising by then.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from memfit.core.finding import Finding
from memfit.core.sizes import format_size

CONTAINER, GRAPH, NAME, CYCLE, GRAPH_CYCLE, TRACEBACK, CACHE = (
    "container",
    "graph",
    "name",
    "cycle",
    "graph cycle",
    "traceback",
    "cache",
)
# `memfit explain leaks` says what they are.
CODES = {
    CONTAINER: "MF131",
    GRAPH: "MF132",
    NAME: "MF133",
    CYCLE: "MF134",
    GRAPH_CYCLE: "MF135",
    TRACEBACK: "MF136",
    CACHE: "MF137",
}
MIN_SAMPLES = 3
MIN_BYTES = 64  # a step: below, it takes 16 million steps to fill a gigabyte
MIN_UNEVEN_BYTES = 4096
MIN_SHARE_FOR_A_WHILE = 0.1  # the same for what an evaluation or a rollout piles up and lets go at its end
MIN_SHARE = 0.02  # of the bytes a step makes: a program may collect its results


@dataclass(frozen=True)
class Sample:
    """What was alive of one place when iteration `iteration` began."""

    iteration: int
    count: int
    num_bytes: int


@dataclass(frozen=True)
class Rise:
    """Growth in bytes and tensors a step, between two iterations."""

    bytes_per_step: float
    count_per_step: float
    num_steps: int


@dataclass(frozen=True)
class Growth:
    """One thing that grows, or is held for nothing.

    kind: one of CODES. path, line: where to mend it; text: that line. made_at: (file:line, module, bytes a step) of its tensors.
    num_bytes: a step, or once where `per_step` is false. nodes_per_step: autograd nodes, which are host memory.
    num_steps: over how many steps it was seen. loop: file:line of the loop whose iterations are the steps; '' where there is none.
    chain: who holds it, root first. is_attached: what is kept carries a graph. is_backwarded: steps of this loop run a backward.
    used_bytes: a step, of the views that are kept, where they show less than the storages they keep alive; else None.
    until_end: it was seen to be released when its loop was over. share: of the bytes a step makes.
    device: where the bytes are.
    """

    kind: str
    path: str
    line: int
    text: str = ""
    made_at: tuple[tuple[str, str, int], ...] = ()
    num_bytes: int = 0
    per_step: bool = True
    nodes_per_step: int = 0
    num_steps: int = 0
    loop: str = ""
    chain: str = ""
    is_attached: bool = False
    is_backwarded: bool = True
    used_bytes: int | None = None
    until_end: bool = False
    share: float = 1.0
    device: str = "cpu"

    @property
    def is_material(self) -> bool:
        """Whether it is worth a finding: a graph that grows always is, results collected in small pieces are not."""
        if not self.per_step:
            return self.num_bytes >= MIN_BYTES
        if self.nodes_per_step >= 1 or (self.kind == GRAPH and self.num_bytes >= MIN_BYTES):
            return True
        least = MIN_SHARE_FOR_A_WHILE if self.until_end and not self.is_backwarded else MIN_SHARE
        return self.num_bytes >= MIN_BYTES and (self.share >= least or self.is_attached)


@dataclass(frozen=True)
class StepPeaks:
    """The most that was alive in a step, of what was made meanwhile: of an early step (from 1), and of the largest of `num_steps`."""

    first_step: int
    first_bytes: int
    largest_step: int
    largest_bytes: int
    num_steps: int

    @property
    def is_uneven(self) -> bool:
        """Whether a step took half as much again as the early one: then a measured early step says little."""
        return self.largest_bytes >= 1.5 * self.first_bytes and self.largest_bytes - self.first_bytes >= MIN_UNEVEN_BYTES


@dataclass(frozen=True)
class GrowthReport:
    """All that was seen. settled: (file:line, bytes) that arrived and stayed, and do not grow.

    num_steps, step: the steps watched and what a step was; peaks: of theirs. live_bytes: alive at the end, of what was made meanwhile.
    messages: what could not be seen.
    """

    program: str
    growths: tuple[Growth, ...]
    settled: tuple[tuple[str, int], ...] = ()
    num_steps: int = 0
    step: str = ""
    live_bytes: int = 0
    peak_bytes: int = 0
    peaks: StepPeaks | None = None
    budget_bytes: int | None = None
    messages: tuple[str, ...] = ()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What is worth one, sorted by place."""
        return tuple(sorted(to_finding(each) for each in self.growths if each.is_material))

    @property
    def bytes_per_step(self) -> int:
        """Of everything that grows."""
        return sum(each.num_bytes for each in self.growths if each.per_step and each.kind != CYCLE)

    @property
    def steps_left(self) -> int | None:
        """Steps until the budget is full, or None where it is not known or nothing grows."""
        if self.budget_bytes is None or self.bytes_per_step < MIN_BYTES:
            return None
        return max(0, (self.budget_bytes - self.live_bytes) // self.bytes_per_step)


def judge(samples: Sequence[Sample], *, is_own_input: bool) -> Rise | None:
    """The rise in the samples' last two thirds, if it goes on to the end; None for what has settled or falls.

    is_own_input: the tensor is made from its last self, so that growth in size counts although the number of tensors stays.
    """
    window = samples[len(samples) // 3 :] if len(samples) > MIN_SAMPLES else samples
    if len(window) < MIN_SAMPLES:
        return None
    middle = window[len(window) // 2]
    first, last = window[0], window[-1]

    def rises(values: tuple[float, float, float]) -> bool:
        begin, half, end = values
        lowest = (end - begin) / 4
        return end > begin and half - begin >= lowest and end - half >= lowest

    by_count = rises((first.count, middle.count, last.count))
    by_size = is_own_input and rises((first.num_bytes, middle.num_bytes, last.num_bytes))
    if not (by_count or by_size):
        return None
    steps = last.iteration - first.iteration
    return Rise((last.num_bytes - first.num_bytes) / steps, (last.count - first.count) / steps, last.iteration)


def to_finding(growth: Growth) -> Finding:
    """The verdict in one sentence, and the remedy in another."""
    return Finding(
        path=show_path(growth.path),
        line=growth.line,
        column=1,
        code=CODES[growth.kind],
        message=_message(growth),
        remedy=_remedy(growth),
        num_bytes=growth.num_bytes,
        per_step=growth.per_step,
        measured=True,
    )


def show_path(path: str) -> str:
    """Relative to the working directory where it lies in it."""
    relative = os.path.relpath(path) if os.path.isabs(path) else path
    return path if relative.startswith("..") else relative


def _message(growth: Growth) -> str:
    size = format_size(growth.num_bytes)
    if growth.kind == CYCLE:
        return f"{size} a step wait for the cycle collector: what holds them refers to itself ({growth.chain})."
    if growth.kind == GRAPH_CYCLE:
        return f"{size} a step can never be freed: {growth.chain}."
    if growth.kind == TRACEBACK:
        return f"{size} of a call that failed are still held: {growth.chain}."
    if growth.kind == CACHE:
        return f"{size} are held by nothing but {growth.chain}."
    nodes = f" and {growth.nodes_per_step} graph nodes" if growth.nodes_per_step else ""
    if growth.num_bytes < MIN_BYTES and growth.nodes_per_step:
        return f"0 tensor bytes but {growth.nodes_per_step} graph nodes a step (host memory) grow, held by {growth.chain}" + (
            ": backward() has freed what they saved." if growth.is_backwarded else "."
        )
    end = ", until its loop ends" if growth.until_end else ""
    return f"{size}{nodes} a step grow{end}, held by {growth.chain}."


def _remedy(growth: Growth) -> str:
    if growth.kind == CYCLE:
        return "Break the cycle (a weakref, or no reference to itself at all); gc.collect() in the loop would only hide it."
    if growth.kind == GRAPH_CYCLE:
        return "Use torch.autograd.grad(..., create_graph=True), or set .grad to None after use."
    if growth.kind == TRACEBACK:
        return "Keep str(error), or error.with_traceback(None), instead of the exception."
    if growth.kind == CACHE:
        return "Cache on the instance (a dict or a buffer) or on a plain function, so that the cache dies with the module."
    if "retain_graph" in growth.text:
        return "Detach what is carried over (`state = state.detach()`) at the start of the step, and drop retain_graph=True."
    if growth.kind == GRAPH and not growth.is_backwarded:
        return "Nothing here calls backward(): put the loop under torch.no_grad(), or keep .item() or .detach()."
    if growth.kind == GRAPH:
        return "Keep the value and not its graph: .item() or .detach(), or compute it under torch.no_grad()."
    if growth.used_bytes is not None:
        return (
            f"The views kept show {format_size(growth.used_bytes)} a step of it: keep a copy, `.clone()`. "
            "detach() does not help."
        )
    if growth.kind == CONTAINER and growth.is_attached:
        return "Keep `.detach().cpu()` of tensors and `.item()` of scalars, or clear the container when it has been read."
    if growth.kind == NAME:
        return "Reduce each batch before keeping it (argmax, a sum), or move what is kept to the host every few steps."
    return "Clear it when it has been read (each epoch, or after each step), keep a reduced value, or keep it on the host."
