"""From the first step's trace to the steps that follow it: what arrives with the first optimizer step is there from the start."""

from __future__ import annotations

from dataclasses import replace

from memfit.core.trace import ALLOC, PHASE, PHASES, RELEASE, Trace


def steady(trace: Trace, *, gradients_wait: bool) -> Trace:
    """The trace as it will be once optimizer state exists.

    gradients_wait: also count the gradients that the step leaves behind as alive until backward begins, as they are where the
    program clears them late; whether it does shows only in the second step.
    """
    left = {operand for operation, operand in trace.events if operation == ALLOC}
    left -= {operand for operation, operand in trace.events if operation == RELEASE}
    first_phase = next((i for i, (operation, _) in enumerate(trace.events) if operation == PHASE), 0)
    early = [
        (operation, operand)
        for operation, operand in trace.events[first_phase:]
        if operation == ALLOC and trace.storages[operand].persistent
    ]
    events = [*trace.events[:first_phase], *early]
    storages = list(trace.storages)
    moved = set(early)
    waiting = []
    if gradients_wait:
        for index in sorted(left):
            if storages[index].kind == "gradient":
                waiting.append(len(storages))
                storages.append(replace(storages[index]))
    events += [(ALLOC, index) for index in waiting]
    for event in trace.events[first_phase:]:
        if event in moved:
            continue
        if waiting and event == (PHASE, PHASES.index("backward")):
            events += [(RELEASE, index) for index in waiting]
            waiting = []
        events.append(event)
    return replace(trace, storages=tuple(storages), events=tuple(events))
