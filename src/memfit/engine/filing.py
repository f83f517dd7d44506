"""Which cell a tensor's storage holds now, and which cells are pinned: held whether something evicted needs them or not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from memfit.engine.cell import Cell, StorageRef, probe_of
from memfit.engine.need import let_go
from memfit.engine.private import num_holders, transform_level

if TYPE_CHECKING:
    from memfit.engine.tape import Tape

PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})
_PLAIN_DTYPES = frozenset(
    getattr(torch, name)
    for name in ["float32", "float16", "bfloat16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool"]
)
_SMALL_SOURCE_BYTES = 16 << 20


def unpin_all(tape: Tape) -> None:
    for cell in tape.pins:
        tape.unpin(cell)
    tape.pins.clear()


def unpin_dead(tape: Tape) -> None:
    """Another forward pass begins: let go of what was pinned for a graph that died without a backward pass."""
    kept = []
    for cell, num_references in zip(tape.pins, _count_references(tape.pins), strict=True):
        is_filed = tape.cells.get(cell.ref.key) is cell
        is_alive = cell.storage is not None and num_holders(cell.storage) > 0  # the program may still read it
        if cell.need or is_alive or num_references > _UNREAD_REFERENCES + is_filed:
            kept.append(cell)
        else:
            tape.unpin(cell)
    tape.pins = kept


def pin_source(tape: Tape, cell: Cell, tensor: torch.Tensor) -> bool:
    """Make what a recipe reads from outside fit to be a source. False: it must be none.

    A probe notices writes nobody told the tape of. It is pinned only where anything may be evicted later; under a plan, what is
    needed is held from the eviction on, and the rest would be held for nothing.

    Memory that is not PyTorch's own (numpy arrays, shared memory) can change without any trace: a copy is pinned if it is small.
    """
    if not cell.pinned and cell.call is None and (cell.exposed or not tensor.untyped_storage().resizable()):
        if cell.nbytes > _SMALL_SOURCE_BYTES:
            return False
        tape.paused += 1
        cell.storage = tensor.untyped_storage().clone()
        tape.paused -= 1
        cell.pinned = True
        tape.pins.append(cell)
        return True
    if tape.pin_sources:
        tape.pin(cell)
    if cell.probe is None and cell.call is None:
        cell.probe = probe_of(tensor)
        cell.probe_version = tensor._version
    return True


def file(tape: Tape, tensor: torch.Tensor) -> Cell:
    """A new cell for the tensor's storage, filed under it; external until somebody adopts it."""
    storage = tensor.untyped_storage()
    ref = StorageRef(storage, tape.on_storage_death)
    ref.key = storage._cdata
    cell = Cell(ref, storage.nbytes(), tensor.device, tensor._version)
    tape.cells[ref.key] = cell
    return cell


def forget_dead(cells: dict[int, Cell]) -> Callable[[Any], None]:
    """What the reference to a storage calls when it dies: its cell leaves the table, if it is still filed there."""

    def forget(ref: Any) -> None:
        cell = cells.get(ref.key)
        if cell is not None and cell.ref is ref:
            del cells[ref.key]

    return forget


def cell_if_known(tape: Tape, tensor: torch.Tensor) -> Cell | None:
    if not is_plain(tensor):
        return None
    return tape.cells.get(tensor.untyped_storage()._cdata)


def cell_of(tape: Tape, tensor: torch.Tensor) -> Cell:
    """The cell of the tensor's storage; unknown or unaccountably changed content is a new external cell."""
    cell = tape.cells.get(tensor.untyped_storage()._cdata)
    if cell is None:
        return file(tape, tensor)
    if cell.version != tensor._version and (cell.call is None or tensor._version != 0):
        if cell.call is None and cell.storage is None and cell.need == 0:
            cell.version = tensor._version
            cell.probe = None
            return cell
        if cell.call is None or cell.version < tensor._version:
            lose(tape, cell)
            return file(tape, tensor)
    return cell


def lose(tape: Tape, cell: Cell) -> None:
    """Content the tape held was overwritten unseen: go back to its recipe. Without one, restoring will raise."""
    cell.written = True
    if cell.storage is None:
        return
    cell.pinned = False
    if not let_go(cell):
        cell.storage = None
        cell.call = None


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is a tensor whose bytes are its own and may be kept, dropped and had again."""
    return (
        type(tensor) in PLAIN_TYPES
        and tensor.layout is torch.strided
        and tensor.dtype in _PLAIN_DTYPES
        and not tensor.is_neg()
        and transform_level(tensor) == -1
    )


def _count_references(cells: list[Cell]) -> list[int]:
    """References to each cell: the list's own, what counting takes, and those of handles, recipes and whoever else knows it."""
    return [sys.getrefcount(cell) for cell in cells]


_UNREAD_REFERENCES = _count_references([Cell(None, 0, torch.device("cpu"), 0)])[0]  # type: ignore[arg-type]
