"""What is dead and yet held at the peak of a traced step: variables nobody reads any more, and gradients cleared late.

Pure: a trace in, findings out, their bytes by replay. Names come from the notes of the step (core.dead); where there are none
(another program than a script, or one that reads frames) only gradients are found. What letting go is worth is the peak of the
step without it, so it is less than what is held where another moment is nearly as high, and that is said.
"""

from __future__ import annotations

from memfit.core.dead import Dead, dead_in, let_go_early
from memfit.core.finding import Finding
from memfit.core.liveness import MODULE, DeadName
from memfit.core.replay import Replay, replay
from memfit.core.sizes import format_size
from memfit.core.trace import ALLOC, PHASE, RELEASE, UNPACK, Trace

DEAD_NAME = "MF203"
LATE_ZERO_GRAD = "MF401"
_SMALLEST_SHARE = 0.01  # of the peak


def find_dead(trace: Trace) -> list[Finding]:
    """A finding for each variable and for old gradients that hold at least 1 % of the peak for nothing, most bytes first."""
    step = replay(trace)
    found = [*_dead_names(trace, step), *_late_zero_grad(trace, step)]
    return sorted(found, key=lambda finding: (-(finding.num_bytes or 0), finding))


def peak_without_dead(trace: Trace) -> int:
    """Bytes at the peak of the same step with everything let go where it dies, gradients included."""
    return replay(let_go_early(trace, [*dead_in(trace), *_old_gradients(trace)])).peak_bytes


def _dead_names(trace: Trace, step: Replay) -> list[Finding]:
    holders = set(step.holders)
    by_name: dict[DeadName, list[Dead]] = {}
    for dead in dead_in(trace):
        if dead.event <= step.peak_event and dead.storage in holders:
            by_name.setdefault(dead.name, []).append(dead)
    return [
        _about_name(name, trace, step, each)
        for name, each in by_name.items()
        if _is_worth_telling(_sum(trace, each), step) and _gain(trace, step, each)
    ]


def _about_name(name: DeadName, trace: Trace, step: Replay, dead: list[Dead]) -> Finding:
    held = _sum(trace, dead)
    bound = " or ".join(map(str, name.bound_lines))
    where = "" if name.function == MODULE else f" of {name.function}"
    if name.at_start:
        message = f"`{name.name}`{where} still holds what line {bound} bound, which nobody reads, at the peak in {step.peak_phase}"
        after = f"`del {name.name}` where the loop or branch before line {name.line} has read it last"
    else:
        message = (
            f"`{name.name}`{where}, bound in line {bound}, is dead after line {name.line} and yet held at the peak in {step.peak_phase}"
        )
        after = f"`del {name.name}` after line {name.line}"
    line = name.bound_lines[-1] if name.at_start and name.bound_lines else name.line
    return Finding(name.path, line, 1, DEAD_NAME, message, _worth(after, held, _gain(trace, step, dead)), held, measured=True)


def _late_zero_grad(trace: Trace, step: Replay) -> list[Finding]:
    """Gradients of the step before, alive at the peak, and let go after it and before a backward could add to them."""
    holders = set(step.holders)
    dead = [each for each in _old_gradients(trace) if each.storage in holders]
    location = str(trace.meta.get("gradients_freed", ""))
    if not dead or not location or not _is_worth_telling(_sum(trace, dead), step) or not _gain(trace, step, dead):
        return []
    path, _, line = location.rpartition(":")
    message = f"the gradients of the step before are still held at the peak in {step.peak_phase}: they are cleared only here"
    remedy = _worth(
        "clear them right after optimizer.step(), if nothing reads them in between", _sum(trace, dead), _gain(trace, step, dead)
    )
    return [Finding(path, int(line), 1, LATE_ZERO_GRAD, message, remedy, _sum(trace, dead), measured=True)]


def _old_gradients(trace: Trace) -> list[Dead]:
    """Gradients alive when the step began and let go before its backward; dead from the step's start on."""
    start = next((index for index, (operation, _) in enumerate(trace.events) if operation == PHASE), 0)
    end = next((index for index, (operation, _) in enumerate(trace.events) if operation == UNPACK), 0)
    old = {
        operand for operation, operand in trace.events[:start] if operation == ALLOC and trace.storages[operand].kind == "gradient"
    }
    nobody = DeadName("", "", "", 0, ())
    return [Dead(nobody, operand, start + 1) for operation, operand in trace.events[:end] if operation == RELEASE and operand in old]


def _sum(trace: Trace, dead: list[Dead]) -> int:
    return sum(trace.storages[storage].nbytes for storage in {each.storage for each in dead})


def _gain(trace: Trace, step: Replay, dead: list[Dead]) -> int:
    return step.peak_bytes - replay(let_go_early(trace, dead)).peak_bytes


def _is_worth_telling(num_bytes: int, step: Replay) -> bool:
    return num_bytes >= _SMALLEST_SHARE * step.peak_bytes


def _worth(action: str, held_bytes: int, gain_bytes: int) -> str:
    if gain_bytes >= held_bytes:
        return f"{action}: the peak falls by {format_size(gain_bytes)}."
    return f"{action}: the peak falls by {format_size(gain_bytes)}, to where another moment of the step is as high."
