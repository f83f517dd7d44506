"""Who needs what: the reference counts that say which sources an evicted cell's recipe must keep.

A cell's need is the number of pending handles on it plus the number of wanted calls that read it. A needed cell is either held
strongly or its call is wanted; a wanted call needs all its inputs. So every source lives exactly as long as something evicted
still depends on it, a replay restores every needed cell it passes, and nothing is computed twice in a backward pass.
All walks are iterative: a recurrent network makes chains far longer than Python's stack.
"""

from __future__ import annotations

from typing import Any

import torch

from memfit.engine.cell import Call, Cell


def add_need(cell: Cell, count: int = 1) -> bool:
    """Count `count` new needs on the cell. False (and nothing changed) if its content could not be brought back."""
    if cell.need or cell.storage is not None:  # the common case: counted already
        cell.need += count
        return True
    counted: list[tuple[Cell, int]] = []
    wanted: list[Call] = []
    held: list[Cell] = []
    stack = [(cell, count)]
    while stack:
        current, number = stack.pop()
        counted.append((current, number))
        current.need += number
        if current.need > number or current.storage is not None:
            continue
        if current.is_keepable and (storage := current.living_storage()) is not None:
            current.storage = storage
            held.append(current)
            continue
        call = current.call
        if call is None:
            for each, number in counted:
                each.need -= number
            for each in held:
                each.storage = None
            for call in wanted:
                call.num_wanted -= 1
            return False
        call.num_wanted += 1
        wanted.append(call)
        if call.num_wanted == 1:
            stack.extend((each, 1) for each in call.inputs)
    return True


def drop_need(cell: Cell, count: int = 1) -> None:
    """Take back `count` needs; release what nobody needs any more."""
    if cell.need > count:
        cell.need -= count
        return
    stack = [(cell, count)]
    while stack:
        current, number = stack.pop()
        current.need -= number
        if current.need > 0:
            continue
        if current.storage is not None:
            if not current.pinned:
                current.storage = None
        elif current.call is not None:
            current.call.num_wanted -= 1
            if current.call.num_wanted == 0:
                stack.extend((each, 1) for each in current.call.inputs)


def let_go(cell: Cell) -> bool:
    """Stop holding a needed cell's content: from now on it is recomputed. False (nothing changed) if that is impossible."""
    storage, cell.storage = cell.storage, None
    need, cell.need = cell.need, 0
    keep, cell.keep = cell.keep, False
    if need and not add_need(cell, need):
        cell.storage, cell.need, cell.keep = storage, need, keep
        return False
    return True


def tensors_in(result: Any) -> list[torch.Tensor]:
    """The tensors of a nested result, in a fixed order."""
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, (list, tuple)):
        return [tensor for each in result for tensor in tensors_in(each)]
    if isinstance(result, dict):
        return [tensor for each in result.values() for tensor in tensors_in(each)]
    return []
