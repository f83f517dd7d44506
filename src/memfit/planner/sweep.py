"""Solver 'sweep': prices, regions and seams, each judged by the replay.

1. For several region sizes (one region for the whole step, then finer), sweep the price of a byte: the minimum cuts
   give the convex hull of what is kept against what is recomputed (Eisner and Severance 1976).
2. Sew pairs of these together at a call: the thriftier one before the seam, the quicker one after it. Backward frees
   the end of the step first, so what the end keeps is gone when the beginning is restored.
3. Mend what is best so far, one call at a time.
4. For some budgets solve a short step as an integer program (integer.py), and sew and mend once more.
5. At the low end let cells come back for each reader anew (lighten.py), and mend and sew what that gives.

Costs about 3 s for 190 calls, 8 s for 550 (half of it integer programs), 5 s for 2,500 and 20 s for 25,000: the number of
replays is limited by the size of the trace. No clocks and no randomness: the same trace gives the same choices.
"""

from __future__ import annotations

import math
from itertools import combinations, pairwise

import numpy as np

from memfit.planner.frontier import join, pareto
from memfit.planner.integer import MOST_CALLS, solve_levels
from memfit.planner.lighten import lighten
from memfit.planner.mend import mend
from memfit.planner.problem import Choice, OnProgress, Problem
from memfit.planner.regions import border_cells, find_borders

_NUM_REGIONS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_MOST_LEVELS = 3
_HULL_DEPTH = 4
_NUM_SEAMS = 16
_SEAMS_PER_TURN = 3

_Point = tuple[Choice, float, float]  # a choice, bytes kept, seconds


def solve_sweep(problem: Problem, progress: OnProgress | None = None) -> list[Choice]:
    """Choices from doing nothing down to the lowest peak found."""
    is_short = len(problem.seconds) <= MOST_CALLS
    num_replays = (12_000_000 if is_short else 9_000_000) // (len(problem.replayer.short_events) + 1500)
    found = [problem.evaluate(frozenset(), frozenset())]
    required = np.zeros(len(problem.sizes), dtype=bool)
    level_bytes = 0.8 * problem.eager.peak_bytes
    # Where the peak came down, cells that only hold lower moments up begin to matter.
    for _ in range(_MOST_LEVELS):
        if np.array_equal(required, problem.relevant(level_bytes)):
            break
        required = problem.relevant(level_bytes)
        for num_regions in _NUM_REGIONS:
            found += _hull(problem, required, num_regions)
        level_bytes = min(level_bytes, *(choice.peak_bytes for choice in found))
    seams = _seams(problem, required)
    movable = frozenset(np.flatnonzero(required).tolist())
    share, late_share = num_replays // 4, num_replays // (8 if is_short else 16)

    def sew_pairs(frontier: list[Choice]) -> list[Choice]:
        return _sew_pairs(problem, frontier, seams, share)

    def fill_gaps(frontier: list[Choice]) -> list[Choice]:
        return _fill_gaps(problem, frontier, seams, share)

    def mend_all(frontier: list[Choice]) -> list[Choice]:
        return mend(problem, frontier, movable, share)

    def solve_programs(frontier: list[Choice]) -> list[Choice]:
        return solve_levels(problem, frontier, required)

    def lighten_all(frontier: list[Choice]) -> list[Choice]:
        thriftiest = [choice for count in _NUM_REGIONS for choice in _hull(problem, required, count, depth=0)]
        lighter = pareto([*frontier, *lighten(problem, [*pareto(thriftiest), *frontier], late_share)])
        mended = pareto([*lighter, *mend(problem, lighter, movable, late_share)])
        return [*mended, *_fill_gaps(problem, mended, seams, late_share)]

    stages = [sew_pairs, fill_gaps, mend_all, fill_gaps]
    if is_short:
        stages += [solve_programs, fill_gaps, mend_all]
    stages.append(lighten_all)
    for number, stage in enumerate(stages):
        if progress is not None:
            progress("planning", number, len(stages))
        found += stage(pareto(found))
    return pareto(found)


def find_low_choices(problem: Problem) -> list[Choice]:
    """The lowest peaks that the regions alone reach: a quick look at how small a budget can be served."""
    required = problem.relevant(0.8 * problem.eager.peak_bytes)
    return [choice for count in _NUM_REGIONS for choice in _hull(problem, required, count, depth=0)]


def _hull(problem: Problem, required: np.ndarray, num_regions: int, depth: int = _HULL_DEPTH) -> list[Choice]:
    total = int(problem.sizes[required].sum())
    if not total:
        return []
    borders = find_borders(problem, required, total / num_regions)
    crossing = border_cells(problem, borders)

    def at_price(price: float) -> _Point:
        cut = problem.cut(required, problem.sizes * price, crossing)
        evict, pin = cut.evict, cut.pin
        kept = total - int(problem.sizes[list(evict)].sum()) + int(problem.sizes[list(pin)].sum())
        seconds = float(problem.seconds[list(problem.replayed_calls(evict, pin))].sum())
        return problem.evaluate(evict, pin), kept, seconds

    # The highest price still in integer reach: every byte is dearer than all seconds.
    top = at_price(float(problem.seconds.sum()) + 1.0)
    found = [top[0]]
    nothing = problem.evaluate(frozenset(), frozenset())
    spans: list[tuple[_Point, _Point]] = [((nothing, float(total), 0.0), top)]
    for _ in range(depth):
        next_spans = []
        for quick, thrifty in spans:
            if quick[1] <= thrifty[1] or thrifty[2] <= quick[2]:
                continue
            middle = at_price((thrifty[2] - quick[2]) / (quick[1] - thrifty[1]))
            found.append(middle[0])
            if middle[1:] not in (quick[1:], thrifty[1:]):
                next_spans += [(quick, middle), (middle, thrifty)]
        spans = next_spans
    return found


def _seams(problem: Problem, required: np.ndarray) -> list[int]:
    """Calls to sew at: borders few bytes cross, the coarse ones first."""
    total = int(problem.sizes[required].sum())
    counts = (_NUM_SEAMS, 4 * _NUM_SEAMS) if total else ()
    borders = [border for count in counts for border in find_borders(problem, required, total / count)]
    return list(dict.fromkeys(borders))


def _sew_pairs(problem: Problem, frontier: list[Choice], seams: list[int], num_replays: int) -> list[Choice]:
    """Pairs of choices sewn together at the coarse seams; of a long frontier as many, evenly spread, as are paired."""
    seams = seams[:_NUM_SEAMS]
    num_paired = max(3, math.isqrt(2 * num_replays // max(len(seams), 1)))
    if len(frontier) > num_paired:
        frontier = [frontier[round(n * (len(frontier) - 1) / (num_paired - 1))] for n in range(num_paired)]
    found: list[Choice] = []
    end = problem.num_evaluations + num_replays
    for thrifty, quick in sorted(combinations(range(len(frontier)), 2), key=lambda pair: pair[1] - pair[0]):
        for seam in _seams_between(problem, frontier[thrifty], frontier[quick], seams):
            if problem.num_evaluations >= end:
                return found
            found.append(sew(problem, frontier[thrifty], frontier[quick], seam))
    return found


def _fill_gaps(problem: Problem, frontier: list[Choice], seams: list[int], num_replays: int) -> list[Choice]:
    """Sew across the widest gaps of the frontier, until none is wider than a hundredth or the replays are used up.

    Wide is in turns what most bytes times seconds lie in, and what the largest share of a budget lies in.
    """
    found: list[Choice] = []
    frontier = [*frontier]
    left: dict[tuple[Choice, Choice], list[int]] = {}  # the seams that a pair has not been sewn at
    seams = _spread(sorted(seams))
    end = problem.num_evaluations + num_replays
    while problem.num_evaluations < end:
        gaps = [
            (thrifty, quick)
            for thrifty, quick in pairwise(frontier)
            if quick.peak_bytes > 1.01 * thrifty.peak_bytes and left.get((thrifty, quick), seams)
        ]
        if not gaps:
            break
        thrifty, quick = max(gaps, key=_area if len(left) % 2 else _share)
        places = left.get((thrifty, quick)) or _seams_between(problem, thrifty, quick, seams)
        left[thrifty, quick] = places[_SEAMS_PER_TURN:]
        sewn = [sew(problem, thrifty, quick, seam) for seam in places[:_SEAMS_PER_TURN]]
        found += sewn
        join(frontier, sewn)
    return found


def _seams_between(problem: Problem, one: Choice, other: Choice, seams: list[int]) -> list[int]:
    """Those with a difference between the two on either side: sewn at any other, they give one of themselves."""
    differing = (one.evict ^ other.evict) | (one.pin ^ other.pin) | (one.transient ^ other.transient)
    calls = [problem.replayer.producer[cell] for cell in differing]
    if not calls:
        return []
    first, last = min(calls), max(calls)
    return [seam for seam in seams if first < seam <= last]


def _area(gap: tuple[Choice, Choice]) -> float:
    return (gap[1].peak_bytes - gap[0].peak_bytes) * (gap[0].seconds - gap[1].seconds)


def _share(gap: tuple[Choice, Choice]) -> float:
    return gap[1].peak_bytes / max(gap[0].peak_bytes, 1)


def _spread(values: list[int]) -> list[int]:
    """The values reordered so that every beginning of the list is spread over the whole: middle, quarters, ..."""
    order: dict[int, None] = {}
    step = 1.0
    while len(order) < len(values):
        step /= 2
        order |= dict.fromkeys(values[int(len(values) * step * odd)] for odd in range(1, int(1 / step), 2))
        if step * len(values) < 0.5:
            order |= dict.fromkeys(values)
    return list(order)


def sew(problem: Problem, thrifty: Choice, quick: Choice, seam: int) -> Choice:
    """`thrifty` before call `seam`, `quick` from there on; what quick's recipes read across the seam stays kept."""
    producer, inputs = problem.replayer.producer, problem.replayer.inputs
    late = frozenset(cell for cell in quick.evict if producer[cell] >= seam)
    late_pins = frozenset(cell for cell in quick.pin if producer[cell] >= seam)
    read = {
        cell
        for call in problem.replayed_calls(quick.evict, quick.pin)
        if call >= seam
        for cell in inputs[call]
        if producer[cell] < seam
    }
    pin = {cell for cell in thrifty.pin if producer[cell] < seam} | (read & quick.pin)
    evict = {cell for cell in thrifty.evict if producer[cell] < seam} - (read - quick.evict)
    transient = {cell for cell in thrifty.transient if producer[cell] < seam} | {
        cell for cell in quick.transient if producer[cell] >= seam
    }
    return problem.evaluate(frozenset(evict) | late, frozenset(pin) | late_pins, frozenset(transient))
