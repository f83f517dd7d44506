"""Dead names in a trace: what the program held after its last read, and the same step without it.

The recorder notes a death where the name was the last the program had of the storage (`meta["dead_names"]`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

from memfit.core.liveness import DeadName
from memfit.core.trace import ALLOC, DROP, PHASE, RELEASE, SAVE, UNPACK, Trace


@dataclass(frozen=True)
class Dead:
    """From before event `event` on, nobody in the program reads `storage`; `name` is what held it.

    is_unsaved: autograd did not hold it either, so letting go of the name frees it there and then.
    """

    name: DeadName
    storage: int
    event: int
    is_unsaved: bool = True


def dead_in(trace: Trace) -> list[Dead]:
    """What died in the traced step before the program let go of it, in order of time; names let go at once included."""
    known = [each.name for each in fields(DeadName)]
    found = []
    for row in trace.meta.get("dead_names", ()):
        name = DeadName(**{each: row[each] for each in known if each in row})
        name = replace(name, bound_lines=tuple(name.bound_lines))  # JSON has lists
        found.append(Dead(name, row["storage"], row["event"], row["is_unsaved"]))
    return found


def let_go_early(trace: Trace, dead: Iterable[Dead], until: int | None = None) -> Trace:
    """The trace of the same step with these let go where they die; with `until`, only the events up to that one of the original.

    With a name goes the graph that only it held: the handles autograd dropped directly before the storage was released. Other
    holds of autograd's stay what they are. What is dead when the step begins has been let go in the step before, so it is not there.
    """
    dies: dict[int, int] = {}
    for each in dead:
        dies[each.storage] = min(each.event, dies.get(each.storage, each.event))
    earlier: dict[int, list[tuple[str, int]]] = {event: [] for event in dies.values()}
    gone: set[int] = set()  # events that moved
    saved = {operand: index for index, (operation, operand) in enumerate(trace.events) if operation == SAVE}
    released = {operand: index for index, (operation, operand) in enumerate(trace.events) if operation == RELEASE}
    begin = next((index for index, (operation, _) in enumerate(trace.events) if operation == PHASE), 0)
    held = {operand: index for index, (operation, operand) in enumerate(trace.events[:begin]) if operation == ALLOC}
    for storage, event in dies.items():
        place = released.get(storage, len(trace.events))
        if place < event:
            continue
        if event <= begin + 1 and storage in held:
            gone.update((held[storage], place))
            continue
        start = place
        while start > event and trace.events[start - 1][0] == DROP and saved.get(trace.events[start - 1][1], event) < event:
            start -= 1
        earlier[event] += [*trace.events[start:place], (RELEASE, storage)]
        gone.update(range(start, place + 1))
    end = len(trace.events) if until is None else until + 1
    events: list[tuple[str, int]] = []
    for index, each_event in enumerate(trace.events[:end]):
        events += earlier.get(index, ())
        if index not in gone:
            events.append(each_event)
    return replace(trace, events=tuple(events))


def old_gradients(trace: Trace) -> list[Dead]:
    """Gradients alive when the step began and let go before its backward; dead from the step's start on."""
    start = next((index for index, (operation, _) in enumerate(trace.events) if operation == PHASE), 0)
    end = next((index for index, (operation, _) in enumerate(trace.events) if operation == UNPACK), 0)
    old = {
        operand
        for operation, operand in trace.events[:start]
        if operation == ALLOC and trace.storages[operand].kind == "gradient"
    }
    nobody = DeadName("", "", "", 0, ())
    return [
        Dead(nobody, operand, start + 1) for operation, operand in trace.events[:end] if operation == RELEASE and operand in old
    ]


def freed_bytes(trace: Trace) -> dict[DeadName, int]:
    """The bytes each name was the very last to hold when it died, largest first: what a release at these places frees in a step."""
    sums: dict[DeadName, int] = {}
    for each in dead_in(trace):
        if each.is_unsaved:
            sums[each.name] = sums.get(each.name, 0) + trace.storages[each.storage].nbytes
    return dict(sorted(sums.items(), key=lambda item: -item[1]))
