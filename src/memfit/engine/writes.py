"""What is overwritten: before a write, content the tape holds for somebody is copied; after it, the storage holds a new cell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from memfit.engine import functions
from memfit.engine.cell import Cell, view_of
from memfit.engine.filing import PLAIN_TYPES, cell_if_known, file, lose
from memfit.engine.need import drop_need, let_go, tensors_in

if TYPE_CHECKING:
    from memfit.engine.tape import Tape


def run_writing(tape: Tape, func: Any, args: Any, kwargs: Any) -> Any:
    """Run a call that is not recorded but may overwrite content others depend on."""
    if not kwargs and not _knows_any(tape, args):  # an optimizer's arithmetic on its state
        return func(*args)
    statistics = functions.written_statistics(func, args, kwargs)
    certain = functions.written_lists(func, args)
    known = [(t, t._version) for t in tensors_in((args, kwargs)) if cell_if_known(tape, t) is not None]
    target = args[0] if args and "out" not in kwargs and functions.writes_first_only(func) else None
    cells = [before_write(tape, tensor) if target is None or tensor is target else None for tensor, _ in known]
    result = func(*args, **kwargs)
    for (tensor, version), cell in zip(known, cells, strict=True):
        if tensor._version != version or any(tensor is each for each in (*statistics, *certain)):
            forget(tape, tensor)
        elif cell is not None:
            cell.written = False
    return result


def _knows_any(tape: Tape, args: tuple[Any, ...]) -> bool:
    """Whether an argument's storage may be a cell's: quick, and True where it is not simple to say."""
    for each in args:
        if isinstance(each, torch.Tensor):
            if type(each) not in PLAIN_TYPES or each.layout is not torch.strided or each.untyped_storage()._cdata in tape.cells:
                return True
        elif isinstance(each, (list, tuple)):
            return True
    return False


def before_write(tape: Tape, tensor: torch.Tensor) -> Cell | None:
    """The tensor's storage is about to be overwritten: if the tape holds its content for somebody, hold a copy instead.

    From here on nothing may take hold of the storage as this content (the guard may evict while the call runs), so the
    cell counts as written; where the call turns out not to write, say so with `cell.written = False`.
    """
    cell = cell_if_known(tape, tensor)
    if cell is None or cell.written:
        return None
    if cell.storage is not None and cell.call is not None and tape.pin_sources:  # the guard is short of bytes, not of time
        cell.pinned = cell.keep = False
        if cell.need == 0:
            cell.storage = None
        else:
            let_go(cell)
    if cell.storage is not None and (cell.need > 0 or cell.pinned):
        tape.paused += 1
        cell.storage = cell.storage.clone()
        cell.probe = None  # the copy is ours alone
        tape.paused -= 1
    cell.written = True
    return cell


def follow_alien_write(tape: Tape, cell: Cell) -> None:
    """The cell was overwritten. Autograd checks the version counter of each tensor it saved; where the write moved another counter
    (through `.data`, or an array's) it will read what is there now. So what was evicted must hold what is there now."""
    storage = cell.ref()
    for ref in cell.pending:
        handle = ref()
        if handle is None or handle.alias is not None or handle.probe._version != handle.version or storage is None:
            continue
        assert handle.geometry is not None
        tape.paused += 1
        handle.alias = view_of(storage, handle.geometry)
        tape.paused -= 1
        tape.counts.num_kept_instead += 1
        tape.num_pending -= 1
        drop_need(cell)
    cell.pending = ()


def let_out(tape: Tape, tensor: torch.Tensor) -> None:
    """The program gets at the tensor's memory (`.numpy()`), and may write there unseen: nothing in it is a recipe's from now on."""
    cell = cell_if_known(tape, tensor)
    if cell is None:
        return
    before_write(tape, tensor)
    follow_alien_write(tape, cell)
    forget(tape, tensor)
    tape.cells[cell.ref.key].exposed = True


def forget(tape: Tape, tensor: torch.Tensor) -> None:
    """The tensor's storage was overwritten by a call that is no recipe: its content is external from now on."""
    cell = cell_if_known(tape, tensor)
    if cell is not None:
        if cell.pending:
            follow_alien_write(tape, cell)
        living = cell.ref()
        if cell.storage is not None and living is not None and cell.storage._cdata == living._cdata:
            lose(tape, cell)
        cell.written = True
        file(tape, tensor)
