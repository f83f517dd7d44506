"""From the first step's trace to the steps that follow it: what arrives with the first optimizer step is there from the start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memfit.core.trace import ALLOC, BEGIN, DROP, PHASE, PHASES, RELEASE, UNPACK, Storage, Trace

FREED, WAIT, STAY = GRADIENTS = ("freed", "wait", "stay")
"""What the program does with old gradients, which shows only in the second step: frees them before the forward pass, keeps them
until backward begins (a late `zero_grad()`), or never frees them (`zero_grad(set_to_none=False)`), so that backward adds to them."""

_BACKWARD = (PHASE, PHASES.index("backward"))
_NEXT_NODE = (UNPACK, DROP, BEGIN, PHASE)  # what happens after a gradient was added: the backward pass has moved on


def steady(trace: Trace, gradients: str, state_bytes: int = 0) -> Trace:
    """The trace as it will be once optimizer state exists.

    gradients: one of GRADIENTS. state_bytes: optimizer state that the trace does not know of yet (it ends before the optimizer's step).
    """
    first_phase = next((i for i, (operation, _) in enumerate(trace.events) if operation == PHASE), len(trace.events))
    before, during = list(trace.events[:first_phase]), list(trace.events[first_phase:])
    storages = list(trace.storages)
    early = [event for event in during if event[0] == ALLOC and storages[event[1]].persistent]
    if state_bytes:
        early.append((ALLOC, len(storages)))
        storages.append(Storage(state_bytes, "optimizer state", persistent=True))
    left = [] if gradients == FREED else _left_behind(during, "gradient", trace.storages)
    moved = set(early)
    during = [event for event in during if event not in moved]
    if gradients == STAY:
        early += [(ALLOC, index) for index in left]
        during = _added_to(during, left, storages)
    elif left:
        waiting = range(len(storages), len(storages) + len(left))
        storages += [replace(storages[index]) for index in left]
        early += [(ALLOC, index) for index in waiting]
        at = during.index(_BACKWARD) if _BACKWARD in during else len(during)
        during[at:at] = [(RELEASE, index) for index in waiting]
    return replace(trace, storages=tuple(storages), events=(*before, *early, *during))


def _left_behind(events: Sequence[tuple[str, int]], kind: str, storages: Sequence[Storage]) -> list[int]:
    """The storages of a kind that the events allocate and do not release."""
    left = {operand for operation, operand in events if operation == ALLOC}
    left -= {operand for operation, operand in events if operation == RELEASE}
    return [index for index in sorted(left) if storages[index].kind == kind]


def _added_to(events: Sequence[tuple[str, int]], left: list[int], storages: list[Storage]) -> list[tuple[str, int]]:
    """The events with every new gradient a temporary that goes as soon as it was added to the one there is already."""
    temporary = {}
    for index in left:
        temporary[index] = len(storages)
        storages.append(replace(storages[index]))
    added: list[tuple[str, int]] = []
    waiting: list[int] = []
    for operation, operand in events:
        if operation in _NEXT_NODE:
            added += [(RELEASE, index) for index in waiting]
            waiting = []
        if operation == ALLOC and operand in temporary:
            operand = temporary[operand]
            waiting.append(operand)
        added.append((operation, operand))
    return added + [(RELEASE, index) for index in waiting]
