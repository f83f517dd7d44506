"""Emptying the allocator's cache in a planned run, in stages: only at places where a simulation of the step says that it pays.

Where a measured step took more from the card than the budget although less was allocated, `plan_emptying` looks for the module calls
before which giving the cache back keeps the whole within it (`measurement.simulated`), and `Emptying` does it there, if reserved memory
stands far above allocated at that moment. A place that gives nothing back three times in a row is given up. Each call waits for the
device and is followed by asking for segments again, so everywhere else nothing is done. Never on a CPU, which keeps no cache.

Known limits: no place lies inside backward; streams, expandable segments and pools of graphs are not simulated. It is tested with an
allocator that is simulated, and has not run on a card yet.
"""

from __future__ import annotations

from collections.abc import Collection

from memfit.core.errors import PlanError
from memfit.core.keys import Cells, cells_of_plan
from memfit.core.plan import Plan
from memfit.core.trace import Trace
from memfit.measurement.backends import Backend
from memfit.measurement.simulated import Station, propose_emptying, stations

_FAR_ABOVE = 1.25  # reserved over allocated: below that there is little to give back
_MAX_FAILURES = 3


def plan_emptying(trace: Trace, plan: Plan | None, budget_bytes: int) -> frozenset[Station]:
    """Where to empty the cache so that the step under the plan reserves no more than the budget; nowhere if that cannot be had so."""
    try:
        cells = cells_of_plan(trace, plan) if plan is not None else Cells()
    except PlanError:  # a step that parts from the plan is planned anew anyway
        return frozenset()
    known = stations(trace)
    return frozenset(known[event] for event in propose_emptying(trace, budget_bytes, cells, known, is_warm=True))


class Emptying:
    """Gives the cache back at its places. num_calls, given_bytes: what has come of it so far."""

    def __init__(self, backend: Backend, places: Collection[Station]) -> None:
        self.num_calls = self.given_bytes = 0
        self._backend = backend
        self._failures = dict.fromkeys(places, 0)

    @property
    def places(self) -> Collection[Station]:
        """Those that have not been given up."""
        return self._failures.keys()

    def pass_by(self, place: Station) -> None:
        """The step has come to this place."""
        if place not in self._failures:
            return
        reserved, allocated = self._backend.process_bytes(), self._backend.allocated_bytes()
        if reserved is None or allocated is None:
            return
        given = 0
        if reserved > _FAR_ABOVE * allocated:
            self._backend.give_back()
            given = reserved - (self._backend.process_bytes() or 0)
            self.num_calls += 1
            self.given_bytes += given
        self._failures[place] = 0 if given else self._failures[place] + 1
        if self._failures[place] == _MAX_FAILURES:
            del self._failures[place]
