"""Dead names in a trace: what the program held after its last read, and the same step without it.

The recorder notes a death where the name was the last the program had of the storage (`meta["dead_names"]`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

from memfit.core.liveness import DeadName
from memfit.core.trace import ALLOC, RELEASE, Trace


@dataclass(frozen=True)
class Dead:
    """From before event `event` on, nobody in the program reads `storage`; `name` is what held it."""

    name: DeadName
    storage: int
    event: int


def dead_in(trace: Trace) -> list[Dead]:
    """What died in the traced step before the program let go of it, in order of time; names let go at once included."""
    known = [each.name for each in fields(DeadName)]
    found = []
    for row in trace.meta.get("dead_names", ()):
        name = DeadName(**{each: row[each] for each in known})
        found.append(Dead(replace(name, bound_lines=tuple(name.bound_lines)), row["storage"], row["event"]))  # JSON has lists
    return found


def let_go_early(trace: Trace, dead: Iterable[Dead]) -> Trace:
    """The trace of the same step with these let go where they die. Autograd's own hold on a storage is not touched."""
    moved = {each.storage: each.event for each in dead}
    at: dict[int, list[tuple[str, int]]] = {}
    for storage, event in moved.items():
        at.setdefault(event, []).append((RELEASE, storage))
    events: list[tuple[str, int]] = []
    is_alive: set[int] = set()
    for index, (operation, operand) in enumerate(trace.events):
        for release in at.get(index, ()):
            if release[1] in is_alive:
                events.append(release)
                is_alive.discard(release[1])
        if operation == ALLOC:
            is_alive.add(operand)
        elif operation == RELEASE:
            if operand not in is_alive:
                continue  # let go before
            is_alive.discard(operand)
        events.append((operation, operand))
    return replace(trace, events=tuple(events))


def bytes_of_names(trace: Trace) -> dict[DeadName, int]:
    """The bytes each name was the last to hold when it died, largest first: what a release lets go of at these places in a step."""
    sums: dict[DeadName, int] = {}
    for each in dead_in(trace):
        sums[each.name] = sums.get(each.name, 0) + trace.storages[each.storage].nbytes
    return dict(sorted(sums.items(), key=lambda item: -item[1]))
