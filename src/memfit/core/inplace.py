"""In place: calls of a traced step that may write their result over their input, and what the step becomes if they do. Pure.

A call that was seen to be safe when it ran (`Call.in_place`) is proposed where the trace agrees: autograd did not save its input, and
no later call reads it. `edit` gives the trace of the step with such calls in place, so what they are worth is a replay like any
other: often nothing at the peak, since out of place the input would have been gone a moment later. `apart` is the way back, for calls
that the program itself runs in place.

What does lower memory for long is a call that saves its input out of place and its result in place (leaky_relu): one map less.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace

from memfit.core.replay import Replayer
from memfit.core.trace import ALLOC, BEGIN, END, RELEASE, Cell, Storage, Trace

SAFE = "safe"
ROUNDED = "in place its gradient is equal to rounding only, not bit for bit"
COPIED = "in place autograd saves a copy of its input, so nothing would be won"


@dataclass(frozen=True)
class Site:
    """A call that has an in-place form, or is in place, as index into the trace's calls.

    nbytes: of its result. reason: '' where it may be in place, else why not, in words.
    is_map: whether out of place it keeps its input for backward and in place its result, which is kept anyway: a map less until then.
    """

    call: int
    nbytes: int
    reason: str = ""
    is_map: bool = False


def find_sites(trace: Trace) -> list[Site]:
    """Every call that has an in-place form and runs out of place, in forward order: what may be in place, and why not what may not."""
    readers: dict[int, list[int]] = {}
    for index, call in enumerate(trace.calls):
        for cell in call.inputs:
            readers.setdefault(cell, []).append(index)
    savers: dict[int, list[int]] = {}
    for handle in trace.handles:
        savers.setdefault(handle.cell, []).append(handle.call)
    sites = []
    for index, call in enumerate(trace.calls):
        if not call.in_place:
            continue
        result, source = _result(trace, index), call.inputs[0] if call.inputs else None
        nbytes = trace.storages[trace.cells[result].storage].nbytes if result is not None else 0
        reason = _why_not(trace, index, readers, savers)
        is_map = not reason and source is not None and index in savers.get(source, ())
        if is_map and result not in savers:
            reason, is_map = "in place it would save its result instead of its input, so nothing would be won", False
        sites.append(Site(index, nbytes, reason, is_map))
    return sites


def propose(trace: Trace) -> list[int]:
    """The calls that may be in place, as indices: one of them, some, or all together."""
    return [site.call for site in find_sites(trace) if not site.reason]


def _result(trace: Trace, call: int) -> int | None:
    """The cell of the call's result, where it is a storage of its own."""
    return next((cell for cell in trace.calls[call].outputs if trace.cells[cell].position == "out0"), None)


def _why_not(trace: Trace, index: int, readers: dict[int, list[int]], saved_by: dict[int, list[int]]) -> str:
    call, result = trace.calls[index], _result(trace, index)
    if call.in_place in (ROUNDED, COPIED):
        return call.in_place
    if result is None or not call.inputs:
        return "its result is nothing that can be had again"
    source = call.inputs[0]
    if savers := [each for each in saved_by.get(source, ()) if each != index]:
        return f"would raise 'modified by an inplace operation': {_say(trace, savers[0])} saved its input for backward"
    if later := [each for each in readers[source] if each > index]:
        return f"its input is read again by {_say(trace, later[0])}"
    if call.in_place != SAFE:
        return call.in_place
    old, new = (trace.storages[trace.cells[cell].storage] for cell in (source, result))
    if old.persistent or old.nbytes != new.nbytes or trace.cells[source].storage == trace.cells[result].storage:
        return "its input is no storage of the same size that ends with it"
    return ""


def _say(trace: Trace, call: int) -> str:
    """'conv2d of stem.0, net.py:12'."""
    if call < 0:
        return "autograd, outside of any recorded call,"
    row = trace.calls[call]
    return ", ".join(part for part in (f"{row.function} of {row.module}" if row.module else row.function, row.location) if part)


def edit(trace: Trace, calls: Iterable[int]) -> Trace:
    """The step with these calls, some of `propose`'s, in place: each result lies on its input's storage, which lives as long as the
    longer of the two, and what the call saved of its input it saves of its result."""
    chosen = sorted(calls)
    cells, handles = list(trace.cells), list(trace.handles)
    onto: dict[int, int] = {}  # storages that do not come to life, and what their content lies on
    for call in chosen:  # of a chain the earlier first
        source, result = trace.calls[call].inputs[0], _result(trace, call)
        assert result is not None
        onto[cells[result].storage] = cells[source].storage
        cells[result] = replace(cells[result], storage=cells[source].storage, position="mut0", previous=source)
        handles = [replace(each, cell=result) if each.cell == source and each.call == call else each for each in handles]
    cells = [
        replace(cell, storage=onto.get(cell.storage, cell.storage)) for cell in cells
    ]  # what the program wrote there later
    releases = {operand: index for index, (operation, operand) in enumerate(trace.events) if operation == RELEASE}
    never = len(trace.events)
    last: dict[int, int] = {}  # by storage that others lie on: the event that lets go of it
    for new, old in onto.items():
        last[old] = max(last.get(old, 0), releases.get(old, never), releases.get(new, never))
    events = []
    for index, (operation, operand) in enumerate(trace.events):
        if operation == ALLOC and operand in onto:
            continue
        if operation == RELEASE and last.get(operand := onto.get(operand, operand), index) != index:
            continue
        events.append((operation, operand))
    in_place = frozenset(chosen)
    rows = tuple(replace(row, in_place="") if index in in_place else row for index, row in enumerate(trace.calls))
    return replace(trace, cells=tuple(cells), handles=tuple(handles), calls=rows, events=tuple(events))


AT_BACKWARD = "backward"  # no call's place


@dataclass(frozen=True)
class LetGo:
    """When the program lets go of a call's input and of its result: before the call at this place begins; AT_BACKWARD if none does after it."""

    input_before: str
    result_before: str


def find_let_go(trace: Trace) -> dict[str, LetGo]:
    """By place of the calls that might be in place. Where one is, nothing else tells: a variable may hold the input well beyond the call
    (`norm(x + y)` holds x until the norm is over), or beyond the result's end."""
    begins = [(index, operand) for index, (operation, operand) in enumerate(trace.events) if operation == BEGIN]
    released = {operand: index for index, (operation, operand) in enumerate(trace.events) if operation == RELEASE}

    def before(cell: int) -> str:
        event = released.get(trace.cells[cell].storage, len(trace.events))
        number = bisect_right(begins, (event, -1))
        return trace.calls[begins[number][1]].place if number < len(begins) else AT_BACKWARD

    found = {}
    for index, call in enumerate(trace.calls):
        result = _result(trace, index)
        if call.in_place and call.inputs and result is not None:
            found[call.place] = LetGo(before(call.inputs[0]), before(result))
    return found


def apart(trace: Trace, call: int) -> Trace:
    """The step with a call of the program's, which runs in place, out of place: its result is a new storage, and the old one goes as
    soon as autograd does not hold it."""
    result = next(cell for cell in trace.calls[call].outputs if trace.cells[cell].position == "mut0")
    source = trace.cells[result].previous
    old, new = trace.cells[result].storage, len(trace.storages)
    storages = (*trace.storages, replace(trace.storages[old], kind="activation"))
    after = {result}
    cells: list[Cell] = []
    for index, cell in enumerate(trace.cells):
        if index in after or cell.previous in after:  # and what was written over it since
            after.add(index)
            cell = replace(cell, storage=new)
        cells.append(cell)
    cells[result] = replace(cells[result], position="out0", previous=-1)
    handles = list(trace.handles)
    if trace.calls[call].function in SAVES_INPUT:
        handles = [replace(each, cell=source) if each.cell == result and each.call == call else each for each in handles]
    events: list[tuple[str, int]] = []
    is_past = False
    for operation, operand in trace.events:
        if (operation, operand) == (BEGIN, call):
            events += [(BEGIN, call), (ALLOC, new)]
            continue
        if is_past and (operation, operand) == (RELEASE, old):
            operand = new
        events.append((operation, operand))
        if (operation, operand) == (END, call):
            events.append((RELEASE, old))
            is_past = True
    return replace(trace, storages=storages, cells=tuple(cells), handles=tuple(handles), events=tuple(events))


SAVES_INPUT = frozenset(
    ["leaky_relu", "leaky_relu_"]
)  # of the functions with the same bits in place: what out of place saves its input


@dataclass(frozen=True)
class Worth:
    """What a step with calls in place saves: bytes at the peak of the step, and bytes that autograd holds until backward."""

    peak_bytes: int
    held_bytes: int


def weigh(trace: Trace, edited: Trace) -> Worth:
    """What `edited` takes less than `trace`."""
    peak = Replayer(trace).measure()[0] - Replayer(edited).measure()[0]
    return Worth(peak, _held_bytes(trace) - _held_bytes(edited))


def weigh_each(trace: Trace, calls: Iterable[int]) -> dict[int, Worth]:
    """What each of these proposed calls saves alone, in place. About 20 ms a call in a trace of a thousand."""
    peak_bytes, held_bytes = Replayer(trace).measure()[0], _held_bytes(trace)
    found = {}
    for call in calls:
        edited = edit(trace, [call])
        found[call] = Worth(peak_bytes - Replayer(edited).measure()[0], held_bytes - _held_bytes(edited))
    return found


def _held_bytes(trace: Trace) -> int:
    """Bytes of all storages that autograd holds."""
    held = {trace.cells[handle.cell].storage for handle in trace.handles}
    return sum(_bytes(trace.storages[storage]) for storage in held)


def why_idle(trace: Trace, call: int) -> str:
    """Why a call of `find_idle`'s saves nothing, in words."""
    result = next(cell for cell in trace.calls[call].outputs if trace.cells[cell].position == "mut0")
    savers = [handle.call for handle in trace.handles if handle.cell == result]
    kept = f"its result is saved anyway, by {_say(trace, savers[0])}" if savers else "its result is kept by nobody"
    return f"saves nothing: {kept}, and out of place its input would be gone when the call is over"


def _bytes(storage: Storage) -> int:
    return 0 if storage.persistent else storage.nbytes


def find_idle(trace: Trace) -> list[int]:
    """Calls that the program itself runs in place although that saves nothing, at the peak or until backward."""
    own = [
        index
        for index, call in enumerate(trace.calls)
        if any(trace.cells[cell].position == "mut0" and trace.cells[cell].previous >= 0 for cell in call.outputs)
    ]
    return [call for call in own if weigh(apart(trace, call), trace) == Worth(0, 0)]
