"""Saved tensors: the handle autograd gets in a tensor's place, and the tensor it gets back for it."""

from __future__ import annotations

import time
import weakref
from typing import TYPE_CHECKING, Any

import torch

from memfit.engine.cell import Geometry, Handle, view_of
from memfit.engine.filing import file, is_plain, unpin_all
from memfit.engine.need import drop_need
from memfit.engine.private import put_back, take_off, version_of
from memfit.engine.replaying import materialise

if TYPE_CHECKING:
    from memfit.engine.tape import Tape

_MODIFIED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: [{kind} {shape}] "
    "is at version {found}; expected version {expected} instead."
)


def pack_saved(tape: Tape, tensor: torch.Tensor) -> Any:
    tape.num_saved += 1
    call = tape.current
    number = 0
    if call is not None:
        number = call.num_saved
        call.num_saved = number + 1
    try:
        storage = tensor.untyped_storage()
    except RuntimeError:  # sparse tensors and those of torch.func have none
        return _keep(tensor)
    cell = tape.cells.get(storage._cdata)
    may_leave = cell.evict if cell is not None else call is not None
    if not (may_leave or tape.record_all or (call is not None and call.may_evict)):  # most of what is saved, under a plan
        return _keep(tensor)
    if tape.paused or not is_plain(tensor) or storage.nbytes() == 0:
        return _keep(tensor)
    if cell is None and call is not None:
        cell = file(tape, tensor)
        if tensor.dtype is not torch.uint8:  # a workspace (mkldnn's LSTM): its bytes are not all written
            cell.call = call
            cell.position = f"in{number}"
            call.outputs[cell.position] = weakref.ref(cell)
            if tape.observer is not None:
                tape.observer.on_internal(call)
    if cell is None:
        cell = file(tape, tensor)
    if call is not None and not (call.may_evict or cell.evict or tape.record_all):
        return _keep(tensor)
    handle = Handle(tape, cell, tensor)
    if call is not None:
        tape.saved_now.append(handle)
    else:
        tape.settle_handle(handle, None)
    return handle


def _keep(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """What holds its tensor to the end: the light form of a handle, an alias (see Handle) and its version."""
    alias = tensor.detach()
    return alias, alias._version


def unpack_saved(tape: Tape, handle: Any) -> torch.Tensor:
    if not tape.places.backward_seen:
        tape.places.backward_seen = True
        if not tape.pin_sources:
            unpin_all(tape)
    if type(handle) is Handle:
        if tape.observer is not None:
            tape.observer.on_unpack(handle)
        if (found := version_of(handle.probe)) != handle.version:
            raise _modified(handle.probe, found, handle.version, handle.geometry)
        if handle.alias is None:
            return _restore(tape, handle)
        handle.is_handed_out = True
        return handle.alias
    alias, version = handle
    if (found := version_of(alias)) != version:
        raise _modified(alias, found, version)
    return alias


def _restore(tape: Tape, handle: Handle) -> torch.Tensor:
    cell = handle.cell
    num_calls = 0
    start = time.perf_counter()
    tape.restoring = cell
    tape.paused += 1
    depth = take_off(tape)  # it would look at every call of the replay
    try:
        if cell.storage is None:
            num_calls = materialise(cell, tape.verify, tape.counts)
            tape.counts.num_replayed_calls += num_calls
        assert cell.storage is not None
        assert handle.geometry is not None
        handle.alias = view_of(cell.storage, handle.geometry)
    finally:
        if depth is not None:
            put_back(tape, depth)
        tape.paused -= 1
        tape.restoring = None
        tape.counts.restore_seconds += time.perf_counter() - start
    tape.counts.num_restored += 1
    tape.num_pending -= 1
    tape.counts.num_verified += cell.fingerprint is not None
    drop_need(cell)
    if tape.observer is not None:
        tape.observer.on_restored(handle, num_calls)
    return handle.alias


def _modified(tensor: torch.Tensor, found: int, expected: int, geometry: Geometry | None = None) -> RuntimeError:
    """What plain autograd raises; it checks versions only where no hooks are."""
    shape = list(geometry[2] if geometry is not None else tensor.shape)
    return RuntimeError(_MODIFIED.format(kind=tensor.type(), shape=shape, found=found, expected=expected))
