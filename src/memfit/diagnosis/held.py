"""What attributes, elements, closures, hooks, tracebacks and optimizers hold at the peak of a traced step although the step reads it no more.

Pure: a trace in, findings out. The source does not say when an attribute is read for the last time, so this is told by the step itself:
what it made, read for the last time before the peak, and let go of later unread; or what stood under the same name when the step began
and was not read in all of it. What was there before the first step (data, another model) is left alone, but for an exception's frames
and what only an optimizer has. Worth is by replay, as for variables (`diagnosis.dead`).
"""

from __future__ import annotations

from dataclasses import dataclass

from memfit.core.dead import Dead, dead_in
from memfit.core.finding import Finding
from memfit.core.liveness import DeadName
from memfit.core.replay import Replay, replay
from memfit.core.trace import ALLOC, PHASE, RELEASE, Trace
from memfit.diagnosis.dead import weigh

HELD = "MF204"
FRAMES = "MF111"
ORPHANS = "MF205"
_CODES = {"traceback": FRAMES, "optimizer": ORPHANS}
_ALWAYS = ("traceback", "optimizer")  # these hold for nothing whenever it was made
_REMEDIES = {
    "traceback": "Keep the message or the type of the exception, not the exception itself",
    "optimizer": "Make the optimizer of the parameters of the model that is trained",
}


@dataclass(frozen=True)
class _Row:
    """See measurement.held.Held. last_use: the event before which an operation read it last, -1 for none in this step."""

    storage: int
    when: str
    kind: str
    name: str
    chain: str
    is_old: bool
    last_use: int


def find_held(trace: Trace) -> list[Finding]:
    """A finding for each holder of at least 1 % of the peak that the step does not read again, most bytes first."""
    step = replay(trace)
    by_name: dict[str, list[tuple[_Row, Dead]]] = {}
    for row, dead in _dead_rows(trace, step):
        by_name.setdefault(row.name, []).append((row, dead))
    found = [_about(each, trace, step) for each in by_name.values()]
    return sorted((each for each in found if each is not None), key=lambda finding: (-(finding.num_bytes or 0), finding))


def held_in(trace: Trace) -> list[Dead]:
    """What is so held, as what could be let go early."""
    return [dead for _, dead in _dead_rows(trace, replay(trace))]


def _dead_rows(trace: Trace, step: Replay) -> list[tuple[_Row, Dead]]:
    rows = [_Row(**row) for row in trace.meta.get("held", ())]
    known = {dead.storage for dead in dead_in(trace)}  # variables hold these, and go
    found = []
    for row in rows:
        if (
            row.storage in step.holders
            and row.storage not in known
            and (event := _dead_from(row, rows, trace, step)) is not None
        ):
            known.add(row.storage)
            found.append((row, Dead(DeadName("", "", row.name, 0, ()), row.storage, event)))
    return found


def _dead_from(row: _Row, rows: list[_Row], trace: Trace, step: Replay) -> int | None:
    """The event from which on the step does not read what the row is about; None where it may, then or in the next step."""
    begin = next((index for index, (operation, _) in enumerate(trace.events) if operation == PHASE), 0)
    made = trace.events.index((ALLOC, row.storage))
    before = [each for each in rows if each.when == "start" and each.name == row.name]
    if made < begin:
        is_read = any(each.last_use >= 0 for each in before) or row.last_use >= 0
        return None if is_read or (row.is_old and row.kind not in _ALWAYS) else begin + 1
    if row.last_use >= step.peak_event:
        return None
    is_released = (RELEASE, row.storage) in trace.events
    if not is_released and (not before or any(each.last_use >= 0 for each in before)):
        return None
    return max(row.last_use, made, begin + 1) + 1


def _about(held: list[tuple[_Row, Dead]], trace: Trace, step: Replay) -> Finding | None:
    worth = weigh(trace, step, [dead for _, dead in held])
    if not worth.is_telling:
        return None
    row = max((row for row, _ in held), key=lambda row: trace.storages[row.storage].nbytes)
    location = (
        max((trace.storages[each.storage].location for each, _ in held), key=bool) or f"{trace.meta.get('program', '')}:1"
    )
    path, _, line = location.rpartition(":")
    what = (
        "what was made here and no operation of the step reads again"
        if trace.storages[row.storage].location
        else "what no operation of the step reads"
    )
    message = f"{row.chain} holds at the peak in {step.peak_phase} {what}"
    remedy = worth.say(_REMEDIES.get(row.kind, "Let go of it once it has been read, or keep only what is read of it"))
    return Finding(path, int(line), 1, _CODES.get(row.kind, HELD), message, remedy, worth.held_bytes, measured=True)
