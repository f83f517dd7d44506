"""Frames: which locals are dead behind a call, what an instruction calls, and that learning the numbers leaves no trace."""

from __future__ import annotations

import dis
import random
from collections.abc import Callable

import pytest
import torch

from memfit.engine import frames
from memfit.engine.bytecode import NAMED, OPERATOR, OTHER, called_at, live_after
from memfit.engine.tape import Tape

pytestmark = pytest.mark.skipif(not frames.UNDERSTOOD, reason="this Python's frames are left alone")


def mark() -> None: ...


def rebound(x: object, y: object) -> None:
    mark()
    x = y
    print(x)


def read_on_one_path(x: object, y: object) -> object:
    mark()
    return x if y else None


def read_by_a_handler(x: object) -> object:
    try:
        mark()
        x = 1
    except ValueError:
        return x
    return None


def read_at_last(x: object) -> None:
    try:
        mark()
        x = 1
    finally:
        print(x)


def read_in_the_next_turn(x: object) -> None:
    for _ in range(2):
        print(x)
        mark()


def bound_in_the_next_turn(x: object) -> None:
    for x in range(2):  # noqa: B007
        mark()


def deleted(x: object) -> None:
    mark()
    del x


def read_by_name(x: object) -> object:
    mark()
    return locals()


def left_alone(x: object) -> None:
    with open(__file__):
        mark()


@pytest.mark.parametrize(
    ("function", "live"),
    [
        (rebound, {"y"}), (read_on_one_path, {"x", "y"}), (read_by_a_handler, {"x"}), (read_at_last, {"x"}),
        (read_in_the_next_turn, {"x"}), (bound_in_the_next_turn, set()), (deleted, set()), (read_by_name, {"x"}), (left_alone, set()),
    ],
)  # fmt: skip
def test_live_after_names_what_some_path_reads_before_it_is_bound_again(
    function: Callable[..., object], live: set[str]
) -> None:
    code = function.__code__
    place = next(each.offset for each in dis.get_instructions(code) if each.argval == "mark")
    call = next(each.offset for each in dis.get_instructions(code) if each.opname == "CALL" and each.offset > place)
    assert live_after(code, call) & {"x", "y"} == live


@pytest.mark.parametrize(
    ("source", "called"),
    [
        ("torch.relu(x)", (NAMED, ("torch", "relu"))),
        ("self.a.act(x, y)", (NAMED, ("self", "a", "act"))),
        ("act(x)", (NAMED, ("act",))),
        ("self.layers[3](x)", (NAMED, ("self", "layers", "3"))),
        ("act(torch.relu(x), x.t())", (NAMED, ("act",))),
        ("list(z)", (NAMED, ("list",))),
        ("self.find(y).relu()", (NAMED, ("", "relu"))),
        ("self.find(y).a.act(x)", (NAMED, ())),
        ("self.find(y)(x)", (NAMED, ())),
        ("(x if y else z).relu(self)", (NAMED, ())),
        ("(x + y).relu()", (NAMED, ("", "relu"))),
        ("(x if y else z)(y)", (OTHER, ())),
        ("act(*x)", (OTHER, ())),
        ("act(x, key=y)", (OTHER, ())),
        ("act(x if y else z)", (OTHER, ())),
        ("x + y", (OPERATOR, ("x", "y"))),
        ("x + 1", (OPERATOR, ("x",))),
        ("1 + x", (OPERATOR, ("x",))),
        ("x + act(y, self)", (OPERATOR, ("x",))),
        ("act(y) + x", (OPERATOR, ("x",))),
        ("act(x) + 1", (OPERATOR, ())),
        ("act(y) + (1 if z else x)", (OTHER, ())),
        ("act(y) + (z and x)", (OTHER, ())),
    ],
)
def test_called_at_tells_what_a_call_calls_or_that_it_does_not_know(source: str, called: tuple[str, object]) -> None:
    code = eval(f"lambda x, y, z, self: ({source}, y)").__code__  # more behind it: a return is written once for each branch
    last = [each.offset for each in dis.get_instructions(code) if each.opname in ("CALL", "CALL_FUNCTION_EX", "BINARY_OP")][-1]
    assert called_at(code, last) == called


def test_learning_how_calls_hold_arguments_succeeds_and_leaves_random_state_and_places_alone() -> None:
    known = list(frames._counts)
    frames._counts.clear()
    state, state_of_python = torch.get_rng_state(), random.getstate()
    tape = Tape()
    try:
        tape.enter()
        tape.exit()
        assert frames._counts[0] is not None
        assert torch.equal(torch.get_rng_state(), state)
        assert random.getstate() == state_of_python
        assert tape.places._invocations == {}
    finally:
        frames._counts[:] = known or frames._counts


@pytest.mark.parametrize("wrong", ["builtin", "functional", "module"])
def test_a_number_that_is_off_by_one_is_found_out_before_it_is_used(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a Python that holds arguments in another way: then nothing is ever in place."""

    class Counts(frames._Counts):
        def __init__(self, builtin: int, functional: int, module: int) -> None:
            numbers = {"builtin": builtin, "functional": functional, "module": module}
            numbers[wrong] += 1
            super().__init__(**numbers)

    known = list(frames._counts)
    frames._counts.clear()
    monkeypatch.setattr(frames, "_Counts", Counts)
    tape = Tape()
    try:
        tape.enter()
        tape.exit()
        assert frames._counts == [None]
    finally:
        frames._counts[:] = known
