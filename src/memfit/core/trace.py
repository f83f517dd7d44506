"""Trace: everything one measured step did to memory, in order, as plain eager would have done it.

A trace is recorded raw. Who is alive when, the peak and who holds it are derived by `core.replay`. The program and
autograd hold storages independently of each other, so the two are recorded apart:

* a storage is held by the *program* (variables, modules, the backward pass itself) from its `alloc` to its `release`;
* it is held by each *handle*, the stand-in that autograd keeps for one saved tensor, from its `save` to its `drop`.

In plain eager a storage is freed at the later of `release` and its last `drop`. A plan changes only what handles hold;
therefore the trace of a step that ran under evictions is the same trace as that of a plain step.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from memfit.core.errors import TraceError
from memfit.core.fields import LARGEST, make_row

FORMAT = "memfit-trace"
VERSION = 1

KINDS = ("parameter", "buffer", "gradient", "optimizer state", "activation", "input", "temporary", "packed")
PHASES = ("forward", "loss", "backward", "optimizer step", "other")

# Operations of an event (operation, operand). The operand is an index into the table named on the right.
ALLOC = "alloc"  # storages: the storage comes to life, held by the program
RELEASE = "release"  # storages: the program lets go; autograd's handles may still hold it
SAVE = "save"  # handles: autograd saved a tensor (inside the begin/end of the saving call, if it is a recorded one)
UNPACK = "unpack"  # handles: the backward pass asked for the tensor
DROP = "drop"  # handles: autograd let go of the tensor
BEGIN = "begin"  # calls: the call starts
END = "end"  # calls: the call returned
SPIKE = "spike"  # bytes, not an index: the allocator was this far above the live storages for a moment (workspace)
PHASE = "phase"  # PHASES: from here on the step is in this phase
OPERATIONS = (ALLOC, RELEASE, SAVE, UNPACK, DROP, BEGIN, END, SPIKE, PHASE)


# A call's identity across steps: section, module path, invocation of the module, ordinal in the invocation, function.
PLACE = re.compile(r"(\d+)\|(.*)#(\d+)/(\d+):([^|]*)")


@dataclass(frozen=True)
class Storage:
    """One allocation. `kind` is one of KINDS; `module` and `location` ('file:line') say where it was made ('' unknown).

    A 'packed' storage (the bits of a dropout's noise) is never allocated by the plain step: it comes to life when a plan evicts what it
    is packed from. `persistent` storages outlive the step (parameters, buffers, optimizer state): no move may touch them.
    """

    nbytes: int
    kind: str
    module: str = ""
    location: str = ""
    persistent: bool = False


@dataclass(frozen=True)
class Cell:
    """The content of one storage between two writes: what a handle saved and what a recipe reads.

    call: index of the call that produced the content, or -1 (external: inputs, parameters, unrecorded work).
    position: where in the call it arose: 'out0' (a result), 'in2' (the third tensor autograd saved inside the call and
        nobody else sees, e.g. a dropout mask), 'mut0' (the call overwrote its tensor argument 0 in place); '' if external.
    previous: the cell whose storage this one overwrote in place, or -1.
    evictable: False where the engine cannot bring the content back (external, foreign or non-deterministic producer).
    """

    storage: int
    call: int = -1
    position: str = ""
    previous: int = -1
    evictable: bool = False


@dataclass(frozen=True)
class Handle:
    """One tensor saved by autograd. `call` is the recorded call that saved it, or -1."""

    cell: int
    call: int = -1


@dataclass(frozen=True)
class Call:
    """One recorded tensor function call: a recipe.

    place: identity of the call across steps, '<section>|<module path>#<invocation>/<ordinal>:<function>'.
    seconds: what a replay takes: measured time of the call in forward, or of a part, and what the tape adds to it.
    inputs: cells the call reads, external ones included, without repeats, in argument order.
    outputs: cells it produced, internal ('in…') and overwritten ('mut…') ones included.
    extra_bytes: bytes the call needs above the storages live before it and its own outputs, at its worst moment.
    in_place: whether the call, seen as it was about to run, could have written its result over its first input: core.inplace.SAFE, or
        why not; '' where it has no such form.
    """

    place: str
    function: str
    module: str
    location: str
    seconds: float
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    extra_bytes: int = 0
    in_place: str = ""


@dataclass(frozen=True)
class Trace:
    """The measured step. Tables are referred to by index; `events` are (operation, operand) in order of time.

    device: 'cpu' or 'cuda'. step_seconds: measured seconds of the whole step, less what measuring cost.
    meta: versions, program name, and how the peak was read.
    """

    device: str
    storages: tuple[Storage, ...]
    cells: tuple[Cell, ...]
    handles: tuple[Handle, ...]
    calls: tuple[Call, ...]
    events: tuple[tuple[str, int], ...]
    step_seconds: float = 0.0
    meta: dict[str, Any] = field(default_factory=dict)

    def save(self, path: str | Path) -> None:
        """Write the trace as JSON."""
        data = {"format": FORMAT, "version": VERSION, "device": self.device, "step_seconds": self.step_seconds}
        data["meta"] = self.meta
        for name in ("storages", "cells", "handles", "calls"):
            rows = [asdict(row) for row in getattr(self, name)]
            columns = list(rows[0]) if rows else []
            data[name] = {"columns": columns, "rows": [[row[c] for c in columns] for row in rows]}
        data["events"] = [[OPERATIONS.index(operation), operand] for operation, operand in self.events]
        Path(path).write_text(json.dumps(data, separators=(",", ":")) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read a trace written by `save`. Raises TraceError for a missing, broken, foreign or newer file."""
        data = load_json(path, FORMAT, VERSION, TraceError, "Take it again with `memfit trace SCRIPT -o trace.json`.")
        try:
            tables: dict[str, Any] = {
                name: tuple(
                    make_row(row_class, dict(zip(data[name]["columns"], row, strict=True))) for row in data[name]["rows"]
                )
                for name, row_class in _TABLES.items()
            }
            events = tuple((OPERATIONS[_index(operation, len(OPERATIONS))], operand) for operation, operand in data["events"])
            plain = make_row(_Plain, {name: data[name] for name in ("device", "step_seconds", "meta")})
            trace = cls(**tables, events=events, device=plain.device, step_seconds=plain.step_seconds, meta=plain.meta)
            _check(trace)
            return trace
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise TraceError(
                f"{path} is a damaged trace: {type(error).__name__} {error} while reading it. "
                "Take it again with `memfit trace SCRIPT -o trace.json`."
            ) from error


def load_json(path: str | Path, name: str, version: int, error_class: type[Exception], remedy: str) -> dict[str, Any]:
    """The JSON object of a memfit file of format `name`; `error_class` with a whole sentence if it is not one."""
    try:
        data = json.loads(Path(path).read_text())
    except OSError as error:
        raise error_class(f"{path} cannot be read: {error.strerror or error}. {remedy}") from error
    except (ValueError, RecursionError) as error:
        raise error_class(f"{path} is not JSON ({error}), so it is no {name} file. {remedy}") from error
    found = data.get("format") if isinstance(data, dict) else None
    if found != name:
        raise error_class(f"{path} is no {name} file: its format is {found!r}. {remedy}")
    if data.get("version") != version:
        raise error_class(
            f"{path} has version {data.get('version')!r} of {name}; this memfit reads version {version}. {remedy}"
        )
    return data


_TABLES = {"storages": Storage, "cells": Cell, "handles": Handle, "calls": Call}


@dataclass(frozen=True)
class _Plain:
    """What a trace holds beside its tables."""

    device: str
    step_seconds: float
    meta: dict[str, Any]


def _check(trace: Trace) -> None:
    """Every reference leads to a row, and what is made of something comes after it. Raises ValueError naming the row."""
    num = {name: len(getattr(trace, name)) for name in _TABLES}
    for index, storage in enumerate(trace.storages):
        if storage.nbytes < 0 or storage.kind not in KINDS:
            raise ValueError(f"storage {index} has {storage.nbytes} bytes of kind {storage.kind!r}")
    for index, cell in enumerate(trace.cells):
        _index(cell.storage, num["storages"])
        _index(cell.call, num["calls"], none=True)
        _index(cell.previous, index, none=True)
    for handle in trace.handles:
        _index(handle.cell, num["cells"])
        _index(handle.call, num["calls"], none=True)
    for index, call in enumerate(trace.calls):
        if not PLACE.fullmatch(call.place):
            raise ValueError(f"call {index} has the place {call.place!r:.80}")
        for number in call.inputs:
            _index(trace.cells[_index(number, num["cells"])].call, index, none=True)
        for number in call.outputs:
            if trace.cells[_index(number, num["cells"])].call != index:
                raise ValueError(f"call {index} has the output {number}, which is not its own")
        if call.seconds < 0 or call.extra_bytes < 0:
            raise ValueError(f"call {index} takes {call.seconds} seconds and {call.extra_bytes} extra bytes")
    limits = {SPIKE: LARGEST, PHASE: len(PHASES), BEGIN: num["calls"], END: num["calls"]}
    limits |= dict.fromkeys((ALLOC, RELEASE), num["storages"]) | dict.fromkeys((SAVE, UNPACK, DROP), num["handles"])
    for operation, operand in trace.events:
        _index(operand, limits[operation])


def _index(value: Any, limit: int, none: bool = False) -> int:
    """The value, if it is an index below the limit, or -1 where that is allowed. Raises ValueError if not."""
    if type(value) is not int or not (-1 if none else 0) <= value < limit:
        raise ValueError(f"{value!r:.50} where an index below {limit} stands")
    return value
