"""The most that was alive in each step: tells a longest batch that comes late from growth. Costs a microsecond each time a loop goes around."""

from __future__ import annotations

import weakref

from memfit.core.growth import StepPeaks
from memfit.measurement.loops import OPTIMIZER, Loop


class Peaks:
    """Of all loops. by_rank: of the longest loop of each rank."""

    def __init__(self) -> None:
        self.by_rank: dict[int, StepPeaks] = {}
        self._high: weakref.WeakKeyDictionary[Loop, int] = weakref.WeakKeyDictionary()  # in the iteration that runs
        self._seen: weakref.WeakKeyDictionary[Loop, StepPeaks] = weakref.WeakKeyDictionary()

    def note(self, active: list[Loop], around: Loop, high_bytes: int) -> None:
        """`around` has finished an iteration. high_bytes: the most alive since the last call; it counts for all loops that run."""
        for loop in active:
            self._high[loop] = max(self._high.get(loop, 0), high_bytes)
        highest = max(self._high.pop(around, 0), high_bytes)
        step = around.iteration  # from 1
        seen = self._seen.get(around)
        if seen is None or (step == 2 and around.marked[OPTIMIZER]):  # the optimizer's state came at the end of the first
            self._seen[around] = StepPeaks(step, highest, step, highest, step)
        else:
            largest, at = max((seen.largest_bytes, -seen.largest_step), (highest, -step))
            self._seen[around] = StepPeaks(seen.first_step, seen.first_bytes, -at, largest, step)

    def end(self, loop: Loop, high_bytes: int) -> None:
        """The loop was left, in its last iteration."""
        loop.iteration += 1
        self.note([], loop, high_bytes)
        loop.iteration -= 1
        seen, best = self._seen.pop(loop), self.by_rank.get(loop.rank)
        if best is None or seen.num_steps > best.num_steps:
            self.by_rank[loop.rank] = seen
