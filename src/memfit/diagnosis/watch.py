"""The growth watch: what grows from step to step in the program that runs inside it, and who holds it.

All the time: the ledger of births and the loop finder (`measurement`), and one sample of the living places each time a loop goes
around. In few iterations (3, 6, 12, 24, ... of a loop): a look at the heap, which names the holders; then, for one iteration, a trace
function that sees the line where their containers grow. Looks stop while they have taken more than LOOK_SHARE of the time.

A step is an iteration of a loop, the innermost one whose iterations step an optimizer; where none does, run a backward pass; else
call a module; else any. What was piled up and needed is told from growth in `candidates`.

One watch at a time, in one thread. Known limits: see `measurement.loops` and `measurement.births`.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, Generic, TypeVar

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memfit.core import growth as core
from memfit.core.errors import UnsupportedError
from memfit.diagnosis.candidates import UNKNOWN, Candidate, Candidates
from memfit.diagnosis.evidence import Holding, Look, find_held, look
from memfit.measurement.births import Ledger, Site, line_text
from memfit.measurement.holders import take_heap
from memfit.measurement.loops import BACKWARD, MODULE, NOTHING, OPTIMIZER, Loop, LoopFinder
from memfit.measurement.watchpoint import Growth as Grown
from memfit.measurement.watchpoint import Watchpoint

LOOK_SHARE = 0.03
MAX_SAMPLES = 48  # of one place in one loop; then every second one goes
_MIN_SETTLED = 1024  # bytes
_MAX_SETTLED = 6  # places
_FREE_LOOKS = 12  # before their share of the time counts

T = TypeVar("T")
_STEP = {OPTIMIZER: "an optimizer step", BACKWARD: "a backward pass", MODULE: "a module call", NOTHING: "a loop iteration"}


@dataclass
class _Record:
    """What is kept of one running loop."""

    born_bytes: int  # by all sites, until now
    born_here: dict[Site, int]
    samples: dict[Site, list[core.Sample]] = field(default_factory=dict)
    stride: int = 1
    holdings: dict[Site, Holding] = field(default_factory=dict)
    nodes: dict[str, list[tuple[int, int]]] = field(default_factory=dict)  # by holder: (iteration, nodes)
    by_name: dict[str, Holding] = field(default_factory=dict)
    grown: dict[int, Grown] = field(default_factory=dict)  # by id of the container
    watchpoint: Watchpoint | None = None


class GrowthWatch(Generic[T]):
    """Watches while it is entered, or while it is iterated. Made by `memfit.watch_growth`.

    budget_bytes: for the projection. max_steps: watch so many steps;
    then `on_enough` is called, if there is one.
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
        self._draw = draw
        self._finder = LoopFinder(self._on_around, self._on_end)
        self._ledger = Ledger(self._finder, self._on_mark)
        self._candidates = Candidates()
        self._held: dict[tuple[str, str, int], core.Growth] = {}
        self._looks: dict[tuple[Any, int], int] = {}
        self._num_looks = self._num_collector_looks = 0
        self._look_seconds = 0.0
        self._start = 0.0
        self._is_looking = False
        self._most: dict[int, tuple[int, str]] = {}  # by rank: (most iterations, file:line of the loop)
        self._settled: dict[int, dict[str, int]] = {}  # by rank of the loop: file:line, bytes
        self._messages: list[str] = []
        self._undo: list[Callable[[], None]] = []
        self._report: core.GrowthReport | None = None
        self._pid = os.getpid()

    # ---- life ------------------------------------------------------------------------------------------------------

    def __enter__(self) -> GrowthWatch[T]:
        global _active
        if _active is not None:
            raise UnsupportedError("A growth watch is at work in this process already. Leave the first before the second.")
        _active = self
        self._start = time.perf_counter()
        self._undo = [
            register_optimizer_step_pre_hook(self._before_optimizer).remove,
            register_optimizer_step_post_hook(self._after_optimizer).remove,
        ]
        gc.callbacks.append(self._on_collector)
        self._ledger.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.finish()

    def __iter__(self) -> Iterator[T]:
        with self:
            yield from self._items

    def look_now(self) -> None:
        """Look for memory held for nothing now; the program's last moment is a good one."""
        if self._ledger.is_on:
            self._look_for_held(sys._getframe(1))

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
        self._ledger.is_on = True  # so that it takes its hooks off after a pause, too
        self._ledger.stop()
        gc.callbacks.remove(self._on_collector)
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

    def _on_mark(self, rank: int) -> None:
        if not self._ledger.is_on:
            return
        self._finder.mark(rank)
        if rank in (BACKWARD, OPTIMIZER):
            self._candidates.note_use()

    def _on_around(self, loop: Loop) -> None:
        if not self._ledger.is_on or self._is_looking:
            return
        record = loop.data
        if record is None:
            record = loop.data = _Record(self._ledger.born_bytes, {site: site.born_bytes for site in self._ledger.sites})
        if record.watchpoint is not None:
            self._end_watchpoint(record)
        if loop.iteration % record.stride == 0:
            self._sample(loop, record)
        self._candidates.settle(loop)
        if self._is_time_to_look(loop):
            self._is_looking = True
            try:
                self._look(loop, record)
            except Exception as error:  # the program must not die of being looked at; the report says it
                self._note_failure(error)
            finally:
                self._is_looking = False
        self._count(loop)

    def _count(self, loop: Loop) -> None:
        rank = loop.rank
        most = self._most.get(rank, (0, ""))[0]
        if loop.iteration > most:
            self._most[rank] = (loop.iteration, f"{core.show_path(loop.code.co_filename)}:{loop.line}")
        if self._max_steps is not None and loop.iteration >= self._max_steps and rank == max(self._most):
            self.pause()
            if self.on_enough is not None:
                self.on_enough()

    def _sample(self, loop: Loop, record: _Record) -> None:
        is_full = False
        for site in self._ledger.sites:
            samples = record.samples.setdefault(site, [])
            samples.append(core.Sample(loop.iteration, len(site.alive), site.live_bytes))
            is_full = is_full or len(samples) > MAX_SAMPLES
        if is_full:
            record.stride *= 2
            for site, samples in record.samples.items():
                record.samples[site] = [each for each in samples if each.iteration % record.stride == 0]

    def _is_time_to_look(self, loop: Loop) -> bool:
        iteration = loop.iteration
        if iteration % 3 or (iteration // 3) & (iteration // 3 - 1):  # 3, 6, 12, 24, ...
            return False
        if loop.rank == NOTHING and len(self._most) > 1 and max(self._most) > NOTHING:
            return False
        if loop.instance > 1 and loop.instance & (loop.instance - 1):
            return False
        return self._num_looks < _FREE_LOOKS or self._look_share < LOOK_SHARE

    @property
    def _look_share(self) -> float:
        return self._look_seconds / max(time.perf_counter() - self._start, 1e-9)

    def _look(self, loop: Loop, record: _Record) -> None:
        sites = [site for site, samples in record.samples.items() if self._rise(site, samples) is not None]
        frame = sys._getframe(1)
        start = time.perf_counter()
        heap = take_heap(frame)
        found = look(heap, self._ledger, sites)
        for each in find_held(heap, self._ledger):
            self._held[each.kind, each.path, each.line] = each
        del heap
        record.holdings.update(found.by_site)
        for name, holding in found.by_name.items():
            record.by_name[name] = holding
            record.nodes.setdefault(name, []).append((loop.iteration, holding.num_nodes))
        if found.containers and loop.instance < 2:
            self._start_watchpoint(loop, record, found, frame)
        self._num_looks += 1
        self._look_seconds += time.perf_counter() - start

    def _start_watchpoint(self, loop: Loop, record: _Record, found: Look, frame: FrameType) -> None:
        record.watchpoint = Watchpoint(self._finder, loop, found.containers)
        if not record.watchpoint.start(frame):
            record.watchpoint = None
            message = "A debugger or coverage tool traces this run, so findings name the line where a tensor was made, not where it is kept."
            if message not in self._messages:
                self._messages.append(message)

    def _end_watchpoint(self, record: _Record) -> None:
        assert record.watchpoint is not None
        record.watchpoint.stop(sys._getframe(1))
        record.grown.update(record.watchpoint.found)
        record.watchpoint = None

    def _on_collector(self, phase: str, details: dict[str, int]) -> None:
        """Before a full collection: garbage is still there to be named."""
        frame = sys._getframe().f_back  # none while the interpreter ends
        if phase == "start" and details.get("generation") == 2 and self._ledger.is_on and frame is not None:
            self._num_collector_looks += 1
            if self._num_collector_looks <= _FREE_LOOKS or self._look_share < LOOK_SHARE / 3:
                self._look_for_held(frame)

    def _note_failure(self, error: Exception) -> None:
        message = (
            f"A look at the heap failed, so holders may be missing here ({type(error).__name__}: {error}). Please report it."
        )
        if message not in self._messages:
            self._messages.append(message)

    def _look_for_held(self, frame: FrameType) -> None:
        if self._is_looking or os.getpid() != self._pid:
            return
        self._is_looking = True
        start = time.perf_counter()
        try:
            for each in find_held(take_heap(frame), self._ledger):
                self._held[each.kind, each.path, each.line] = each
        except Exception as error:
            self._note_failure(error)
        finally:
            self._is_looking = False
        self._look_seconds += time.perf_counter() - start

    # ---- judging ---------------------------------------------------------------------------------------------------

    @staticmethod
    def _rise(site: Site, samples: list[core.Sample]) -> core.Rise | None:
        return core.judge(samples, is_own_input=site.is_own_input)

    def _on_end(self, loop: Loop) -> None:
        record: _Record | None = loop.data
        loop.data = None
        if record is None:
            return
        if record.watchpoint is not None:
            self._end_watchpoint(record)
        active = self._finder.active
        outer = active[-1] if active and active[-1] is not loop else None
        born = max(1.0, (self._ledger.born_bytes - record.born_bytes) / max(1, loop.iteration - 1))
        nodes = self._nodes_per_step(record)
        for site, samples in record.samples.items():
            holding = record.holdings.get(site)
            rise = self._rise(site, samples)
            if holding is not None and holding.kind == core.CYCLE:
                per_step = (site.born_bytes - record.born_here.get(site, 0)) / max(1, loop.iteration)  # all of it waits
                rise = core.Rise(per_step, 0.0, loop.iteration)
            if rise is None and site.first >= loop.entered and min(each.num_bytes for each in samples) >= _MIN_SETTLED:
                place = "{}:{}".format(*_shown(site.place))
                settled = self._settled.setdefault(loop.rank, {})
                settled[place] = max(settled.get(place, 0), samples[-1].num_bytes)
            if holding is not None and holding.kind not in core.CODES:
                continue
            if rise is None or (holding is None and rise.bytes_per_step < core.MIN_BYTES):
                continue
            growth = self._growth(loop, record, site, holding, rise, rise.bytes_per_step / born)
            if holding is not None and holding.name in nodes:
                growth = replace(growth, nodes_per_step=nodes[holding.name])
                record.by_name.pop(holding.name, None)
            piled = round(rise.count_per_step * loop.iteration)
            births = tuple(site.alive)[: samples[-1].count][-piled or None :]  # not those of the last iteration
            births = births[:: max(1, len(births) // 8)]
            self._candidates.add(Candidate(site, growth, loop.rank, loop.number, births, outer))
        for name, per_step in nodes.items():
            if name in record.by_name:
                growth = self._growth(loop, record, None, record.by_name[name], core.Rise(0.0, 0.0, loop.iteration), 0.0)
                growth = replace(growth, nodes_per_step=per_step)
                self._candidates.add(Candidate(None, growth, loop.rank, loop.number, (), outer))

    @staticmethod
    def _nodes_per_step(record: _Record) -> dict[str, int]:
        """By holder: how many autograd nodes more each step, from the first look to the last."""
        latest = max((seen[-1][0] for seen in record.nodes.values()), default=0)
        found = {}
        for name, seen in record.nodes.items():
            (first, few), (last, many) = seen[0], seen[-1]
            if last == latest and last > first and (many - few) / (last - first) >= 1:
                found[name] = round((many - few) / (last - first))
        return found

    def _growth(
        self, loop: Loop, record: _Record, site: Site | None, holding: Holding | None, rise: core.Rise, share: float
    ) -> core.Growth:
        made_at = () if site is None else (("{}:{}".format(*_shown(site.place)), site.module, round(rise.bytes_per_step)),)
        place = site.place if site is not None else ("", 0)
        if holding is not None:
            place = holding.place or place
            grown = next((record.grown[key] for key in holding.containers if key in record.grown), None)
            if grown is not None:
                place = grown.made_at or (grown.path, grown.line)
        retained = [place for place, (retain, create) in self._ledger.backwards.items() if retain and not create]
        if holding is not None and holding.kind == core.GRAPH and site is not None and retained:
            place = retained[0]
        share_used = holding.used_share if holding is not None else 1.0
        return core.Growth(
            kind=holding.kind if holding is not None else core.CONTAINER,
            path=place[0],
            line=place[1],
            text=line_text(*place),
            made_at=made_at,
            num_bytes=round(rise.bytes_per_step),
            num_steps=rise.num_steps,
            loop=f"{core.show_path(loop.code.co_filename)}:{loop.line}",
            chain=holding.chain if holding is not None else UNKNOWN,
            is_attached=holding is not None and holding.is_attached,
            is_backwarded=loop.rank >= BACKWARD,
            used_bytes=round(rise.bytes_per_step * share_used) if share_used < 0.5 else None,
            share=share,
            device=site.device if site is not None else "cpu",
        )

    def _judge(self) -> core.GrowthReport:
        best_rank = max(self._most, default=NOTHING)
        growths = [*self._candidates.close(is_training=self._finder.is_marked), *self._held.values()]
        num_steps, step_loop = self._most.get(best_rank, (0, ""))
        return core.GrowthReport(
            program="",
            growths=tuple(sorted(growths, key=lambda each: (not each.is_material, -each.num_bytes, each.path, each.line))),
            settled=tuple(sorted(self._settled.get(best_rank, {}).items(), key=lambda each: -each[1])[:_MAX_SETTLED]),
            num_steps=num_steps + 1 if num_steps else 0,
            step=f"{_STEP[best_rank]} in the loop at {step_loop}" if step_loop else "",
            live_bytes=self._ledger.live_bytes,
            peak_bytes=self._ledger.peak_bytes,
            budget_bytes=self._budget_bytes,
            messages=tuple(self._messages),
        )


_active: GrowthWatch[Any] | None = None


def _shown(place: tuple[str, int]) -> tuple[str, int]:
    return core.show_path(place[0]), place[1]


def _pause_in_child() -> None:
    """In a forked child (a loader's worker): nothing is watched there."""
    if _active is not None:
        _active.pause()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pause_in_child)
