"""Recording: a tensor function call, run once, becomes a recipe for what it made, what it saved inside and what it overwrote."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Mapping
from functools import cache
from types import FrameType, MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from memfit.core.inplace import SAFE
from memfit.engine import functions
from memfit.engine.ambient import attention_flags, autocast_state, random_state
from memfit.engine.cell import Call, Cell, Handle, Slot, Value, geometry_of
from memfit.engine.filing import PLAIN_TYPES, cell_if_known, cell_of, file, is_plain, pin_source
from memfit.engine.location import user_line
from memfit.engine.need import tensors_in
from memfit.engine.overwriting import Form, in_place_form, why_not
from memfit.engine.parts import split
from memfit.engine.policy import CallPolicy
from memfit.engine.traits import TRAITS
from memfit.engine.writes import before_write, follow_alien_write, forget

_SCALARS = frozenset({int, float, bool, type(None), str, torch.dtype, torch.Size})
_NONE: Mapping[str, Any] = MappingProxyType({})

if TYPE_CHECKING:
    from memfit.engine.places import Frame
    from memfit.engine.tape import Tape


def record(tape: Tape, func: Any, types: Any, args: Any, kwargs: Any, frame: Frame, entry: CallPolicy | None) -> Any:
    traits = TRAITS[func]
    if entry is not None and entry.function != traits.name:
        entry = None  # the program took another way this time: nothing planned here
    at = (tape.places.section, frame.path, frame.invocation, frame.ordinal, traits.name)
    is_measured = tape.observer is not None
    in_place, is_overwriting = "", False
    if is_measured or (entry is not None and entry.in_place):
        in_place, form = _look_at_input(tape, func, args, kwargs, sys._getframe(2))
        if form is not None and entry is not None and entry.in_place:
            if is_overwriting := in_place == SAFE:
                func, args, kwargs = form
                traits = TRAITS[func]
                tape.counts.num_overwritten += 1
            else:
                entry = entry.out_of_place()
                tape.counts.num_not_overwritten += 1
    values: list[torch.Tensor] = []
    template = tuple([each if each.__class__ in _SCALARS else _strip(each, values) for each in args])
    keywords = {key: _strip(each, values) for key, each in kwargs.items()} if kwargs else kwargs
    tape.seq += 1
    call = Call(func, at, user_line(3) if is_measured else "", tape.seq)
    if in_place:
        call.in_place, call.is_overwriting = in_place, is_overwriting
    call.may_evict = entry is None or bool(entry.evict) or traits.draws or traits.has_statistics  # recipes read what they save
    is_recipe = (
        traits.is_repeatable
        and not traits.writes_lists
        and (not types or PLAIN_TYPES.issuperset(types))
        and (not kwargs or ("out" not in kwargs and kwargs.get("generator") is None))
    )
    for tensor in values:
        is_recipe = is_recipe and is_plain(tensor)
    versions = [tensor._version for tensor in values]
    if is_recipe:
        call.args, call.kwargs = template, keywords
        call.values = [Value(cell_of(tape, t), geometry_of(t), t.requires_grad) for t in values]
        if traits.has_statistics:
            is_recipe = _note_statistics(tape, call, values, functions.written_statistics(func, args, kwargs))
        call.autocast = autocast_state()
        if traits.reads_attention_flags:
            call.attention_flags = attention_flags()
        if not traits.is_reproducible_on_cuda and any(t.is_cuda for t in values):
            is_recipe = is_recipe and torch.are_deterministic_algorithms_enabled()
        if entry is not None or tape.pin_sources:
            for tensor, value in zip(values, call.values, strict=True):
                if value.cell.call is None and not value.scratch:
                    is_recipe = pin_source(tape, value.cell, tensor) and is_recipe
    maybe_written: list[tuple[int, Cell | None]] = []
    if (kwargs or not traits.is_plain) and functions.may_write(func, args, kwargs):
        targets = values[:1] if is_recipe else values
        maybe_written = [(index, before_write(tape, tensor)) for index, tensor in enumerate(targets)]
    if traits.draws:
        devices = tuple({t.device.index for t in values if t.is_cuda})
        tape.paused += 1
        state = random_state(devices)
        tape.paused -= 1
    outer_call, tape.current = tape.current, call
    outer_saved, tape.saved_now = tape.saved_now, []
    if tape.observer is not None:
        tape.observer.on_begin(call)
    try:
        result = func(*args, **kwargs)
    except BaseException:
        if tape.observer is not None:
            tape.observer.on_failed(call)
        raise
    finally:
        tape.current = outer_call
        saved, tape.saved_now = tape.saved_now, outer_saved
    if traits.draws:
        tape.paused += 1
        if functions.is_dropout(func) or state != random_state(devices):
            call.random_state = state
        tape.paused -= 1
    call.stops_early = (traits.stops_early or bool(call.autocast)) and call.random_state is None
    for index, cell in maybe_written:
        if cell is not None and values[index]._version == versions[index]:
            cell.written = False
    is_recipe = _settle_writes(tape, call, values, versions, is_recipe)
    cells = _settle_results(tape, call, values, result, is_recipe, entry, saved)
    if tape.observer is not None:
        tape.observer.on_end(call, cells)
    for handle in saved:
        tape.settle_handle(handle, call)
    return result


def _look_at_input(tape: Tape, func: Any, args: Any, kwargs: Any, caller: FrameType) -> tuple[str, Form | None]:
    """Whether the call may write its result over its first argument (see core.trace.Call.in_place), and the call that does; '' and None
    where there is none."""
    form = in_place_form(func, args, kwargs)
    if form is None:
        return "", None
    return why_not((func, args, kwargs), cell_if_known(tape, args[0]), caller), form


def _note_statistics(tape: Tape, call: Call, values: list[torch.Tensor], statistics: tuple[torch.Tensor, ...]) -> bool:
    """Mark the values that the call overwrites and does not read. False where it cannot be had again for all that."""
    for tensor, value in zip(values, call.values, strict=True):
        if any(tensor is each for each in statistics):
            value.scratch = True
            before_write(tape, tensor)
    return not (statistics and functions.saves_statistics(call.func))


def _settle_writes(tape: Tape, call: Call, values: list[torch.Tensor], versions: list[int], is_recipe: bool) -> bool:
    """Find what the call overwrote: argument 0 gets a successor cell; anything else but statistics is no recipe."""
    written = [index for index, tensor in enumerate(values) if tensor._version != versions[index]]
    if is_recipe and not written and not TRAITS[call.func].has_statistics:
        call.inputs = tuple(dict.fromkeys([value.cell for value in call.values]))
        return True
    for tensor, value in zip(values, call.values, strict=False):
        if value.scratch:
            forget(tape, tensor)
    if not is_recipe:
        certain = functions.written_lists(call.func, (values,))
        for index, tensor in enumerate(values):
            if index in written or any(tensor is each for each in certain):
                forget(tape, tensor)
        return False
    for index in written:
        if call.values[index].scratch:
            continue
        if index == 0:
            call.writes = 0
        else:
            is_recipe = False
    if not is_recipe:
        for index in written:
            forget(tape, values[index])
        call.writes = None
    call.inputs = tuple(dict.fromkeys([value.cell for value in call.values if not value.scratch]))
    has_parts = call.is_overwriting or functions.is_dropout(call.func)  # its result goes on as content of its own all the same
    if call.writes is not None and not has_parts and not _is_restorable(call.values[0].cell):
        forget(tape, values[0])
        call.writes = None
        return False
    return is_recipe


def _is_restorable(cell: Cell) -> bool:
    """Whether overwritten content can be had again: by its own recipe, or because the tape holds a copy."""
    return cell.call is not None or cell.storage is not None


def _settle_results(
    tape: Tape,
    call: Call,
    values: list[torch.Tensor],
    result: Any,
    is_recipe: bool,
    entry: CallPolicy | None,
    saved: list[Handle],
) -> list[Cell]:
    """Cells for what the call made: an overwritten argument, internal tensors seen by the hooks, results."""
    cells: list[Cell] = [each for ref in call.outputs.values() if (each := ref()) is not None] if call.outputs else []
    has_internal = bool(cells)
    if call.writes is not None:
        old = call.values[call.writes].cell
        old.written = True
        if old.pending:
            follow_alien_write(tape, old)
        new = Cell(old.ref, old.nbytes, old.device, 0)
        new.previous = old
        new.exposed = old.exposed
        new.keep = not _is_restorable(old)
        tape.cells[old.ref.key] = new
        _adopt(new, call, "mut0", cells)
    for number, tensor in enumerate(tensors_in(result)):
        if not is_plain(tensor):
            continue
        known = tape.cells.get(tensor.untyped_storage()._cdata)
        if known is None:
            _adopt(file(tape, tensor), call, f"out{number}" if number else "out0", cells)
        elif known.call is call and known.position.startswith("in"):
            del call.outputs[known.position]
            known.position = f"out{number}"
            known.version = tensor._version
            call.outputs[known.position] = weakref.ref(known)
        elif known.call is call and known.position == "mut0":
            known.version = tensor._version
    if not is_recipe:
        for cell in cells:
            cell.call = None
        call.outputs.clear()
        if entry is not None and "mut0" in entry.pin and (written := cell_if_known(tape, values[0])) is not None:
            tape.pin(written)  # content from outside, overwritten: what the plan keeps is the result
        return cells
    if has_internal:
        split(tape, call, values, cells, saved)
    if entry is not None and entry.is_replayed:
        for cell in cells:
            position = cell.position
            if position in entry.transient:
                cell.transient = True
            if position in entry.evict:
                cell.evict, cell.keep = True, False
            if position in entry.pin:
                cell.keep = True
                tape.pin(cell)
            elif position in entry.keep:
                cell.keep = True
    elif tape.places.policy is not None:
        for cell in cells:
            cell.keep = True
    return cells


def _adopt(cell: Cell, call: Call, position: str, cells: list[Cell]) -> None:
    cell.call = call
    cell.position = position
    call.outputs[position] = weakref.ref(cell)
    cells.append(cell)


def needs_gradient(args: Iterable[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether any tensor in the nested arguments requires a gradient."""
    for each in args:
        if isinstance(each, torch.Tensor):
            if each.requires_grad:
                return True
        elif (isinstance(each, (list, tuple)) and needs_gradient(each, _NONE)) or (
            isinstance(each, dict) and needs_gradient(each.values(), _NONE)
        ):
            return True
    return bool(kwargs) and needs_gradient(kwargs.values(), _NONE)


_slot = cache(Slot)


def _strip(argument: Any, values: list[torch.Tensor]) -> Any:
    """The argument with every tensor replaced by a Slot; containers are copied, so later changes to them do no harm."""
    if isinstance(argument, torch.Tensor):
        for index, value in enumerate(values):
            if value is argument:  # functions ask `key is query`: one tensor stays one tensor
                return _slot(index)
        values.append(argument)
        return _slot(len(values) - 1)
    kind = type(argument)
    if kind in (list, tuple):
        return kind(_strip(each, values) for each in argument)
    if kind is dict:
        return {key: _strip(each, values) for key, each in argument.items()}
    return argument
