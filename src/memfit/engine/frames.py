"""Frames: whether what holds a tensor at this moment of a call is dead, that is, whether anybody could read it once the call is over.

CPython counts references and does not say whose they are. Here each is accounted for: the locals of the frames on the stack (dead
where no path of the bytecode behind the call reads them again: the liveness analysis of compilers, once a function), and the fixed
number that a call in progress holds its arguments with, learnt from calls on tensors nobody else knows. That number holds for calls
written out as `f(x)`, so the bytecode must show that it is this function that the frame calls, or this tensor that an operator is
applied to: C code (NumPy's arrays of objects) calls with what it only borrowed. A count that comes out higher or lower has a holder no
frame shows, and the tensor counts as read.

Costs 1-2 us a frame; 0.2 ms a function, once. CPython 3.11 to 3.13: before, calls hold their arguments in other ways; after, they
borrow them. `find_reader` proves its own numbers before their first use and answers "unknown" where they do not hold.
Known limits: a type of an extension that has methods named as the tensor's and calls them with borrowed tensors, used as
`f(x).relu()`; readers of other frames' locals (`inspect`, debuggers).
Source: Aho, Sethi, Ullman, *Compilers*, section 10.6, on bytecode; `core.liveness` does the same on source.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from dataclasses import dataclass
from types import FrameType, ModuleType
from typing import Any

import torch
from torch.nn.functional import relu  # now: a program may put something else there
from torch.overrides import TorchFunctionMode

from memfit.engine.bytecode import NAMED, OPERATOR, called_at, live_after
from memfit.engine.private import MODULE_CALL, has_foreign_hooks

UNKNOWN = "something that no frame shows"
UNDERSTOOD = (3, 11) <= sys.version_info[:2] <= (3, 13)  # the Pythons it is written for; on others everything is UNKNOWN

_HANDLER = torch.overrides.handle_torch_function.__code__  # between a function of torch.nn.functional and a mode


def read_locals(frame: Any) -> dict[str, Any]:
    """The frame's local names, without the copy that Python before 3.13 leaves in the frame and that would keep them alive."""
    names = frame.f_locals
    copy = dict(names)
    is_function = frame.f_code.co_flags & inspect.CO_OPTIMIZED  # elsewhere f_locals is the namespace itself
    if sys.version_info < (3, 13) and is_function and sys.getrefcount(names) <= 3:  # else the program has called locals()
        names.clear()
    return copy


@dataclass(frozen=True)
class _Counts:
    """References that a call in progress holds its argument with, beside locals: a built-in function, one of torch.nn.functional,
    one more module call around it."""

    builtin: int
    functional: int
    module: int


_counts: list[_Counts | None] = []  # filled once


def find_reader(args: tuple[Any, ...], frame: FrameType | None, func: Any) -> str:
    """Who may read args[0] after the call of `func` that a function mode has just been told of: '' nobody, else in words.

    args: as the mode was given them. frame: the one that called the mode.
    The answer holds for this call only. Nothing else may hold the tensor meanwhile: the caller keeps `args` and no name for what is in it.
    """
    found = sys.getrefcount(args[0])
    counts = _counts[0] if _counts else None
    if counts is None or sys.gettrace() is not None:
        return UNKNOWN
    return _account(args, frame, func, found, counts)


def _account(args: tuple[Any, ...], frame: FrameType | None, func: Any, found: int, counts: _Counts) -> str:
    if frame is not None and frame.f_code is _HANDLER:
        left = found - counts.functional
        frame = frame.f_back
    elif frame is not None and _is_applied(frame, func, args):
        left = found - counts.builtin
    else:
        return UNKNOWN
    is_hooked = False  # whether the module call that the walk is in has gone the way its hooks make it go
    while frame is not None:
        part = MODULE_CALL.index(frame.f_code) if frame.f_code in MODULE_CALL else -1
        num_held, reader = 0, ""
        if part < 0:
            num_held, reader = _names_of(args, frame)
        elif part == 0:  # the outermost of a module call's frames
            num_held, reader = _passed_through(args, frame, counts.module if is_hooked else -1)
        if reader:
            return reader
        left -= num_held
        is_hooked = part == 2 or (part == 1 and is_hooked)
        frame = frame.f_back
    return "" if left == 0 else UNKNOWN


def _is_applied(frame: FrameType, func: Any, args: tuple[Any, ...]) -> bool:
    """Whether the frame's instruction applies the built-in `func`: by its name, as a method of args[0], or as an operator to args[0]."""
    how, names = called_at(frame.f_code, frame.f_lasti)
    if how == OPERATOR:
        known = read_locals(frame)
        return any(known.get(name) is args[0] for name in names)
    if how != NAMED or not names:
        return False
    is_method = names[-1] == func.__name__ and (names[0] == "" or _look_up(frame, names[:-1]) is args[0])
    return is_method or _look_up(frame, names) is func


def _is_called(frame: FrameType, module: Any) -> bool:
    """Whether it is the module that the frame's instruction calls."""
    how, names = called_at(frame.f_code, frame.f_lasti)
    return how == NAMED and _look_up(frame, names) is module


def _look_up(frame: FrameType, names: tuple[str, ...]) -> Any:
    """What the dotted name means in the frame, as far as modules of either kind lead; None beyond. Runs none of the program's code."""
    if not names:
        return None
    found = read_locals(frame).get(names[0], frame.f_globals.get(names[0]))
    for name in names[1:]:
        if not isinstance(found, (torch.nn.Module, ModuleType)):
            return None
        known = vars(found)
        found = known.get(name, known.get("_modules", {}).get(name) if isinstance(found, torch.nn.Module) else None)
    return found


def _names_of(args: tuple[Any, ...], frame: FrameType) -> tuple[int, str]:
    """How many of the frame's names hold args[0], and the first of them that may be read again, in words."""
    names = [name for name, value in read_locals(frame).items() if value is args[0]]
    live = [name for name in names if _is_read(frame, name)]
    code = frame.f_code
    return len(names), f"`{live[0]}` of {code.co_name}, {code.co_filename}:{frame.f_lineno}" if live else ""


def _passed_through(args: tuple[Any, ...], frame: FrameType, num_held: int) -> tuple[int, str]:
    """How many references to args[0] a module call holds, and who else may read it. num_held: where it was given args[0] in the plain
    way; -1 where it was called in another."""
    names = read_locals(frame)
    num_passed = sum(each is args[0] for each in names["args"])
    if any(each is args[0] for each in names["kwargs"].values()) or num_passed > 1:
        return 0, UNKNOWN
    if not num_passed:
        return 0, ""
    module, caller = names["self"], frame.f_back
    if has_foreign_hooks(module):
        return 0, f"a hook of {type(module).__name__}"
    is_plain = num_held >= 0 and caller is not None and _is_called(caller, module)
    return num_held, "" if is_plain else UNKNOWN


def _is_read(frame: FrameType, name: str) -> bool:
    """Whether the frame's name may be read again; names of cells and of modules may be."""
    code = frame.f_code
    is_local = code.co_flags & inspect.CO_OPTIMIZED and name in code.co_varnames and name not in code.co_cellvars
    return not is_local or name in live_after(code, frame.f_lasti)


# ---- learning and proving the numbers ------------------------------------------------------------------------------------


class _Listener(TorchFunctionMode):
    """Keeps what a mode can count of the argument of each call, and the answer `find_reader` gives with `counts`."""

    def __init__(self, counts: _Counts | None = None) -> None:
        super().__init__()
        self.found = 0
        self.answers: list[str] = []
        self._known = counts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(args[0], torch.Tensor):
            self._note(args, func)
        return func(*args, **(kwargs or {}))

    def _note(self, args: Any, func: Any) -> None:
        self.found = _count(args)
        if self._known is not None:
            self.answers.append(_account(args, sys._getframe(2), func, self.found, self._known))


def _count(args: tuple[Any, ...]) -> int:
    return sys.getrefcount(args[0])


class _Leaf(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return relu(x)


class _Level(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x)


class _Again(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return torch.relu(x), x


def learn_counts() -> None:
    """Learn, once, what calls hold their arguments with, and prove it: what is dead must come out dead, what is read as read.

    To be called with a hook before and one after every module call installed, which change how modules call.
    """
    if not _counts:
        _counts.append(_learn() if UNDERSTOOD else None)


def _learn() -> _Counts | None:
    leaf = _Leaf()
    with _Listener() as listener:
        torch.relu(torch.empty(1))
        builtin = listener.found
        relu(torch.empty(1))
        in_function = listener.found - 1  # its own local
        leaf(torch.empty(1))
        module = listener.found - in_function - 2  # relu's and forward's own
    counts = _Counts(builtin, in_function, module)
    held: list[torch.Tensor] = []
    with _Listener(counts) as listener:
        _try_dead(leaf)
        num_dead = len(listener.answers)
        _try_read(leaf, held)
    right = [answer == "" for answer in listener.answers] == [True] * num_dead + [False] * (len(listener.answers) - num_dead)
    return counts if right and num_dead == _NUM_DEAD else None


_NUM_DEAD = 8


def _try_dead(leaf: torch.nn.Module) -> None:
    levels, chain = _Level(_Level(leaf)), torch.nn.Sequential(leaf, leaf)
    x = torch.empty(1)
    x = torch.relu(x)
    x = x.relu()
    x = relu(x)  # nothing here draws: the random state is the program's
    x = x + 1
    x = leaf(x)
    x = levels(x)
    x = chain(x)
    del x


def _try_read(leaf: torch.nn.Module, held: list[torch.Tensor]) -> None:
    x = torch.empty(1)
    y = torch.relu(x)
    y = x + y
    y = leaf(x)
    held.append(x)
    x = leaf(held[0])
    x = torch.relu(held[0])
    held += [x]
    x = leaf(x)
    pair = (torch.empty(1),)
    y = leaf(*pair)
    y = torch.relu(*pair)
    y = torch.empty(1)
    y = (lambda: leaf(y))()  # a cell
    level = _Level(_Again())
    x = torch.empty(1)
    level(x)
    pair = (x,)
    del x
    both = [*list(itertools.starmap(leaf, [pair])), *list(itertools.starmap(torch.relu, [pair]))]
    del both, pair
