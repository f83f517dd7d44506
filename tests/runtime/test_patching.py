"""Attributes replaced for a while."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from memfit.runtime.patching import patch


class Owner:
    def ask(self) -> str:
        return "own"


OWN = Owner.__dict__["ask"]


def add(letter: str) -> Callable[[Callable[..., str]], Callable[..., str]]:
    return lambda original: lambda self: original(self) + letter


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_three_wrappers_come_off_in_any_order_and_leave_nothing(order: tuple[int, ...]) -> None:
    undo = [patch(Owner, "ask", add(letter)) for letter in "abc"]
    left = list("abc")
    for number in order:
        assert Owner().ask() == "own" + "".join(left)
        undo[number]()
        left.remove("abc"[number])
    assert Owner.__dict__["ask"] is OWN


def test_under_a_wrapper_of_somebody_elses_ours_stays_and_only_calls_the_original() -> None:
    undo = patch(Owner, "ask", add("a"))
    ours = Owner.__dict__["ask"]
    Owner.ask = lambda self: ours(self) + "x"
    try:
        undo()
        assert Owner().ask() == "ownx"
    finally:
        Owner.ask = OWN
