"""What is dead and yet held at the peak of a traced step: variables nobody reads any more, and gradients cleared late.

Pure: a trace in, findings out, their bytes by replay. Names come from the notes of the step (core.dead); where there are none
(another program than a script, or one that reads frames) only gradients are found. What letting go is worth is the peak of the
step without it, so it is less than what is held where another moment is nearly as high, and that is said.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from memfit.core.dead import Dead, dead_in, let_go_early, old_gradients
from memfit.core.finding import Finding
from memfit.core.liveness import MODULE, DeadName
from memfit.core.replay import Replay, replay
from memfit.core.sizes import format_size
from memfit.core.trace import Trace

DEAD_NAME = "MF203"
LATE_ZERO_GRAD = "MF401"
_SMALLEST_SHARE = 0.01  # of the peak


def find_dead(trace: Trace) -> list[Finding]:
    """A finding for each variable and for old gradients that hold at least 1 % of the peak for nothing, most bytes first."""
    step = replay(trace)
    found = [*_dead_names(trace, step), *_late_zero_grad(trace, step)]
    return sorted(found, key=lambda finding: (-(finding.num_bytes or 0), finding))


def peak_without_dead(trace: Trace, more: Iterable[Dead] = ()) -> int:
    """Bytes at the peak of the same step with everything let go where it dies, gradients and `more` included."""
    return replay(let_go_early(trace, [*dead_in(trace), *old_gradients(trace), *more])).peak_bytes


def _dead_names(trace: Trace, step: Replay) -> list[Finding]:
    at_peak = {dead.name for dead in dead_in(trace) if dead.event <= step.peak_event and dead.storage in step.holders}
    by_name: dict[DeadName, list[Dead]] = {}
    for dead in dead_in(trace):
        if dead.name in at_peak:  # with its other deaths: a loop's peak comes once a turn
            by_name.setdefault(dead.name, []).append(dead)
    found = [_about_name(name, weigh(trace, step, each), step) for name, each in by_name.items()]
    return [each for each in found if each is not None]


def _about_name(name: DeadName, worth: Worth, step: Replay) -> Finding | None:
    if not worth.is_telling:
        return None
    bound = " or ".join(map(str, name.bound_lines))
    where = "" if name.function == MODULE else f" of {name.function}"
    if name.at_start:
        message = (
            f"`{name.name}`{where} still holds what line {bound} bound, which nobody reads, at the peak in {step.peak_phase}"
        )
        action = f"`del {name.name}` after its last use, before control comes to line {name.line} again"
    else:
        message = f"`{name.name}`{where}, bound in line {bound}, is dead after line {name.line} and yet held at the peak in {step.peak_phase}"
        action = f"`del {name.name}` after line {name.line}"
    line = name.bound_lines[-1] if name.at_start and name.bound_lines else name.line
    return Finding(name.path, line, 1, DEAD_NAME, message, worth.say(action), worth.held_bytes, measured=True)


def _late_zero_grad(trace: Trace, step: Replay) -> list[Finding]:
    """Gradients of the step before, alive at the peak, and let go after it and before a backward could add to them."""
    dead = [each for each in old_gradients(trace) if each.storage in step.holders]
    location = str(trace.meta.get("gradients_freed", ""))
    worth = weigh(trace, step, dead)
    if not location or not worth.is_telling:
        return []
    path, _, line = location.rpartition(":")
    message = f"the gradients of the step before are still held at the peak in {step.peak_phase}: they are cleared only here"
    remedy = worth.say("clear them right after optimizer.step(), if nothing reads them in between")
    return [Finding(path, int(line), 1, LATE_ZERO_GRAD, message, remedy, worth.held_bytes, measured=True)]


@dataclass(frozen=True)
class Worth:
    """held_bytes: what is held for nothing at the peak. gain_bytes: by how much the peak of the step falls without it."""

    held_bytes: int
    gain_bytes: int
    peak_bytes: int

    @property
    def is_telling(self) -> bool:
        return self.gain_bytes > 0 and self.held_bytes >= _SMALLEST_SHARE * self.peak_bytes

    def say(self, action: str) -> str:
        less = "" if self.gain_bytes >= self.held_bytes else ", to where another moment of the step is as high"
        return f"{action}: the peak falls by {format_size(self.gain_bytes)}{less}."


def weigh(trace: Trace, step: Replay, dead: list[Dead]) -> Worth:
    """What these hold at the peak of the replayed step, and what the peak is worth without them."""
    if not dead:
        return Worth(0, 0, step.peak_bytes)
    there = replay(let_go_early(trace, dead, until=step.peak_event)).high_bytes[-1]
    return Worth(step.peak_bytes - there, step.peak_bytes - replay(let_go_early(trace, dead)).peak_bytes, step.peak_bytes)
