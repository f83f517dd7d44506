"""Calls in place in a plan: which may help at all, which of them do, and the moves that say so.

A call in place takes a temporary less for as long as it runs, or a map less until backward (core.inplace). The replay of the edited
step decides.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from memfit.core.inplace import edit, find_sites, propose, weigh
from memfit.core.plan import Move
from memfit.core.replay import Replayer
from memfit.core.sizes import format_size
from memfit.core.trace import Trace
from memfit.planner.moves import places_of
from memfit.planner.problem import Choice

_MOST_TRIES = 32
_NUM_SAMPLES = 12
_ENOUGH = 0.995  # of a choice's peak


def helps(edited: Trace, choices: Sequence[Choice]) -> bool:
    """Whether calls in place lower the peak of some choice made without them, by enough to plan with them. No budget is asked, so that
    a larger one is never planned worse."""
    replayer = Replayer(edited)
    sampled = choices[:: 1 + len(choices) // _NUM_SAMPLES]
    return any(replayer.measure(*each.cells)[0] < _ENOUGH * each.peak_bytes for each in sampled)


def leave_out_idle(trace: Trace, calls: Sequence[int], choice: Choice, room_bytes: int) -> list[int]:
    """The calls without those that the choice does as well without: neither above the room nor slower."""
    sizes = {call: trace.storages[trace.cells[trace.calls[call].inputs[0]].storage].nbytes for call in calls}
    kept = list(calls)
    for call in sorted(calls, key=lambda call: (sizes[call], call))[:_MOST_TRIES]:
        fewer = [each for each in kept if each != call]
        peak_bytes, seconds = Replayer(edit(trace, fewer)).measure(*choice.cells)
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
