"""Mending: small changes to choices that are good already, each judged by the replay (Pareto local search)."""

from __future__ import annotations

from collections.abc import Set
from itertools import chain, islice, zip_longest
from typing import NamedTuple

from memfit.planner.frontier import join
from memfit.planner.problem import Choice, Problem

_MOST_CHANGES = 40  # tried on one choice
_NONE: frozenset[int] = frozenset()


class Change(NamedTuple):
    """Cells that change sides; a lower `rank` promises more."""

    rank: float
    keep: Set[int] = _NONE
    pin: Set[int] = _NONE
    evict: Set[int] = _NONE
    unpin: Set[int] = _NONE


def mend(problem: Problem, frontier: list[Choice], required: frozenset[int], num_replays: int) -> list[Choice]:
    """New choices around the frontier's, one call changed at a time, until `num_replays` replays are used up.

    Every choice of the frontier gets a turn before any gets its next one; what joins the frontier takes part. Of a
    frontier too long for a few turns each, evenly spread choices are mended.
    """
    found: list[Choice] = []
    frontier = [*frontier]
    evictions = _evictions(problem, required)
    changes: dict[Choice, list[Change]] = {}
    end = problem.num_evaluations + num_replays
    while problem.num_evaluations < end:
        fresh: list[Choice] = []
        for choice in frontier[:: 1 + 4 * len(frontier) // max(num_replays, 1)]:
            if choice not in changes:
                changes[choice] = _changes(problem, choice, evictions)[::-1]
            if changes[choice] and problem.num_evaluations < end:
                change = changes[choice].pop()
                evict, pin = (choice.evict | change.evict) - change.keep, (choice.pin | change.pin) - change.unpin
                fresh.append(problem.evaluate(evict, pin, choice.transient))
        if not fresh:
            break
        found += fresh
        join(frontier, fresh)
    return found


def _evictions(problem: Problem, required: frozenset[int]) -> list[tuple[int, Change]]:
    """By call that makes some of the cells, evicting all of them; what is most for a second first."""
    made: dict[int, list[int]] = {}
    for cell in sorted(required, key=lambda each: (problem.producer[each], each)):
        made.setdefault(int(problem.producer[cell]), []).append(cell)
    changes = [
        (call, Change(-float(problem.sizes[cells].sum()) / _seconds(problem, call), evict=frozenset(cells)))
        for call, cells in made.items()
    ]
    return sorted(changes, key=lambda change: change[1].rank)


def _changes(problem: Problem, choice: Choice, evictions: list[tuple[int, Change]]) -> list[Change]:
    """Ways to keep what a replayed call makes, and to evict what was kept; in turns, the most promising first."""
    sizes, saved, producer = problem.sizes.tolist(), problem.replayer.saved, problem.replayer.producer
    replayed = problem.replayed_calls(choice.evict, choice.pin)
    read = {cell for call in replayed for cell in problem.replayer.inputs[call]}
    keeping: list[Change] = []
    for call in sorted(replayed):
        results = [cell for cell in problem.replayer.outputs[call] if producer[cell] >= 0]
        kept = choice.evict.intersection(results)
        pins = {cell for cell in results if cell in read and cell not in saved}
        num_bytes = sum(sizes[cell] for cell in chain(kept, pins))
        keeping.append(Change(-_seconds(problem, call) / (num_bytes + 1), keep=kept, pin=pins))
        if len(kept) > 1:
            keeping += [Change(0.0, keep={cell}) for cell in sorted(kept)]
    keeping.sort(key=lambda change: change.rank)
    evicting = [change for call, change in evictions if call not in replayed]
    evicting += [Change(0.0, unpin={cell}) for cell in sorted(choice.pin, key=lambda cell: (producer[cell], cell))]
    in_turns = chain.from_iterable(zip_longest(keeping, evicting))
    return list(islice((change for change in in_turns if change is not None), _MOST_CHANGES))


def _seconds(problem: Problem, call: int) -> float:
    return problem.replayer.seconds[call] + 1e-12
