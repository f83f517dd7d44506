"""What the steps after the first will hold: optimizer state from the start, old gradients as long as assumed."""

from __future__ import annotations

import pytest

from memfit.core.replay import replay
from memfit.core.steady import FREED, STAY, WAIT, steady
from memfit.core.trace import ALLOC, PHASE, PHASES, RELEASE, Storage, Trace

FORWARD, BACKWARD, STEP = (PHASE, 0), (PHASE, PHASES.index("backward")), (PHASE, PHASES.index("optimizer step"))


def first_step() -> Trace:
    """100 of parameters; 10 of activation; a gradient of 40 that stays; 7 of optimizer state that arrive with the step."""
    storages = (
        Storage(100, "parameter", persistent=True),
        Storage(10, "activation"),
        Storage(40, "gradient"),
        Storage(7, "optimizer state", persistent=True),
    )
    events = (
        (ALLOC, 0), FORWARD, (ALLOC, 1), BACKWARD, (ALLOC, 2), (RELEASE, 1), STEP, (ALLOC, 3),
    )  # fmt: skip
    return Trace("cpu", storages, (), (), (), events)


@pytest.mark.parametrize(
    ("gradients", "peak"),
    [
        (FREED, 100 + 7 + 10 + 40),  # in backward, when the gradient is made
        (WAIT, 100 + 7 + 10 + 40),  # the old one is there in forward, and gone when the new one is made
        (STAY, 100 + 7 + 10 + 40 + 40),  # the new one is added to the old one
    ],
)
def test_state_is_there_from_the_start_and_gradients_as_long_as_assumed(gradients: str, peak: int) -> None:
    assert replay(first_step()).peak_bytes == 100 + 10 + 40
    assert replay(steady(first_step(), gradients)).peak_bytes == peak


def test_waiting_gradients_count_in_the_forward_pass() -> None:
    trace = steady(first_step(), WAIT)
    begin = trace.events.index(BACKWARD)
    assert replay(trace).live_bytes[begin - 2] == 100 + 7 + 40 + 10


def test_what_a_gradient_is_added_from_goes_with_the_next_step_of_backward() -> None:
    assert replay(steady(first_step(), STAY)).live_bytes[-1] == 100 + 7 + 40


def test_state_nobody_has_seen_yet_is_counted() -> None:
    assert replay(steady(first_step(), FREED, state_bytes=1000)).peak_bytes == 100 + 7 + 1000 + 10 + 40
