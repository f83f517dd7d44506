"""What the costs are made of, and that each setting does what its name says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import overhead


@pytest.fixture(scope="module")
def settings() -> Iterator[dict[str, overhead.Setting]]:
    """All settings, for chains of 20 calls."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overhead, "NUM_CALLS", 20)
        yield overhead.make_settings()


def test_each_setting_runs_and_the_evicted_results_come_back(settings) -> None:
    assert settings["sigmoid, evicted"].num_evicted == 10
    figures = overhead.measure(settings, num_rounds=1)
    assert len(figures) == 2 * len(settings) == 22
    assert all(us >= 0 for us in figures.values())
    costs = overhead.derive_costs(figures)
    assert set(overhead.PROFILED) <= set(costs)


def test_a_setting_that_restores_another_number_of_results_is_no_measurement(settings) -> None:
    wrong = overhead.Setting("wrong", settings["sigmoid, evicted"].chain, settings["sigmoid, evicted"].enter, num_evicted=9)
    with pytest.raises(RuntimeError, match="wrong: 10 results came back, 9 were to"):
        overhead.run_step(wrong)


def test_costs_are_differences_of_what_was_measured() -> None:
    forward = {
        "neg, plain": 1.0,
        "neg, not in the plan": 2.0,
        "neg, recorded": 5.0,
        "neg, measured": 9.0,
        "sigmoid, plain": 1.5,
        "sigmoid, hooks that do nothing": 2.0,
        "sigmoid, not in the plan": 4.5,
        "sigmoid, recorded": 9.0,
    }
    backward = {
        "sigmoid, plain": 3.0,
        "sigmoid, hooks that do nothing": 4.0,
        "sigmoid, not in the plan": 6.0,
        "sigmoid, recorded": 7.0,
        "sigmoid, evicted": 17.0,
    }
    measured = {f"{name}, forward": us for name, us in forward.items()} | {
        f"{name}, backward": us for name, us in backward.items()
    }
    assert overhead.derive_costs(measured) == {
        "plain call": 1.0,
        "hooks that do nothing, pack": 0.5,
        "hooks that do nothing, unpack": 1.0,
        "call outside the plan": 1.0,
        "recorded call": 4.0,
        "measured call": 8.0,
        "saved tensor outside the plan, above hooks": 1.5,  # 4.5 - 2, and the call itself 1
        "saved tensor of a recorded call, above hooks": 3.0,  # 9 - 2, and the recorded call 4
        "unpacked handle outside the plan, above hooks": 2.0,
        "unpacked handle of a recorded call, above hooks": 3.0,
        "restored cell": 18.5,  # every other call restores one: 2 * (17 - 7), less the call itself
    }


def test_a_profile_holds_the_fifteen_functions_with_most_own_time(settings) -> None:
    profiles = overhead.profile(settings)
    assert set(profiles) == set(overhead.PROFILED)
    for rows in profiles.values():
        own = [row["own_microseconds"] for row in rows]
        assert own == sorted(own, reverse=True)
        assert len(rows) == 15
    assert any("handles.py" in row["function"] for row in profiles["restored cell"])
