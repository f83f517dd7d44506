"""Which planned frame a module invocation gets."""

from __future__ import annotations

from memfit.engine.policy import Policy, frame_of


def test_invocations_and_sections_beyond_the_plan_go_by_the_last_planned_ones() -> None:
    policy = Policy(["0|net#0/1:exp", "0|net#2/1:sin", "1|net#0/1:cos"], [], [], [])

    def function(section: int, invocation: int) -> str | None:
        frame = frame_of(policy.section(section), "net", invocation)
        return frame[1].function if frame is not None else None

    assert [function(0, invocation) for invocation in range(5)] == ["exp", None, "sin", "sin", "sin"]
    assert [function(7, invocation) for invocation in range(2)] == ["cos", "cos"]
    assert frame_of(policy.section(0), "other", 0) is None


def test_positions_are_told_apart_by_what_happens_to_them() -> None:
    place = "0|net#0/1:exp"
    policy = Policy([], [f"{place}|out0"], [f"{place}|in0"], [f"{place}|in1"])
    frame = frame_of(policy.section(0), "net", 0)
    assert frame is not None
    assert (frame[1].evict, frame[1].keep, frame[1].pin) == ({"out0"}, {"in0"}, {"in1"})


def test_an_invocation_in_which_nothing_is_planned_does_not_go_by_the_one_before() -> None:
    policy = Policy(["0|net#0/1:exp"], [], [], [], untouched=["0|net#1"])
    assert frame_of(policy.section(0), "net", 0) is not None
    assert frame_of(policy.section(0), "net", 1) is None
    assert frame_of(policy.section(0), "net", 2) is None  # one more goes by the last that is known


def test_calls_in_place_come_to_what_is_planned_there_already() -> None:
    plain = Policy(["0|net#0/1:relu"], ["0|net#0/1:relu|mut0"], [], [])
    policy = plain.with_in_place(["0|net#0/1:relu", "1|net#2/0:add"], untouched=["1|net#3"])
    frame = frame_of(policy.section(0), "net", 0)
    assert frame is not None
    assert (frame[1].in_place, frame[1].evict) == (True, {"mut0"})
    assert frame_of(policy.section(1), "net", 2) is not None
    assert frame_of(policy.section(1), "net", 3) is None
    assert policy.section(2) is policy.section(1)  # the last one's holds
    before = frame_of(plain.section(0), "net", 0)
    assert before is not None
    assert not before[1].in_place  # undoing puts this one back


def test_a_call_that_cannot_be_in_place_after_all_does_with_its_own_result_what_was_planned() -> None:
    place = "0|net#0/1:relu"
    policy = Policy([], [f"{place}|mut0"], [f"{place}|in0"], []).with_in_place([place])
    frame = frame_of(policy.section(0), "net", 0)
    assert frame is not None
    entry = frame[1].out_of_place()
    assert (entry.evict, entry.keep, entry.in_place) == ({"out0"}, {"in0"}, False)
