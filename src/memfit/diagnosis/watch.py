"""The growth watch: what grows from step to step in the program that runs inside it, and who holds it.

All the time: the ledger of births and the loop finder (`measurement`), and one sample of the living places each time a loop goes
around (`record`). Now and then: a look at the heap, which names the holders, and one iteration under a trace function that sees the
line where their containers grow (`looks`). When a loop is over it is judged (`judging`), and when the run is over, whether what was piled
up had been needed (`candidates`).

A step is an iteration of a loop, the innermost one whose iterations step an optimizer; where none does, run a backward pass; else
call a module; else any.

One watch at a time, in one thread. Known limits: see `measurement.loops` and `measurement.births`.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memfit.core import growth as core
from memfit.core.errors import UnsupportedError
from memfit.diagnosis.candidates import Candidates
from memfit.diagnosis.judging import find_settled, judge_loop
from memfit.diagnosis.looks import Looks
from memfit.diagnosis.peaks import Peaks
from memfit.diagnosis.record import Record
from memfit.diagnosis.values import ValueLog
from memfit.measurement.births import Ledger
from memfit.measurement.loops import BACKWARD, MODULE, NOTHING, OPTIMIZER, Loop, LoopFinder

_MAX_SETTLED = 6  # places

T = TypeVar("T")
_STEP = {OPTIMIZER: "an optimizer step", BACKWARD: "a backward pass", MODULE: "a module call", NOTHING: "a loop iteration"}


class GrowthWatch(Generic[T]):
    """Watches while it is entered, or while it is iterated. Made by `memfit.watch_growth`.

    budget_bytes: for the projection. max_steps: watch so many steps (that call a module, at least);
    then `on_enough` is called, if there is one. values: filled meanwhile, if there is one.
    """

    def __init__(
        self,
        items: Iterable[T] = (),
        *,
        budget_bytes: int | None = None,
        max_steps: int | None = None,
        draw: Callable[[core.GrowthReport], str] | None = None,
    ) -> None:
        self._items = items
        self._budget_bytes = budget_bytes
        self._max_steps = max_steps
        self.on_enough: Callable[[], None] | None = None
        self.values: ValueLog | None = None
        self._draw = draw
        self._finder = LoopFinder(self._on_around, self._on_end)
        self._ledger = Ledger(self._finder, self._on_mark)
        self._candidates = Candidates()
        self._peaks = Peaks()
        self._looks = Looks(self._ledger)
        self._most: dict[int, tuple[int, str]] = {}  # by rank: (most iterations, file:line of the loop)
        self._settled: dict[int, dict[str, int]] = {}  # by rank of the loop: file:line, bytes
        self._undo: list[Callable[[], None]] = []
        self._report: core.GrowthReport | None = None
        self._pid = os.getpid()

    # ---- life ------------------------------------------------------------------------------------------------------

    def __enter__(self) -> GrowthWatch[T]:
        global _active
        if _active is not None:
            raise UnsupportedError("A growth watch is at work in this process already. Leave the first before the second.")
        _active = self
        self._undo = [
            register_optimizer_step_pre_hook(self._before_optimizer).remove,
            register_optimizer_step_post_hook(self._after_optimizer).remove,
        ]
        gc.callbacks.append(self._looks.on_collector)
        self._ledger.start()
        if self.values is not None:
            self.values.start(self._quiet)
            self._undo.append(self.values.stop)
        return self

    def __exit__(self, *_: Any) -> None:
        self.finish()

    def __iter__(self) -> Iterator[T]:
        with self:
            yield from self._items

    def look_now(self) -> None:
        """Look for memory held for nothing now; the program's last moment is a good one."""
        if self._ledger.is_on:
            self._looks.look_for_held(sys._getframe(1))

    def pause(self) -> None:
        """Watch no more; what was seen stays."""
        self._ledger.is_on = False

    def finish(self) -> None:
        """The end: take everything off and judge. Idempotent."""
        global _active
        if _active is not self:
            return
        if self._pid == os.getpid():
            self._finder.finish()
        self._ledger.take_high()
        self._ledger.is_on = True  # so that it takes its hooks off after a pause, too
        self._ledger.stop()
        gc.callbacks.remove(self._looks.on_collector)
        while self._undo:
            self._undo.pop()()
        _active = None
        self._report = self._judge()

    @property
    def report(self) -> core.GrowthReport:
        """What was seen. Raises ValueError while the watch is on."""
        if self._report is None:
            raise ValueError("The watch is still on: ask for its report after the `with` block or the loop.")
        return self._report

    def __str__(self) -> str:
        return "a growth watch" if self._report is None or self._draw is None else self._draw(self._report)

    # ---- while it runs ---------------------------------------------------------------------------------------------

    def _before_optimizer(self, *_: Any) -> None:
        if self._ledger.is_on:
            self._ledger.visit(sys._getframe(1), OPTIMIZER)
            self._ledger.is_in_optimizer = True

    def _after_optimizer(self, *_: Any) -> None:
        self._ledger.is_in_optimizer = False
        self._on_mark(OPTIMIZER)

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        """Inside, nothing is watched."""
        was_on, self._ledger.is_on = self._ledger.is_on, False
        try:
            yield
        finally:
            self._ledger.is_on = was_on

    def _on_mark(self, rank: int) -> None:
        if not self._ledger.is_on:
            return
        if rank == BACKWARD and self.values is not None:
            self.values.note_backward()
        self._finder.mark(rank)
        if rank in (BACKWARD, OPTIMIZER):
            self._candidates.note_use()

    def _on_around(self, loop: Loop) -> None:
        if not self._ledger.is_on or self._looks.is_looking:
            return
        record: Record | None = loop.data
        if record is None:
            record = loop.data = Record(self._ledger.born_bytes, {site: site.born_bytes for site in self._ledger.sites})
        record.end_watchpoint(sys._getframe())
        record.sample(loop.iteration, self._ledger.sites)
        self._peaks.note(self._finder.active, loop, self._ledger.take_high())
        self._candidates.settle(loop)
        if self._looks.is_due(loop, max(self._most, default=NOTHING)):
            self._looks.look(loop, record, sys._getframe())
        self._count(loop)

    def _count(self, loop: Loop) -> None:
        rank = loop.rank
        most = self._most.get(rank, (0, ""))[0]
        if loop.iteration > most:
            self._most[rank] = (loop.iteration, f"{core.show_path(loop.code.co_filename)}:{loop.line}")
        is_step = rank > NOTHING and rank == max(self._most)  # a loop that reads data is no reason to stop
        if self._max_steps is not None and is_step and loop.iteration >= self._max_steps:
            self.pause()
            if self.on_enough is not None:
                self.on_enough()

    # ---- judging ---------------------------------------------------------------------------------------------------

    def _on_end(self, loop: Loop) -> None:
        record: Record | None = loop.data
        loop.data = None
        if record is None:
            return
        record.end_watchpoint(sys._getframe())
        self._peaks.end(loop, self._ledger.take_high())
        active = self._finder.active
        outer = active[-1] if active and active[-1] is not loop else None
        for candidate in judge_loop(loop, record, self._ledger, outer):
            self._candidates.add(candidate)
        settled = self._settled.setdefault(loop.rank, {})
        for place, num_bytes in find_settled(loop, record).items():
            settled[place] = max(settled.get(place, 0), num_bytes)

    def _judge(self) -> core.GrowthReport:
        best_rank = max(self._most, default=NOTHING)
        growths = [*self._candidates.close(is_training=self._finder.is_marked), *self._looks.held.values()]
        num_steps, step_loop = self._most.get(best_rank, (0, ""))
        return core.GrowthReport(
            program="",
            growths=tuple(sorted(growths, key=lambda each: (not each.is_material, -each.num_bytes, each.path, each.line))),
            settled=tuple(sorted(self._settled.get(best_rank, {}).items(), key=lambda each: -each[1])[:_MAX_SETTLED]),
            num_steps=num_steps + 1 if num_steps else 0,
            step=f"{_STEP[best_rank]} in the loop at {step_loop}" if step_loop else "",
            live_bytes=self._ledger.live_bytes,
            peak_bytes=self._ledger.peak_bytes,
            peaks=self._peaks.by_rank.get(best_rank) if best_rank >= BACKWARD else None,  # others may pile up what is needed
            budget_bytes=self._budget_bytes,
            messages=tuple(self._looks.messages),
        )


_active: GrowthWatch[Any] | None = None


def _pause_in_child() -> None:
    """In a forked child (a loader's worker): nothing is watched there."""
    if _active is not None:
        _active.pause()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pause_in_child)
