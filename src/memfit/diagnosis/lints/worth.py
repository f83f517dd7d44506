"""What a mend is worth in a step that was traced: its peak by replay with the mend's effect on the events, never a sum.

`del` and an earlier `zero_grad()` end a hold earlier; under `no_grad` nothing is saved; `.detach()` on what is summed or stored changes no
single step but what each leaves behind. The trace is of the plain step, and its notes of dead names (core.dead) say which value a
`del` lets go of. Lines are matched, so the source has to be the one that was traced. Costs a replay a mend, some 5 ms.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from memfit.core.dead import Dead, dead_in, let_go_early, old_gradients
from memfit.core.finding import Finding
from memfit.core.replay import replay
from memfit.core.sizes import format_size
from memfit.core.trace import ALLOC, BEGIN, DROP, END, PHASE, RELEASE, SAVE, UNPACK, Trace
from memfit.diagnosis.lints.fix import Made


@dataclass(frozen=True)
class Worth:
    """before_bytes: the peak of the traced step; after_bytes: the peak with the mend. per_step_bytes: what no longer stays behind
    after each step, None for mends that are about one step."""

    before_bytes: int
    after_bytes: int
    per_step_bytes: int | None = None

    @property
    def text(self) -> str:
        """'-12.0 MiB at the peak (203.2 MiB -> 191.2 MiB)', or '-20.0 KiB a step'."""
        if self.per_step_bytes is not None:
            return f"{_signed(self.per_step_bytes)} a step"
        if self.after_bytes == self.before_bytes:
            return f"0 B at the peak ({format_size(self.before_bytes)} before and after)"
        gain = _signed(self.before_bytes - self.after_bytes)
        return f"{gain} at the peak ({format_size(self.before_bytes)} -> {format_size(self.after_bytes)})"


def _signed(num_bytes: int) -> str:
    return f"-{format_size(num_bytes)}" if num_bytes > 0 else format_size(-num_bytes)


def weigh(made: Made, trace: Trace) -> Worth | None:
    """What the mend alone is worth; None where the traced step did not come to its line, or does not show what it would change."""
    effect = _effect(made, trace)
    if effect is None:
        return None
    before = replay(trace).peak_bytes
    return Worth(before, replay(_with_effects(trace, [effect])).peak_bytes, effect.per_step_bytes)


def peak_with_all(mends: Iterable[Made], trace: Trace) -> int:
    """Bytes at the peak of the step with all of them."""
    effects = [effect for made in mends if (effect := _effect(made, trace)) is not None]
    return replay(_with_effects(trace, effects)).peak_bytes


def with_worth(findings: Iterable[Finding], mends: Iterable[Made], trace: Trace) -> list[Finding]:
    """The findings with the measured bytes of their mends, where there are such."""
    worths = {made.finding: weigh(made, trace) for made in mends}
    result = []
    for finding in findings:
        worth = worths.get(finding)
        if worth is not None:
            per_step = worth.per_step_bytes is not None
            num_bytes = worth.per_step_bytes if worth.per_step_bytes is not None else worth.before_bytes - worth.after_bytes
            finding = replace(finding, num_bytes=num_bytes, per_step=per_step, measured=True)
        result.append(finding)
    return result


@dataclass(frozen=True)
class _Effect:
    """dead: what is let go early. unsaved: handles that are not made. per_step_bytes: see Worth."""

    dead: Sequence[Dead] = ()
    unsaved: frozenset[int] = frozenset()
    per_step_bytes: int | None = None


def _with_effects(trace: Trace, effects: Sequence[_Effect]) -> Trace:
    early = let_go_early(trace, [dead for effect in effects for dead in effect.dead])
    unsaved = frozenset().union(*(effect.unsaved for effect in effects))
    events = tuple(event for event in early.events if event[0] not in (SAVE, UNPACK, DROP) or event[1] not in unsaved)
    return replace(early, events=events)


def _effect(made: Made, trace: Trace) -> _Effect | None:
    if made.kind == "delete":
        return _delete(made, trace)
    if made.kind == "move":
        return _move(made, trace)
    if made.kind == "wrap":
        calls = _calls_at(made, trace)
        return _Effect(unsaved=_saved_from_to(trace, calls[0], calls[-1])) if calls else None
    if made.kind == "call" and made.text == "detach":
        calls = _calls_at(made, trace)
        return _Effect(per_step_bytes=_left_behind(trace, calls)) if calls else None
    return None  # a stored view's clone, a checkpoint's map_location: not in the events of a step


def _delete(made: Made, trace: Trace) -> _Effect | None:
    named = [
        each for each in dead_in(trace) if each.name.name == made.text and _real(each.name.path) == _real(made.finding.path)
    ]
    dead = [each for each in named if each.name.line == made.last_line]
    if not dead and not _calls_at(made, trace) and not named:
        return None
    return _Effect(dead)


def _move(made: Made, trace: Trace) -> _Effect | None:
    """Old gradients go where the forward begins: before the first call that the step makes on the target's line or after it."""
    path, _, line = str(trace.meta.get("gradients_freed", "")).rpartition(":")
    if _real(path) != _real(made.finding.path) or not line or not made.first_line <= int(line) <= made.last_line:
        return None
    at_target = [index for index, place in enumerate(_places(trace)) if place is not None and place == _target(made)]
    start = next((index for index, (operation, _) in enumerate(trace.events) if operation == PHASE), 0) + 1
    if at_target:
        start = next(index for index, event in enumerate(trace.events) if event == (BEGIN, at_target[0]))
    return _Effect([replace(each, event=start) for each in old_gradients(trace)])


def _target(made: Made) -> tuple[str, int]:
    return _real(made.finding.path), made.target_line


def _calls_at(made: Made, trace: Trace) -> list[int]:
    """Calls of the step on the lines of what was mended, in order."""
    path = _real(made.finding.path)
    return [
        index
        for index, place in enumerate(_places(trace))
        if place is not None and place[0] == path and made.first_line <= place[1] <= made.last_line
    ]


def _places(trace: Trace) -> list[tuple[str, int] | None]:
    """File and line of each call."""
    found: list[tuple[str, int] | None] = []
    for call in trace.calls:
        path, _, line = call.location.rpartition(":")
        found.append((_real(path), int(line)) if line.isdigit() else None)
    return found


@cache
def _real(path: str) -> str:
    return os.path.realpath(path)


def _saved_from_to(trace: Trace, first: int, last: int) -> frozenset[int]:
    """Handles saved between the beginning of the first call and the end of the last: calls in the modules' own files, too."""
    start, end = trace.events.index((BEGIN, first)), trace.events.index((END, last))
    return frozenset(operand for operation, operand in trace.events[start : end + 1] if operation == SAVE)


def _left_behind(trace: Trace, calls: Sequence[int]) -> int:
    """Bytes saved by calls that lead to these and held by autograd alone once the program's names are bound anew.

    Storages of the step before count if the program let go of them in this one: what follows `optimizer.step()` belongs to this step.
    """
    before: set[int] = set()
    waiting = list(calls)
    while waiting:
        call = waiting.pop()
        if call not in before:
            before.add(call)
            waiting += [trace.cells[cell].call for cell in trace.calls[call].inputs if trace.cells[cell].call >= 0]
    dropped = {operand for operation, operand in trace.events if operation == DROP}
    start = next((index for index, (operation, _) in enumerate(trace.events) if operation == PHASE), 0)
    passing = {operand for operation, operand in trace.events[start:] if operation in (ALLOC, RELEASE)}
    saved = {operand for operation, operand in trace.events if operation == SAVE} - dropped
    left = {trace.cells[trace.handles[handle].cell].storage for handle in saved if trace.handles[handle].call in before}
    return sum(trace.storages[storage].nbytes for storage in left & passing if not trace.storages[storage].persistent)
