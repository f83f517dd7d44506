"""The replay against steps whose every byte was worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.core.breakdown import bytes_by, peak_by_phase
from memfit.core.errors import PlanError
from memfit.core.keys import cell_key, cells_of_plan
from memfit.core.plan import Move, Plan
from memfit.core.replay import Replayer, replay
from synthetic import Step, chain, random_step, transformer


def test_with_nothing_evicted_a_chain_peaks_when_all_its_results_are_saved():
    result = replay(chain([4, 5, 6]))
    assert (result.peak_bytes, result.extra_seconds, result.restores) == (16, 0, ())  # the input's byte, 4 + 5 + 6
    assert result.peak_phase == "forward"
    assert result.live_bytes[-1] == 1


def test_evicting_the_first_of_a_chain_saves_its_bytes_and_costs_its_call():
    result = replay(chain([4, 4, 4], [5.0, 7.0, 9.0]), evict={1})
    # Forward: input 1, second 4, third 4. Backward: the third (the program holds it), then the first restored.
    assert (result.peak_bytes, result.extra_seconds, result.calls) == (9, 5.0, (0,))


def test_evicting_a_whole_chain_is_worse_than_doing_nothing_since_all_comes_back_at_once():
    result = replay(chain([4, 4, 4]), evict={1, 2, 3})
    # The program holds the third, but an evicted cell is never captured: 1 + 4, and 4 + 4 + 4 restored.
    assert (result.peak_bytes, result.extra_seconds, result.calls) == (17, 3.0, (0, 1, 2))
    assert result.peak_phase == "backward"
    assert len(result.restores) == 1


def shared_source() -> Step:
    """An unsaved result of 2 bytes that costs 5 seconds, read by three calls that save 10 bytes each."""
    step = Step()
    given_input = step.external(1, "input")
    source = step.call("linear", [given_input], 2, seconds=5.0)
    results = [step.call("exp", [source], 10, saves_result=True) for _ in range(3)]
    step.release(source, *results)
    step.backward(gradients=False)
    return step


def test_one_pinned_intermediate_lets_three_saved_tensors_go():
    trace = shared_source().trace()
    assert replay(trace).peak_bytes == 33  # the three are saved while the source still lives
    unpinned = replay(trace, evict={2, 3, 4})
    assert (unpinned.extra_seconds, unpinned.calls) == (8.0, (0, 3, 2, 1))
    pinned = replay(trace, evict={2, 3, 4}, pin={1})
    assert (pinned.extra_seconds, pinned.calls) == (3.0, (3, 2, 1))
    after_forward = [operation for operation, _ in trace.events].index("unpack") - 1
    assert unpinned.live_bytes[after_forward] == 1
    assert pinned.live_bytes[after_forward] == 3


def test_a_shared_intermediate_is_computed_once_and_leaves_after_its_last_reader():
    trace = shared_source().trace()
    result = replay(trace, evict={2, 3, 4})
    assert result.calls.count(0) == 1
    first, second, third = (index for index, (operation, _) in enumerate(trace.events) if operation == "drop")
    # Input 1, source 2 while another pending result needs it.
    assert [result.live_bytes[index] for index in (first, second, third)] == [3, 3, 1]


def test_a_transient_intermediate_is_computed_for_each_reader_and_waits_for_none():
    trace = shared_source().trace()
    result = replay(trace, evict={2, 3, 4}, transient={1})
    assert (result.extra_seconds, result.calls) == (18.0, (0, 3, 0, 2, 0, 1))
    ends = [index for index, (operation, _) in enumerate(trace.events) if operation == "drop"]
    assert [result.live_bytes[index] for index in ends] == [1, 1, 1]  # the input alone


def test_a_transient_saved_result_comes_back_for_the_one_behind_it_and_again_for_its_own_reader():
    # Of a chain of three the first comes back on the way to the second, while the third's own gradient is not done.
    trace = chain([4, 4, 4], [5.0, 7.0, 9.0])
    kept = replay(trace, evict={1, 2})
    assert (kept.peak_bytes, kept.calls, kept.extra_seconds) == (13, (0, 1), 12.0)
    anew = replay(trace, evict={1, 2}, transient={1})
    assert (anew.calls, anew.extra_seconds) == ((0, 1, 0), 17.0)
    second = next(restore.event for restore in anew.restores)
    assert (kept.live_bytes[second], anew.live_bytes[second]) == (13, 9)
    assert anew.peak_bytes == 13  # both are there for a moment while the second is made from the first


def test_a_transient_source_that_is_overwritten_comes_back_as_a_copy():
    trace = in_place(with_reader=False).trace()
    plain, passing = replay(trace, evict={2}), replay(trace, evict={2}, transient={1})
    assert passing.calls == plain.calls
    assert passing.extra_seconds == plain.extra_seconds


def test_a_pin_nothing_needs_is_held_until_backward_begins():
    step = Step()
    first = step.call("f", [step.external(1, "input")], 3)
    step.release(first)
    second = step.call("g", [step.external(1, "input")], 5, saves_result=True)
    step.release(second)
    step.backward(gradients=False)
    trace = step.trace()
    unpack = [operation for operation, _ in trace.events].index("unpack")
    result = replay(trace, pin={1})
    assert (result.live_bytes[unpack - 1], result.live_bytes[unpack]) == (1 + 3 + 1 + 5, 1 + 1 + 5)


def in_place(with_reader: bool) -> Step:
    """A 4-byte result of 2 seconds overwritten by a saved in-place call of 1 second."""
    step = Step()
    first = step.call("conv", [step.external(1, "input")], 4, seconds=2.0)
    readers = [step.call("exp", [first], 8, saves_result=True)] if with_reader else []
    second = step.call("relu_", [first], 0, in_place=True, saves_result=True)
    step.release(second, *readers)
    step.backward(gradients=False)
    return step


def test_an_in_place_result_is_recomputed_in_the_storage_of_its_restored_source():
    trace = in_place(with_reader=False).trace()
    result = replay(trace, evict={2})
    assert (result.peak_bytes, result.extra_seconds, result.calls) == (
        5,
        3.0,
        (0, 1),
    )  # one storage of 4, and the input


def test_an_in_place_call_gets_a_copy_where_its_source_is_needed_again():
    trace = in_place(with_reader=True).trace()
    assert replay(trace).peak_bytes == 13
    result = replay(trace, evict={2, 3})
    assert result.calls == (0, 2, 1)
    assert result.high_bytes[result.restores[0].event] == 1 + 4 + 4  # the source, kept for the reader, and its copy


def test_a_pinned_cell_that_is_overwritten_is_copied():
    trace = in_place(with_reader=False).trace()
    result = replay(trace, evict={2}, pin={1})
    assert (result.peak_bytes, result.extra_seconds) == (9, 1.0)  # only the in-place call is run again
    assert result.live_bytes[trace.events.index(("begin", 1))] == 9  # the copy is made before the call overwrites


def test_a_dropout_mask_comes_back_with_its_result_in_one_call():
    step = Step()
    source = step.external(6, "input")
    dropped = step.call("dropout", [source], 6, internal=(6,), seconds=2.0)
    step.call("exp", [dropped], 1, (dropped,))
    step.release(dropped)
    step.backward(gradients=False)
    trace = step.trace()
    mask, result_cell = trace.calls[0].outputs
    assert trace.cells[mask].position == "in0"
    result = replay(trace, evict={mask, result_cell})
    assert (result.calls, result.extra_seconds) == ((0,), 2.0)
    assert replay(trace, evict={result_cell}).calls == (0,)


def test_two_peaks_are_not_a_sum_of_savings():
    step = Step()
    saved = []
    for temporary in (7, 6):
        cell = step.call("f", [step.external(0, "input")], 3)
        handle = step.save(cell)
        step.release(cell)
        step.events.append(("release", step.storage(temporary, "temporary")))
        step.unpack(handle)
        step.drop(handle)
        saved.append(cell)
    trace = step.trace()
    first, second = saved
    peaks = [replay(trace, evict).peak_bytes for evict in ((), {first}, {second}, {first, second})]
    assert peaks == [10, 9, 10, 7]


def test_a_pending_handle_dropped_unread_costs_nothing():
    step = Step()
    cell = step.call("f", [step.external(1, "input")], 9)
    handle = step.save(cell)
    step.release(cell)
    step.drop(handle)
    result = replay(step.trace(), evict={cell})
    assert (result.extra_seconds, result.live_bytes[-1]) == (0, 1)


def test_a_cell_whose_source_is_gone_is_kept_instead():
    step = Step()
    source = step.external(2, "input")
    cell = step.call("f", [source], 9)
    step.release(source)
    handle = step.save(cell)
    step.release(cell)
    step.unpack(handle)
    step.drop(handle)
    result = replay(step.trace(), evict={cell})
    assert (result.num_kept_instead, result.extra_seconds, result.peak_bytes) == (1, 0, 11)


def test_an_external_source_lives_as_long_as_something_evicted_needs_it():
    step = Step()
    source = step.external(2, "input")
    cell = step.call("f", [source], 9, saves_result=True)
    step.release(cell, source)
    before = len(step.events) - 1
    step.backward(gradients=False)
    result = replay(step.trace(), evict={cell})
    assert (result.live_bytes[before], result.live_bytes[-1], result.num_kept_instead) == (2, 0, 0)


def test_workspaces_of_forward_and_of_replayed_calls_count():
    step = Step()
    cell = step.call("conv", [step.external(1, "input")], 4, saves_result=True, extra_bytes=10)
    step.release(cell)
    step.events.append(("release", step.storage(14, "temporary")))
    step.backward(gradients=False)
    trace = step.trace()
    eager = replay(trace)
    assert (eager.peak_bytes, eager.workspace_bytes) == (1 + 4 + 14, 0)
    result = replay(trace, evict={cell})
    assert result.high_bytes[result.restores[0].event] == 1 + 4 + 10
    assert result.peak_bytes == 15
    assert (result.peak_phase, result.workspace_bytes) == ("forward", 0)  # input 1 and temporary 14 come first
    assert eager.high_bytes[trace.events.index(("spike", 10))] == 11


def test_a_workspace_can_be_the_peak_in_the_quick_replay_too():
    step = Step()
    step.call("conv", [step.external(1, "input")], 4, extra_bytes=10)
    assert Replayer(step.trace()).measure() == (11, 0)


def test_a_pin_outlives_a_pending_handle_dropped_in_forward():
    step = Step()
    source = step.call("f", [step.external(1, "input")], 3)
    cell = step.call("g", [source], 5)
    handle = step.save(cell)
    step.release(source, cell)
    step.drop(handle)
    last = step.call("h", [step.external(1, "input")], 1, saves_result=True)
    before = len(step.events) - 1
    step.release(last)
    step.backward(gradients=False)
    result = replay(step.trace(), evict={cell}, pin={source})
    assert (result.live_bytes[before], result.live_bytes[-1]) == (1 + 3 + 1 + 1, 2)


def test_holders_at_the_peak_add_up_by_kind_and_by_phase():
    trace = transformer(2, 1024)
    result = replay(trace)
    kinds = bytes_by(trace, result, "kind")
    assert sum(kinds.values()) == result.peak_bytes
    assert next(iter(kinds)) == "activation"
    assert bytes_by(trace, result, "module")["encoder.layer.1.attention"] > 0
    phases = peak_by_phase(trace, result)
    assert max(phases.values()) == phases[result.peak_phase] == result.peak_bytes
    assert list(phases) == ["forward", "loss", "backward", "optimizer step"]


def test_a_restored_copy_stands_under_the_storage_it_restores():
    result = replay(chain([4, 4, 4]), evict={1, 2, 3})
    assert result.holders == (0, 3, 1, 2, 3)  # input, the program's third, and the three restored


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), num_calls=st.integers(2, 10), data=st.data())
def test_the_quick_replay_and_the_full_one_agree_and_all_memory_comes_back(seed, num_calls, data):
    trace = random_step(seed, num_calls)
    replayer = Replayer(trace)
    cells = [index for index, cell in enumerate(trace.cells) if cell.call >= 0]
    chosen, transient = data.draw(st.sets(st.sampled_from(cells))), data.draw(st.sets(st.sampled_from(cells)))
    evict = chosen & replayer.saved
    moves = evict, chosen - evict, transient
    result = replayer.run(*moves)
    assert replayer.measure(*moves) == (result.peak_bytes, result.extra_seconds)
    assert set(replayer.waiting(*moves)).isdisjoint(transient - chosen)
    assert result.live_bytes[-1] == replayer.run().live_bytes[-1]
    assert max(result.high_bytes) == result.peak_bytes == result.high_bytes[result.peak_event]
    assert sum(trace.storages[each].nbytes for each in result.holders) + result.workspace_bytes == result.peak_bytes
    assert result.num_kept_instead == 0


def test_a_plan_names_cells_by_place_and_position():
    trace = shared_source().trace()
    assert cell_key(trace, 2) == "0|#0/1:exp|out0"
    move = Move("recompute", "", (cell_key(trace, 2),), (cell_key(trace, 1),), transient=(cell_key(trace, 2),))
    assert cells_of_plan(trace, Plan(40, 32, 20, 20, (move,))) == ({2}, {1}, {2})


def test_a_plan_for_another_model_is_refused_with_the_cell_it_names():
    plan = Plan(40, 32, 20, 20, (Move("recompute", "layer.7", ("0|layer.7#0/0:gelu|out0",)),))
    with pytest.raises(PlanError, match=r"'0\|layer.7#0/0:gelu\|out0' at layer.7.*another model"):
        cells_of_plan(shared_source().trace(), plan)
