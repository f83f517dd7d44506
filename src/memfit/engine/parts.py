"""Parts: recipes for what a call made inside and for its result, where they are cheaper than the whole call again.

a dropout's noise         from its bits, and these by another drawing; the result is the argument times the noise (packing.py)
a matrix product's copies of its arguments    by the call's beginning
a batch norm's result     from the statistics it saved, and these by the whole call (normalising.py)
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from memfit.engine import functions
from memfit.engine.cell import Call, Cell, Handle, PackedCell, Slot, Value, geometry_of
from memfit.engine.normalising import can_normalise, normalise
from memfit.engine.packing import draw, unpack

if TYPE_CHECKING:
    from memfit.engine.tape import Tape


def split(tape: Tape, call: Call, values: list[torch.Tensor], cells: list[Cell], saved: list[Handle]) -> None:
    """Give the internal ones among the cells that the call made a recipe of their own, if there is one, and the call another with them.

    values: the tensors of `call.values`. saved: the handles on what the call saved.
    """
    internal = [cell for cell in cells if cell.position.startswith("in")]
    is_dropout = functions.is_dropout(call.func)
    if not internal or (call.writes is not None and not is_dropout):
        return
    part: Call | None = None
    if is_dropout:
        part = _split_dropout(tape, call, values, internal, saved)
    elif call.stops_early:
        part = call.part()
    elif functions.is_batch_norm(call.func):
        part = _split_batch_norm(call, values, internal, saved)
    if part is None:
        return
    for cell in internal:
        del call.outputs[cell.position]
        cell.call = part
        part.outputs[cell.position] = weakref.ref(cell)
    if tape.observer is not None:
        tape.observer.on_part(part, internal)


def _split_dropout(
    tape: Tape, call: Call, values: list[torch.Tensor], internal: list[Cell], saved: list[Handle]
) -> Call | None:
    noise = internal[0]
    geometry = next((geometry_of(each.probe) for each in saved if each.cell is noise), None)
    if len(internal) != 1 or noise.device.type != "cpu" or geometry is None:
        return None
    if geometry[0] != values[0].dtype or noise.nbytes != geometry[2].numel() * geometry[0].itemsize:
        return None
    probability = functions.dropout_probability(call.args, call.kwargs)
    num_elements = geometry[2].numel()
    if probability >= 1 or num_elements != values[0].numel():  # a single zero is saved
        return None
    part = call.part()
    packed = PackedCell(tape, noise, num_elements, geometry[0])
    packed.call = again = call.part()  # where the bits are gone as well
    again.func, again.kwargs, again.values, again.inputs = draw, {}, [], ()
    again.args = (geometry[2], geometry[3], geometry[0], probability)
    again.makes, again.autocast = "bits", ()
    again.outputs[packed.position] = weakref.ref(packed)
    part.func, part.kwargs = unpack, {}
    part.args = (Slot(0), num_elements, geometry[0], probability)
    part.values, part.inputs = [Value(packed, packed.geometry, False)], (packed,)
    part.makes, part.autocast, part.random_state = "in", (), None
    call.func = torch.mul if call.writes is None else torch.Tensor.mul_
    call.args, call.kwargs = (Slot(0), Slot(1)), {}
    call.values, call.inputs = [call.values[0], Value(noise, geometry, False)], (*call.inputs, noise)
    call.random_state = None
    return part


def _split_batch_norm(call: Call, values: list[torch.Tensor], internal: list[Cell], saved: list[Handle]) -> Call | None:
    statistics = [each for each in saved if each.cell in internal]
    slots = functions.batch_norm_arguments(call.func, call.args, call.kwargs)
    given: Any = [None if slot is None else values[slot] for slot in slots]
    if len(internal) != 2 or len(statistics) != 2 or not can_normalise(*given, *(each.probe for each in statistics)):
        return None
    for cell in internal:
        cell.keep = True  # two numbers a channel, on which the rest is built
    part = call.part()
    part.makes = "inner"
    of_call = [call.values[slot] for slot in slots if slot is not None]
    call.values = of_call + [Value(each.cell, geometry_of(each.probe), False) for each in statistics]
    numbers = iter(range(len(call.values)))
    call.func, call.kwargs = normalise, {}
    call.args = tuple(None if slot is None else Slot(next(numbers)) for slot in (*slots, 0, 0))
    call.inputs = tuple(dict.fromkeys([value.cell for value in call.values]))
    return part
