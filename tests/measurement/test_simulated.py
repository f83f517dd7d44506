"""The simulated caching allocator: the rules PyTorch documents for the CUDA one, and what emptying the cache is worth."""

from __future__ import annotations

import random

import pytest

from memfit.core.trace import Call, Cell, Handle, Storage, Trace
from memfit.measurement.simulated import SimulatedAllocator, propose_emptying, simulate

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    ("num_bytes", "allocated_bytes", "reserved_bytes"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),  # 1 MiB would be left, and a large block is split only for more
        (21 * MIB + 1, 22 * MIB, 22 * MIB),
    ],
)
def test_a_request_is_rounded_and_takes_a_segment_of_its_class(num_bytes, allocated_bytes, reserved_bytes) -> None:
    allocator = SimulatedAllocator()
    allocator.allocate(num_bytes)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (allocated_bytes, reserved_bytes)


def test_small_and_medium_requests_share_their_segments_and_not_each_others() -> None:
    allocator = SimulatedAllocator()
    small = [allocator.allocate(512 * KIB) for _ in range(4)]
    assert allocator.reserved_bytes == 2 * MIB
    medium = [allocator.allocate(5 * MIB) for _ in range(4)]
    assert allocator.reserved_bytes == 22 * MIB
    assert [address - small[0] for address in small] == [0, 512 * KIB, MIB, 1536 * KIB]
    allocator.free(medium[0])
    allocator.allocate(KIB)  # 5 MiB are free, but in a large segment
    assert allocator.reserved_bytes == 24 * MIB


def test_the_smallest_block_that_fits_is_taken() -> None:
    allocator = SimulatedAllocator()
    big, middle, small = (allocator.allocate(size * MIB) for size in (40, 20, 30))
    for address in (big, middle, small):
        allocator.free(address)
    assert allocator.allocate(25 * MIB) == small
    assert allocator.allocate(20 * MIB) == middle
    assert allocator.reserved_bytes == 90 * MIB


def test_free_neighbours_become_one_block() -> None:
    allocator = SimulatedAllocator()
    first = [allocator.allocate(5 * MIB) for _ in range(4)]
    for index in (1, 3, 2):
        allocator.free(first[index])
    assert allocator.allocate(15 * MIB) == first[1]  # three blocks in one, in the segment they came from
    assert (allocator.reserved_bytes, allocator.num_segments) == (20 * MIB, 1)


def test_a_segment_with_one_block_in_use_is_not_given_back() -> None:
    allocator = SimulatedAllocator()
    kept, freed = allocator.allocate(512), allocator.allocate(MIB)
    large = allocator.allocate(30 * MIB)
    allocator.free(freed)
    allocator.free(large)
    assert allocator.spare_bytes == 30 * MIB
    assert allocator.empty_cache() == 30 * MIB
    assert allocator.reserved_bytes == 2 * MIB
    allocator.free(kept)
    assert allocator.empty_cache() == 2 * MIB
    with pytest.raises(KeyError):
        allocator.free(kept)


def test_a_full_card_empties_the_cache_by_itself_and_tries_again() -> None:
    allocator = SimulatedAllocator(limit_bytes=100 * MIB)
    for size in (30, 40, 50):  # 120 MiB of segments, had nothing been given back
        allocator.free(allocator.allocate(size * MIB))
    assert (allocator.num_retries, allocator.peak_reserved_bytes) == (1, 70 * MIB)
    allocator.allocate(60 * MIB)
    with pytest.raises(MemoryError, match="44040192 bytes more than 62914560 reserved do not fit into 104857600"):
        allocator.allocate(41 * MIB)


def test_whatever_happens_blocks_and_segments_add_up() -> None:
    chance = random.Random(0)
    allocator = SimulatedAllocator()
    alive: dict[int, int] = {}
    for _ in range(3000):
        if alive and chance.random() < 0.5:
            address = chance.choice(list(alive))
            allocator.free(address)
            del alive[address]
        else:
            size = int(2 ** chance.uniform(0, 26))
            address = allocator.allocate(size)
            assert all(address + size <= other or other + alive[other] <= address for other in alive)
            alive[address] = size
        if chance.random() < 0.02:
            spare, before = allocator.spare_bytes, allocator.reserved_bytes
            assert allocator.empty_cache() == spare == before - allocator.reserved_bytes
        assert sum(alive.values()) <= allocator.allocated_bytes <= allocator.reserved_bytes
    for address in alive:
        allocator.free(address)
    assert allocator.allocated_bytes == 0
    assert allocator.empty_cache() > 0
    assert allocator.reserved_bytes == 0


# ---- the rule of the guide ---------------------------------------------------------------------------------------------------------

STAGES = (30, 36, 44, 58)  # MiB; each larger than the one before, so that no cached block serves the next stage


def stages(*, delete: bool) -> Trace:
    """A step of stages, each making a large storage; deleted at the end of its stage, or all at the end of the step."""
    storages = tuple(Storage(size * MIB, "temporary") for size in STAGES)
    calls = tuple(Call(f"0|#1/{i}:f", "f", "", "", 0.0, (), ()) for i in range(len(STAGES)))
    events: list[tuple[str, int]] = []
    for index in range(len(STAGES)):
        events += [("begin", index), ("alloc", index), ("end", index)]
        if delete:
            events.append(("release", index))
    if not delete:
        events += [("release", index) for index in range(len(STAGES))]
    return Trace("cuda", storages, (), (), calls, tuple(events))


def test_one_call_at_the_end_lowers_nothing() -> None:
    for delete in (False, True):
        trace = stages(delete=delete)
        plain = simulate(trace)
        emptied = simulate(trace, [len(trace.events) - 1])
        assert plain.peak_reserved_bytes == emptied.peak_reserved_bytes == sum(STAGES) * MIB


def test_deleting_without_a_call_lowers_what_is_allocated_and_not_what_is_reserved() -> None:
    kept, deleted = simulate(stages(delete=False)), simulate(stages(delete=True))
    assert (kept.peak_allocated_bytes, deleted.peak_allocated_bytes) == (sum(STAGES) * MIB, max(STAGES) * MIB)
    assert kept.peak_reserved_bytes == deleted.peak_reserved_bytes == sum(STAGES) * MIB


def test_deleting_in_stages_with_a_call_after_each_lowers_the_peak_by_all_but_the_largest_stage() -> None:
    trace = stages(delete=True)
    after_each = [index + 1 for index, (operation, _) in enumerate(trace.events) if operation == "release"][:-1]
    plain, emptied = simulate(trace), simulate(trace, after_each)
    assert plain.peak_reserved_bytes - emptied.peak_reserved_bytes == (sum(STAGES) - max(STAGES)) * MIB
    assert list(emptied.given_bytes.values()) == [size * MIB for size in STAGES[:-1]]


def test_emptying_is_proposed_where_it_pays_and_nowhere_else() -> None:
    trace = stages(delete=True)
    begins = [index for index, (operation, _) in enumerate(trace.events) if operation == "begin"]
    assert propose_emptying(trace, sum(STAGES) * MIB) == ()  # within the budget as it is
    assert propose_emptying(trace, (sum(STAGES) - 1) * MIB) == (begins[3],)  # one call, before the last stage, gives back all
    assert propose_emptying(trace, max(STAGES) * MIB + (30 + 36) * MIB) == (begins[3],)
    assert propose_emptying(trace, (30 + 36) * MIB) == tuple(begins[2:])
    assert propose_emptying(trace, max(STAGES) * MIB) == tuple(begins[1:])
    assert propose_emptying(trace, max(STAGES) * MIB - 1) == ()  # no call makes the largest stage smaller
    assert propose_emptying(stages(delete=False), 100 * MIB) == ()  # what is held cannot be given back
    for budget in range(max(STAGES), sum(STAGES), 7):
        chosen = propose_emptying(trace, budget * MIB)
        assert simulate(trace, chosen).peak_reserved_bytes <= budget * MIB


def test_what_autograd_holds_and_moments_of_work_are_reserved_too() -> None:
    storages = (Storage(12 * MIB, "activation"), Storage(0, "temporary"))
    events = (("alloc", 0), ("alloc", 1), ("save", 0), ("release", 0), ("spike", 30 * MIB), ("drop", 0))
    usage = simulate(Trace("cuda", storages, (Cell(0),), (Handle(0),), (), events))
    assert usage.allocated_bytes == (12 * MIB, 12 * MIB, 12 * MIB, 12 * MIB, 12 * MIB, 0)
    assert usage.peak_allocated_bytes == usage.peak_reserved_bytes == 42 * MIB
    assert usage.peak_event == 4
