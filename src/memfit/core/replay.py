"""Replay: what a trace's events become under a plan. One replay serves the planner, the report and the tests.

A plan changes only what autograd's handles hold, so its effect is found by running the events again with some cells
evicted and some pinned, and by restoring what is unpacked, in the order and with the reference counts the engine uses
(engine/need.py is the live counterpart of `core.rerun`). Never a sum of savings: two peaks of 10 and 9, a move takes 3
off the first, another 3 off the second; alone they save 1 and 0, together 3.

Costs about 5 ms for 1,400 calls and 12,000 events. A `Replayer` prepares a trace once for many replays.
Known limit: a call replayed only for an internal tensor is charged in full, though the engine stops it early.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from memfit.core.breakdown import bytes_by, peak_by_phase
from memfit.core.rerun import Rerun, Restore, Tables
from memfit.core.trace import PHASE, PHASES, Trace

__all__ = ["Replay", "Replayer", "Request", "Restore", "bytes_by", "peak_by_phase", "replay"]


@dataclass(frozen=True)
class Replay:
    """What a step does under a plan.

    peak_bytes: the highest moment of the step, workspaces included; within event `peak_event`, in phase `peak_phase`.
    live_bytes: bytes of the live storages after each event. high_bytes: the highest moment within each event.
    holders: storages alive at the peak, oldest first; a restored copy stands under the storage it restores.
    workspace_bytes: what the peak has above them (spikes, workspaces of replayed calls).
    extra_seconds: time of the replayed calls. restores: what came back, in order.
    num_kept_instead: handles of evicted cells that stayed, since nothing could have brought them back.
    """

    peak_bytes: int
    peak_event: int
    peak_phase: str
    live_bytes: list[int]
    high_bytes: list[int]
    holders: tuple[int, ...]
    workspace_bytes: int
    extra_seconds: float
    restores: tuple[Restore, ...]
    recipes: tuple[int, ...]
    num_kept_instead: int

    @property
    def calls(self) -> tuple[int, ...]:
        """The replayed calls in the order they ran."""
        return tuple(call for restore in self.restores for call in restore.calls)


@dataclass(frozen=True)
class Request:
    """What one event asks of an allocator: bytes taken and given back within it, instances freed, and then made, as (instance, bytes).

    An instance is a storage of the trace, or a restored copy, whose numbers come after those.
    """

    moment_bytes: int
    freed: tuple[int, ...]
    made: tuple[tuple[int, int], ...]


def replay(trace: Trace, evict: Iterable[int] = (), pin: Iterable[int] = (), transient: Iterable[int] = ()) -> Replay:
    """The step with the cells `evict` evicted and the cells `pin` kept although autograd did not save them.

    transient: cells that come back for one reader at a time: a replay that passes them keeps them for nobody else.
    With none it is the step as plain eager runs it. All are cell indices.
    """
    return Replayer(trace).run(evict, pin, transient)


class Replayer(Tables):
    """A trace prepared for many replays."""

    def run(self, evict: Iterable[int] = (), pin: Iterable[int] = (), transient: Iterable[int] = ()) -> Replay:
        """See `replay`."""
        moves = frozenset(evict), frozenset(pin), frozenset(transient)
        events = [(operation, operand, 0) for operation, operand in self.events]
        run, holders = self._play_to_peak(moves, events)
        return Replay(
            peak_bytes=run.peak_bytes,
            peak_event=run.peak_event,
            peak_phase=_phase_at(self.trace, run.peak_event),
            live_bytes=run.live_bytes,
            high_bytes=run.high_bytes,
            holders=tuple(holders.held),
            workspace_bytes=run.peak_bytes - sum(self.sizes[each] for each in holders.held),
            extra_seconds=sum(restore.seconds for restore in run.restores),
            restores=tuple(run.restores),
            recipes=tuple(sorted(run.recipes)),
            num_kept_instead=run.num_kept_instead,
        )

    def measure(self, evict: Iterable[int] = (), pin: Iterable[int] = (), transient: Iterable[int] = ()) -> tuple[int, float]:
        """Peak bytes and extra seconds of `run` alone, at a fifth of the price: for searching."""
        run = Rerun(self, frozenset(evict), frozenset(pin), frozenset(transient))
        run.play(self.short_events, only_peak=True)
        return run.peak_bytes, sum(restore.seconds for restore in run.restores)

    def waiting(self, evict: Iterable[int] = (), pin: Iterable[int] = (), transient: Iterable[int] = ()) -> tuple[int, ...]:
        """The cells that have come back at the moment of the peak and wait for a reader."""
        moves = frozenset(evict), frozenset(pin), frozenset(transient)
        return tuple(self._play_to_peak(moves, self.short_events)[1].waiting)

    def _play_to_peak(self, moves: tuple[frozenset[int], ...], events: list[tuple[int, int, int]]) -> tuple[Rerun, Rerun]:
        """The whole rerun, and one that has stopped at its peak."""
        whole, at_peak = Rerun(self, *moves), Rerun(self, *moves)
        whole.play(events)
        at_peak.play(events, until_event=whole.peak_event, until_bytes=whole.peak_bytes)
        return whole, at_peak

    def requests(self, evict: Iterable[int] = (), pin: Iterable[int] = (), transient: Iterable[int] = ()) -> list[Request]:
        """What the step asks of an allocator, event by event. Costs a look at all storages an event: some seconds for a large trace."""
        run = Rerun(self, frozenset(evict), frozenset(pin), frozenset(transient))
        alive: set[int] = set()
        found = []
        for operation, operand in self.events:
            before = run.live
            run.play([(operation, operand, 0)])
            now = {instance for instance, count in enumerate(run.holds) if count and run.sizes[instance]}
            freed, made = tuple(sorted(alive - now)), tuple((each, run.sizes[each]) for each in sorted(now - alive))
            found.append(Request(run.high - max(before, run.live), freed, made))
            alive = now
        return found


def _phase_at(trace: Trace, event: int) -> str:
    phases = [operand for operation, operand in trace.events[: event + 1] if operation == PHASE]
    return PHASES[phases[-1]] if phases else "other"
