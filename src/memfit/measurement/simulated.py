"""A caching allocator as PyTorch's CUDA one behaves, on numbers alone: what a step reserves, and where emptying the cache pays.

A card's memory is taken in segments and handed out in blocks; freed blocks stay reserved. What it does, by default settings:
sizes are rounded up to 512 bytes; up to 1 MiB come from segments of 2 MiB, up to 10 MiB from segments of 20 MiB, larger ones from
segments of their own, rounded to 2 MiB; the smallest free block that fits is taken, and split if 512 bytes (small) or more than
1 MiB (large) are left; free neighbours merge. `empty_cache` gives back segments in which nothing is in use. When the card has no
more, the allocator empties its cache by itself and tries again: so emptying never cures running out of memory, it only serves
whoever needs the memory outside this allocator (other processes, libraries).
Costs about 3 us an event. Not modelled: streams, expandable segments, `max_split_size_mb`, private pools of graphs.
Source: c10/cuda/CUDACachingAllocator.cpp; https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from memfit.core.keys import Cells
from memfit.core.replay import Replayer, Request
from memfit.core.trace import BEGIN, PHASE, PHASES, PLACE, Trace

ROUND_BYTES = 512
SMALL_BYTES = 1 << 20  # the largest request that small segments serve
SMALL_SEGMENT_BYTES = 2 << 20
LARGE_SEGMENT_BYTES = 20 << 20
OWN_SEGMENT_BYTES = 10 << 20  # from here on a request has a segment of its own
ROUND_SEGMENT_BYTES = 2 << 20

_MAX_TRIES = 200  # places simulated for one growth, evenly spread

# (section, module path, invocation), as in a call's place.
Station = tuple[int, str, int]
OPTIMIZER_STEP: Station = (-1, "optimizer step", 0)


class _Block:
    """Consecutive bytes of a segment; `before` and `after` are its neighbours there."""

    __slots__ = ("address", "after", "before", "in_use", "is_small", "nbytes")

    def __init__(self, address: int, nbytes: int, is_small: bool) -> None:
        self.address = address
        self.nbytes = nbytes
        self.is_small = is_small
        self.in_use = False
        self.before: _Block | None = None
        self.after: _Block | None = None


class SimulatedAllocator:
    """allocated_bytes: in use, rounded. reserved_bytes: of all segments. num_segments: how often the card was asked for one.
    num_retries: how often it had none, and the cache was emptied to try again."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        """limit_bytes: what the card has; None is as much as is asked for."""
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self.num_segments = self.num_retries = 0
        self._limit_bytes = limit_bytes
        self._next_address = 0
        self._used: dict[int, _Block] = {}
        self._free: dict[bool, list[tuple[int, int, _Block]]] = {True: [], False: []}  # small or not: by size, then address

    def allocate(self, num_bytes: int) -> int:
        """The address of `num_bytes` (at least 1). Raises MemoryError where the card has none even with an empty cache."""
        size = max(-(-num_bytes // ROUND_BYTES), 1) * ROUND_BYTES
        is_small = size <= SMALL_BYTES
        free = self._free[is_small]
        place = bisect.bisect_left(free, (size, -1))
        block = free.pop(place)[2] if place < len(free) else self._new_segment(size, is_small)
        left = block.nbytes - size
        if left >= ROUND_BYTES if is_small else left > SMALL_BYTES:
            self._split(block, size)
        block.in_use = True
        self._used[block.address] = block
        self.allocated_bytes += block.nbytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block.address

    def free(self, address: int) -> None:
        """Back into the cache. Raises KeyError for an address that is not in use."""
        block = self._used.pop(address)
        self.allocated_bytes -= block.nbytes
        block.in_use = False
        if block.before is not None and not block.before.in_use:
            block = self._merge(block.before, block)
        if block.after is not None and not block.after.in_use:
            self._merge(block, block.after)
        bisect.insort(self._free[block.is_small], _key(block))

    def empty_cache(self) -> int:
        """Give back every segment without a block in use; the bytes given back."""
        given = 0
        for is_small, free in self._free.items():
            given += sum(block.nbytes for _, _, block in free if _is_whole(block))
            self._free[is_small] = [entry for entry in free if not _is_whole(entry[2])]
        self.reserved_bytes -= given
        return given

    @property
    def spare_bytes(self) -> int:
        """What `empty_cache` would give back now."""
        return sum(block.nbytes for free in self._free.values() for _, _, block in free if _is_whole(block))

    def _new_segment(self, size: int, is_small: bool) -> _Block:
        if is_small:
            nbytes = SMALL_SEGMENT_BYTES
        elif size < OWN_SEGMENT_BYTES:
            nbytes = LARGE_SEGMENT_BYTES
        else:
            nbytes = -(-size // ROUND_SEGMENT_BYTES) * ROUND_SEGMENT_BYTES
        if self._limit_bytes is not None and self.reserved_bytes + nbytes > self._limit_bytes:
            self.num_retries += 1
            self.empty_cache()
            if self.reserved_bytes + nbytes > self._limit_bytes:
                raise MemoryError(
                    f"{nbytes} bytes more than {self.reserved_bytes} reserved do not fit into {self._limit_bytes}."
                )
        block = _Block(self._next_address, nbytes, is_small)
        self._next_address += nbytes
        self.num_segments += 1
        self.reserved_bytes += nbytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return block

    def _split(self, block: _Block, size: int) -> None:
        rest = _Block(block.address + size, block.nbytes - size, block.is_small)
        rest.before, rest.after = block, block.after
        if block.after is not None:
            block.after.before = rest
        block.after, block.nbytes = rest, size
        bisect.insort(self._free[rest.is_small], _key(rest))

    def _merge(self, first: _Block, second: _Block) -> _Block:
        """One block of two neighbours, in no list; one of them was in the list of free ones."""
        free = self._free[first.is_small]
        for each in (first, second):
            place = bisect.bisect_left(free, _key(each)[:2])
            if place < len(free) and free[place][2] is each:
                del free[place]
        first.nbytes += second.nbytes
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        return first


def _key(block: _Block) -> tuple[int, int, _Block]:
    return block.nbytes, block.address, block


def _is_whole(block: _Block) -> bool:
    return block.before is None and block.after is None


@dataclass(frozen=True)
class Usage:
    """What a step takes of the card. Bytes after each event; the peaks are of moments within events too.

    spare_bytes: what `empty_cache` would have given back before each event. given_bytes: by event, what it did give back there.
    peak_event: the last event in which the reserved bytes grew to their peak. num_segments, num_retries: see SimulatedAllocator.
    """

    allocated_bytes: tuple[int, ...]
    reserved_bytes: tuple[int, ...]
    spare_bytes: tuple[int, ...]
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    peak_event: int
    given_bytes: dict[int, int]
    num_segments: int
    num_retries: int


def simulate(
    trace: Trace,
    empty_before: Collection[int] = (),
    limit_bytes: int | None = None,
    *,
    requests: Sequence[Request] | None = None,
    is_warm: bool = False,
) -> Usage:
    """The traced step on a simulated card that holds nothing else; `empty_cache` is called before these events.

    limit_bytes: see SimulatedAllocator, which also says what is raised. requests: of the step under a plan (Replayer.requests); by
    default it runs plainly. is_warm: with the cache that an equal step before it has left.
    """
    allocator = SimulatedAllocator(limit_bytes)
    requests = requests if requests is not None else Replayer(trace).requests()
    if is_warm:
        for address in _run(allocator, requests, empty_before)[0]:
            allocator.free(address)
        allocator.peak_allocated_bytes, allocator.peak_reserved_bytes = 0, allocator.reserved_bytes
    return _run(allocator, requests, empty_before)[1]


def _run(
    allocator: SimulatedAllocator, requests: Sequence[Request], empty_before: Collection[int]
) -> tuple[Collection[int], Usage]:
    """The addresses in use after the step, and what it took."""
    addresses: dict[int, int] = {}
    allocated, reserved, spare = [], [], []
    given: dict[int, int] = {}
    peak_event = 0
    for index, request in enumerate(requests):
        spare.append(allocator.spare_bytes)
        if index in empty_before:
            given[index] = allocator.empty_cache()
        before = allocator.peak_reserved_bytes
        if request.moment_bytes > 0:
            allocator.free(allocator.allocate(request.moment_bytes))
        for instance in request.freed:
            allocator.free(addresses.pop(instance))
        for instance, num_bytes in request.made:
            addresses[instance] = allocator.allocate(num_bytes)
        if allocator.peak_reserved_bytes > before:
            peak_event = index
        allocated.append(allocator.allocated_bytes)
        reserved.append(allocator.reserved_bytes)
    return addresses.values(), Usage(
        tuple(allocated), tuple(reserved), tuple(spare), allocator.peak_allocated_bytes, allocator.peak_reserved_bytes,
        peak_event, given, allocator.num_segments, allocator.num_retries,
    )  # fmt: skip


def stations(trace: Trace) -> dict[int, Station]:
    """The events of a step in which memfit can act without watching every call, each with how it is known again in a later step: the
    first call of a module that has no modules of its own, in forward, and the optimizer's step."""
    paths = {call.module for call in trace.calls}
    is_inner = {path: any(other.startswith(f"{path}.") for other in paths) for path in paths}
    found: dict[int, Station] = {}
    for index, (operation, operand) in enumerate(trace.events):
        if operation == PHASE and PHASES[operand] == "optimizer step":
            found[index] = OPTIMIZER_STEP
        match = PLACE.fullmatch(trace.calls[operand].place) if operation == BEGIN else None
        if match is not None and match[2] and match[4] == "0" and not is_inner[trace.calls[operand].module]:
            found.setdefault(index, (int(match[1]), match[2], int(match[3])))
    return found


def propose_emptying(
    trace: Trace,
    budget_bytes: int,
    cells: Cells | None = None,
    places: Collection[int] | None = None,
    *,
    is_warm: bool = False,
) -> tuple[int, ...]:
    """Events before which `empty_cache` keeps the reserved bytes of the step within the budget. cells: what a plan moves.
    places: events to choose from; by default the beginnings of all calls. is_warm: see `simulate`.

    Nothing where they are within it anyway, or where no call brings them down: each one makes the device wait and has to be followed
    by asking for segments again. Greedy: at the peak, the last place before it that lowers it, or one behind it in the step before; at
    most one call for each growth.
    """
    chosen: tuple[int, ...] = ()
    requests = Replayer(trace).requests(*(cells or ()))
    usage = simulate(trace, requests=requests, is_warm=is_warm)
    if places is None:
        places = [index for index, (operation, _) in enumerate(trace.events) if operation == BEGIN]
    ordered = sorted(places)
    while usage.peak_reserved_bytes > budget_bytes:
        split = bisect.bisect_right(ordered, usage.peak_event)
        tries = [*reversed(ordered[:split]), *(reversed(ordered[split:]) if is_warm else ())]
        seen = set()
        for place in tries[:: -(-len(tries) // _MAX_TRIES)] if tries else ():
            state = usage.spare_bytes[place], usage.reserved_bytes[place - 1] if place else 0
            if not state[0] or (state in seen and not is_warm):  # nothing to give back, or as much as at a later place
                continue
            seen.add(state)
            tried = simulate(trace, (*chosen, place), requests=requests, is_warm=is_warm)
            if tried.peak_reserved_bytes < usage.peak_reserved_bytes:
                chosen, usage = (*chosen, place), tried
                break
        else:
            return ()
    return tuple(sorted(chosen))
