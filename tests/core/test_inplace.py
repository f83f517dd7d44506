"""Calls in place in a trace: proposals, the edited step and its bytes, on steps written by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from memfit.core.errors import PlanError
from memfit.core.inplace import SAFE, Worth, edit, find_idle, find_sites, propose, weigh, weigh_each, why_idle
from memfit.core.keys import cells_of_plan, edit_by_plan
from memfit.core.plan import Move, Plan
from memfit.core.replay import replay
from memfit.core.trace import Trace
from memfit.planner import plan
from synthetic import Step


def leaky_chain(num_layers: int = 4, nbytes: int = 100) -> Trace:
    """Layers of a norm, which saves its input, an activation, which saves its input, and a convolution, which saves its own."""
    step = Step()
    x = step.external(1, "input")
    for number in range(num_layers):
        normed = step.call("batch_norm", [x], nbytes, (x,), module=f"layer.{number}", seconds=1.0)
        if number:
            step.release(x)
        active = step.call("leaky_relu", [normed], nbytes, (normed,), module=f"layer.{number}", seconds=0.1)
        step.release(normed)
        x = step.call("conv2d", [active], nbytes, (active,), module=f"layer.{number}", seconds=5.0)
        step.release(active)
    step.backward(gradients=False)
    step.release(x)
    return allow(step.trace(), "leaky_relu")


def allow(trace: Trace, *functions: str, reason: str = SAFE) -> Trace:
    return replace(
        trace, calls=tuple(replace(call, in_place=reason if call.function in functions else "") for call in trace.calls)
    )


def test_an_activation_that_keeps_its_input_keeps_one_map_less_in_place() -> None:
    trace = leaky_chain()
    assert propose(trace) == [1, 4, 7, 10]
    assert all(site.is_map and site.nbytes == 100 for site in find_sites(trace))
    assert replay(trace).peak_bytes == 1 + 12 * 100  # of each layer three maps, the last result among them
    assert weigh(trace, edit(trace, [1])) == Worth(100, 100)
    assert weigh(trace, edit(trace, propose(trace))) == Worth(400, 400)
    assert weigh_each(trace, [1, 10]) == {1: Worth(100, 100), 10: Worth(100, 100)}


def test_an_edited_call_overwrites_and_saves_its_result_as_autograd_would() -> None:
    trace = leaky_chain(1)
    edited = edit(trace, [1])
    source, result = trace.calls[1].inputs[0], trace.calls[1].outputs[0]
    assert (edited.cells[result].position, edited.cells[result].previous) == ("mut0", source)
    assert edited.cells[result].storage == edited.cells[source].storage
    assert [handle.cell for handle in edited.handles if handle.call == 1] == [result]
    assert edited.calls[1].in_place == ""
    assert find_sites(edited) == []


def test_a_chain_in_place_lies_on_one_storage_and_lives_as_long_as_its_last() -> None:
    step = Step()
    a = step.call("linear", [step.external(1, "input")], 10)
    b = step.call("relu", [a], 10)
    step.release(a)
    c = step.call("relu", [b], 10)
    step.release(b)
    last = step.call("sum", [c], 1)
    step.release(c, last)
    trace = allow(step.trace(), "relu")
    edited = edit(trace, propose(trace))
    assert len({edited.cells[cell].storage for cell in (a, b, c)}) == 1
    assert (replay(trace).peak_bytes, replay(edited).peak_bytes) == (1 + 20, 1 + 10 + 1)
    assert replay(edited).live_bytes[-1] == 1


def test_a_saved_input_and_one_read_again_are_refused_with_who_does_it() -> None:
    step = Step()
    x = step.external(1, "input")
    saved = step.call("linear", [x], 10, module="one")
    step.call("conv2d", [saved], 10, (saved,), module="two")
    step.call("relu", [saved], 10)
    again = step.call("linear", [x], 10)
    step.call("sigmoid", [again], 10)
    step.call("add", [again], 10, module="three")
    reasons = [site.reason for site in find_sites(allow(step.trace(), "relu", "sigmoid"))]
    assert reasons == [
        "would raise 'modified by an inplace operation': conv2d of two saved its input for backward",
        "its input is read again by add of three",
    ]
    assert [site.reason for site in find_sites(allow(step.trace(), "add", reason="its input is a view"))] == [
        "its input is a view"
    ]


def test_an_own_call_in_place_that_saves_nothing_is_told_why() -> None:
    step = Step()
    normed = step.call("batch_norm", [step.external(1, "input")], 10)
    active = step.call("relu", [normed], 10, in_place=True, saves_result=True, module="act")
    last = step.call("conv2d", [active], 100, (active,))
    step.release(normed, last)
    trace = step.trace()
    assert find_idle(trace) == [1]
    assert why_idle(trace, 1) == (
        "saves nothing: its result is saved anyway, by relu of act, and out of place its input would be gone when the call is over"
    )


# ---- in a plan ---------------------------------------------------------------------------------------------------------


def test_a_plan_is_free_while_calls_in_place_are_enough_and_takes_no_more_than_it_needs() -> None:
    trace = leaky_chain()
    found = plan(trace, 1201 - 250)
    assert [(move.technique, len(move.calls), move.saved_bytes) for move in found.moves] == [("inplace", 3, 300)]
    assert (found.extra_seconds, found.predicted_peak_bytes, found.eager_peak_bytes) == (0.0, 901, 1201)
    assert "300 B less until backward" in found.moves[0].reason


def test_a_plan_with_both_survives_its_file_and_finds_its_cells_again(tmp_path) -> None:
    trace = leaky_chain()
    found = plan(trace, 650)
    assert {move.technique for move in found.moves} == {"inplace", "recompute"}
    found.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    edited = edit_by_plan(trace, loaded)
    result = replay(edited, *cells_of_plan(edited, loaded))
    assert (result.peak_bytes, result.extra_seconds) == (found.predicted_peak_bytes, found.extra_seconds)
    alone = plan(allow(trace), 650)
    assert found.extra_seconds < alone.extra_seconds


def test_more_budget_is_never_slower_with_calls_in_place_either() -> None:
    trace = leaky_chain()
    floor = plan(trace, 1200).floor_bytes
    plans = [plan(trace, budget) for budget in (*range(plan(trace, 650).floor_bytes, 1200, 150), 1300)]
    assert floor <= 1200
    assert all(one.extra_seconds >= other.extra_seconds for one, other in pairwise(plans))
    assert plans[-1].moves == ()


def test_a_plan_without_calls_in_place_says_what_they_would_save() -> None:
    trace = allow(leaky_chain(), "batch_norm", reason="its input is a view")
    assert not any("in place" in note for note in plan(trace, 800).notes)
    step = Step()
    x = step.external(1, "input")
    held = step.call("exp", [x], 100, saves_result=True, seconds=2.0)
    small = step.call("linear", [held], 10)
    active = step.call("relu", [small], 10)
    step.release(held, small)
    last = step.call("exp", [active], 200, saves_result=True)
    step.release(active, last)
    step.backward(gradients=False)
    notes = plan(allow(step.trace(), "relu"), 290).notes
    assert notes[-1] == (
        "1 call may be in place, which takes 0 B off the peak of the step as it is and 0 B off what is held until backward; this plan "
        "does without (memfit explain inplace)."
    )


def test_a_plan_for_another_step_raises() -> None:
    move = Move("inplace", "", (), calls=("0|layer.9#0/0:relu",))
    with pytest.raises(PlanError, match=r"'0\|layer\.9#0/0:relu' in place, which this trace does not have"):
        edit_by_plan(leaky_chain(), Plan(1, 1, 1, 1, (move,)))
