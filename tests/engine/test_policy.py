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
