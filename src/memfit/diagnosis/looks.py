"""When the heap is looked at, and how much of the run's time that may take.

In few iterations of a loop (3, 6, 12, 24, ...), before full collections (garbage is still there to be named) and at the program's end.
A look takes some 15 ms for each level of references (`measurement.holders`); looks stop while they have taken more than LOOK_SHARE of the
time.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from memfit.core import growth as core
from memfit.diagnosis.evidence import find_held, look
from memfit.diagnosis.record import Record
from memfit.measurement.births import Ledger
from memfit.measurement.holders import take_heap
from memfit.measurement.loops import NOTHING, Loop

LOOK_SHARE = 0.03
_FREE_LOOKS = 12  # before their share of the time counts
_TRACED = (
    "A debugger or coverage tool traces this run, so findings name the line where a tensor was made, not where it is kept."
)


class Looks:
    """All looks of one watch.

    held: what was found to be held for nothing, by kind and place. messages: what could not be seen, in sentences.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.held: dict[tuple[str, str, int], core.Growth] = {}
        self.messages: dict[str, None] = {}
        self.is_looking = False
        self._ledger = ledger
        self._num_looks = self._num_collector_looks = 0
        self._seconds = 0.0
        self._start = time.perf_counter()
        self._pid = os.getpid()

    def is_due(self, loop: Loop, best_rank: int) -> bool:
        """Whether to look now that the loop has gone around. best_rank: of all loops so far."""
        iteration = loop.iteration
        if iteration % 3 or (iteration // 3) & (iteration // 3 - 1):  # 3, 6, 12, 24, ...
            return False
        if loop.rank == NOTHING and best_rank > NOTHING:
            return False
        if loop.instance > 1 and loop.instance & (loop.instance - 1):
            return False
        return self._num_looks < _FREE_LOOKS or self._share < LOOK_SHARE

    def look(self, loop: Loop, record: Record, frame: FrameType) -> None:
        """Who holds what grows in this loop; then, for one iteration, which line makes their containers grow."""
        with self._looking() as is_free:
            if not is_free:
                return
            sites = [site for site in record.samples if record.rise(site) is not None]
            heap = take_heap(frame)
            found = look(heap, self._ledger, sites)
            self._keep(find_held(heap, self._ledger))
            del heap
            record.note(found, loop.iteration)
            is_wanted = bool(found.containers) and loop.instance < 2
            if is_wanted and not record.start_watchpoint(self._ledger.finder, loop, found.containers, frame):
                self.messages[_TRACED] = None
            self._num_looks += 1

    def look_for_held(self, frame: FrameType) -> None:
        """What is held for nothing now, loop or not."""
        with self._looking() as is_free:
            if is_free:
                self._keep(find_held(take_heap(frame), self._ledger))

    def on_collector(self, phase: str, details: dict[str, Any]) -> None:
        """For `gc.callbacks`."""
        frame = sys._getframe().f_back  # none while the interpreter ends
        if phase != "start" or details.get("generation") != 2 or not self._ledger.is_on or frame is None:
            return
        self._num_collector_looks += 1
        if self._num_collector_looks <= _FREE_LOOKS or self._share < LOOK_SHARE / 3:
            self.look_for_held(frame)

    @property
    def _share(self) -> float:
        return self._seconds / max(time.perf_counter() - self._start, 1e-9)

    def _keep(self, held: list[core.Growth]) -> None:
        for each in held:
            self.held[each.kind, each.path, each.line] = each

    @contextmanager
    def _looking(self) -> Iterator[bool]:
        """False where a look is on already, or in a forked child. The program must not die of being looked at: the report says it."""
        if self.is_looking or os.getpid() != self._pid:
            yield False
            return
        self.is_looking = True
        start = time.perf_counter()
        try:
            yield True
        except Exception as error:
            words = f"{type(error).__name__}: {error}"
            self.messages[f"A look at the heap failed, so holders may be missing here ({words}). Please report it."] = None
        finally:
            self.is_looking = False
            self._seconds += time.perf_counter() - start
