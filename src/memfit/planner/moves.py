"""Moves: a choice of cells written for people, one move for each block of the model, in forward order."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

from memfit.core.keys import cell_key
from memfit.core.plan import Move
from memfit.core.replay import Replay
from memfit.core.sizes import format_size
from memfit.core.trace import Trace
from memfit.planner.problem import Choice

_ENOUGH_CELLS = 4  # a block smaller than this is told as part of the one around it


def moves_of(trace: Trace, result: Replay, choice: Choice) -> tuple[Move, ...]:
    """The recompute moves for the choice; `result` is its replay. Their seconds add up to its extra seconds."""
    evict, pin = choice.evict, choice.pin
    cells = sorted(evict | pin, key=lambda cell: (trace.cells[cell].call, cell))
    places = places_of([trace.calls[trace.cells[cell].call].module for cell in cells])
    groups: dict[str, list[int]] = defaultdict(list)
    for cell, place in zip(cells, places, strict=True):
        groups[place].append(cell)
    place_of = dict(zip(cells, places, strict=True))
    seconds: dict[str, float] = defaultdict(float)
    calls: dict[str, list[int]] = defaultdict(list)
    home: dict[int, str] = {}
    for call in result.recipes:
        near = [place_of[cell] for cell in trace.calls[call].outputs if cell in place_of]
        module = trace.calls[call].module
        within = [place for place in groups if place and (module == place or module.startswith(place + "."))]
        home[call] = near[0] if near else max(within, key=len) if within else places[0]
        calls[home[call]].append(call)
    for call in result.calls:
        seconds[home[call]] += trace.calls[call].seconds
    saved = {handle.cell for handle in trace.handles}
    at_place: dict[str, list[int]] = defaultdict(list)  # a call and its parts
    for index, each in enumerate(trace.calls):
        at_place[each.place].append(index)
    passed = {
        place: [cell for call in calls[place] for cell in trace.calls[call].outputs if cell in choice.transient]
        for place in groups
    }
    return tuple(
        replace(
            _move(
                trace,
                place,
                [c for c in members if c in evict],
                [c for c in members if c in pin],
                passed[place],
                seconds[place],
            ),
            calls=tuple(dict.fromkeys(trace.calls[call].place for call in calls[place])),
            keep=tuple(
                cell_key(trace, cell)
                for name in dict.fromkeys(trace.calls[call].place for call in calls[place])
                for call in at_place[name]
                for cell in trace.calls[call].outputs
                if cell in saved and cell not in evict and cell not in pin
            ),
        )
        for place, members in groups.items()
    )


def find_untouched(trace: Trace, moves: tuple[Move, ...]) -> tuple[str, ...]:
    """Invocations ('section|path#invocation') of modules with planned calls in which nothing is planned."""
    keys = {key.rpartition("|")[0] for move in moves for key in move.evict + move.pin + move.keep}
    planned = {place.rpartition("/")[0] for place in keys.union(*(move.calls for move in moves))}
    modules = {name.rpartition("#")[0] for name in planned}
    seen = dict.fromkeys(call.place.rpartition("/")[0] for call in trace.calls)
    return tuple(name for name in seen if name not in planned and name.rpartition("#")[0] in modules)


def places_of(modules: list[str]) -> list[str]:
    """For each module path the block to tell it under: 'encoder.layer.3' for 'encoder.layer.3.attention.dropout'.

    The deepest numbered prefix that gathers enough of the paths, else the deepest prefix that does, else ''.
    """
    counts: Counter[str] = Counter()
    for module in modules:
        counts.update(_prefixes(module))

    def place(module: str) -> str:
        enough = [prefix for prefix in _prefixes(module) if counts[prefix] >= _ENOUGH_CELLS]
        numbered = [prefix for prefix in enough if prefix.rpartition(".")[2].isdigit()]
        return (numbered or enough or [""])[-1]

    return [place(module) for module in modules]


def _prefixes(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[: number + 1]) for number in range(len(parts))]


def _move(trace: Trace, place: str, evict: list[int], pin: list[int], transient: list[int], seconds: float) -> Move:
    return Move(
        technique="recompute",
        place=place,
        evict=tuple(cell_key(trace, cell) for cell in evict),
        pin=tuple(cell_key(trace, cell) for cell in pin),
        saved_bytes=_num_bytes(trace, evict) - _num_bytes(trace, pin),
        seconds=seconds,
        reason=_reason(trace, evict, pin, transient, seconds),
        transient=tuple(cell_key(trace, cell) for cell in transient),
    )


def _num_bytes(trace: Trace, cells: list[int]) -> int:
    return sum(trace.storages[storage].nbytes for storage in {trace.cells[cell].storage for cell in cells})


def _reason(trace: Trace, evict: list[int], pin: list[int], transient: list[int], seconds: float) -> str:
    def functions(cells: list[int]) -> str:
        bytes_by_function: Counter[str] = Counter()
        for cell in cells:
            function = trace.calls[trace.cells[cell].call].function
            bytes_by_function[function] += trace.storages[trace.cells[cell].storage].nbytes
        names = [name for name, _ in bytes_by_function.most_common(4)]
        names[3:] = ["others"] if len(names) > 3 else []
        return " and ".join([", ".join(names[:-1])] * (len(names) > 1) + names[-1:])

    def size(cells: list[int]) -> str:
        return format_size(_num_bytes(trace, cells))

    kept = f"the result of {functions(pin)} ({size(pin)}) is kept for that" if pin else ""
    if not evict:
        return f"Blocks after this one are recomputed from here: {kept}."
    price = f"{1e3 * seconds:.1f} ms" if seconds else "no time of its own"
    sentence = f"What {functions(evict)} made ({size(evict)}) comes back in backward for {price}"
    parts = [sentence, *([kept] if kept else [])]
    if transient:
        parts.append(f"what {functions(transient)} made ({size(transient)}) is made anew for each of its readers")
    return "; ".join(parts) + "."
