"""Calls in place in a plan: which may help at all, which of them do, and the moves that say so.

A call in place takes a temporary less for as long as it runs, or a map less until backward (core.inplace). It helps where the step is
above the budget at that moment; the replay of the edited step decides.
"""

from __future__ import annotations

from collections import defaultdict

from memfit.core.inplace import edit, find_sites, propose, weigh
from memfit.core.plan import Move
from memfit.core.replay import Replayer
from memfit.core.sizes import format_size
from memfit.core.trace import BEGIN, RELEASE, Trace
from memfit.planner.moves import places_of
from memfit.planner.problem import Choice

_MOST_TRIES = 32


def choose_calls(trace: Trace, room_bytes: int) -> list[int]:
    """Calls that may be in place and during which the step, as it is, is above `room_bytes`, or which hold a map less from then on."""
    step = Replayer(trace).run()
    if step.peak_bytes <= room_bytes:
        return []
    sites = [site for site in find_sites(trace) if not site.reason]
    if not sites:
        return []
    begins = {operand: index for index, (operation, operand) in enumerate(trace.events) if operation == BEGIN}
    releases = {operand: index for index, (operation, operand) in enumerate(trace.events) if operation == RELEASE}
    chosen = []
    for site in sites:
        source = trace.cells[trace.calls[site.call].inputs[0]].storage
        start, end = begins[site.call], releases.get(source, len(trace.events))
        if site.is_map or max(step.high_bytes[start : end + 1], default=0) > room_bytes:
            chosen.append(site.call)
    return chosen


def leave_out_idle(trace: Trace, calls: list[int], choice: Choice, room_bytes: int) -> list[int]:
    """The calls without those that the choice does as well without: neither above the room nor slower."""
    sizes = {call: trace.storages[trace.cells[trace.calls[call].inputs[0]].storage].nbytes for call in calls}
    kept = list(calls)
    for call in sorted(calls, key=lambda call: (sizes[call], call))[:_MOST_TRIES]:
        fewer = [each for each in kept if each != call]
        peak_bytes, seconds = Replayer(edit(trace, fewer)).measure(choice.evict, choice.pin)
        if peak_bytes <= room_bytes and seconds <= choice.seconds:
            kept = fewer
    return kept


def note_proposals(trace: Trace) -> str | None:
    """What the plan leaves alone, in a sentence; None where no call may be in place."""
    calls = propose(trace)
    if not calls:
        return None
    worth = weigh(trace, edit(trace, calls))
    many = f"{len(calls)} calls" if len(calls) > 1 else "1 call"
    return (
        f"{many} may be in place, which takes {format_size(worth.peak_bytes)} off the peak of the step as it is and "
        f"{format_size(worth.held_bytes)} off what is held until backward; this plan does without (memfit explain inplace)."
    )


def in_place_moves(trace: Trace, calls: list[int]) -> tuple[Move, ...]:
    """A move for each block of the model with calls in place, in forward order."""
    groups: dict[str, list[int]] = defaultdict(list)
    for call, place in zip(calls, places_of([trace.calls[call].module for call in calls]), strict=True):
        groups[place].append(call)
    is_map = {site.call: site.is_map for site in find_sites(trace)} if calls else {}
    return tuple(_move(trace, place, members, is_map) for place, members in groups.items())


def _move(trace: Trace, place: str, calls: list[int], is_map: dict[int, bool]) -> Move:
    def num_bytes(members: list[int]) -> int:
        return sum(trace.storages[trace.cells[trace.calls[call].inputs[0]].storage].nbytes for call in members)

    maps = [call for call in calls if is_map[call]]
    names = ", ".join(dict.fromkeys(trace.calls[call].function for call in calls))
    brief = num_bytes([call for call in calls if not is_map[call]])
    parts = [f"{format_size(num_bytes(maps))} less until backward"] * bool(maps) + [
        f"{format_size(brief)} less while they run"
    ] * bool(brief)
    return Move(
        technique="inplace",
        place=place,
        evict=(),
        saved_bytes=num_bytes(maps),
        reason=f"{names} written over the input, which nobody reads again: {' and '.join(parts)}.",
        calls=tuple(trace.calls[call].place for call in calls),
    )
