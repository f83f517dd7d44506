"""Frames: whether what holds a tensor at this moment of a call is dead, that is, whether anybody could read it once the call is over.

CPython counts references and does not say whose they are. Here each is accounted for: the locals of the frames on the stack (dead
where no path of the bytecode behind the call reads them again: the liveness analysis of compilers, once a function), and the fixed
number that a call in progress holds its arguments with, learnt from calls on tensors nobody else knows. A count that comes out
higher or lower has a holder no frame shows, and the tensor counts as read.

Costs 1-2 us a frame; 0.2 ms a function, once. CPython 3.11 to 3.13: before, calls hold their arguments in other ways; after, they
borrow them. `find_reader` proves its own numbers before their first use and answers "unknown" where they do not hold.
Known limits: C code that calls back with an argument it only borrowed; readers of other frames' locals (`inspect`, debuggers).
Source: Aho, Sethi, Ullman, *Compilers*, section 10.6, on bytecode; `core.liveness` does the same on source.
"""

from __future__ import annotations

import bisect
import dis
import inspect
import re
import sys
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from memfit.engine.private import MODULE_CALL, has_foreign_hooks

UNKNOWN = "something that no frame shows"

_HANDLER = torch.overrides.handle_torch_function.__code__  # between a function of torch.nn.functional and a mode
_FAST = re.compile(r"(LOAD|STORE|DELETE)_FAST")
_NO_NEXT = ("RETURN_", "RAISE_", "RERAISE", "JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_ABSOLUTE", "INTERPRETER_EXIT")
_READS_LOCALS = frozenset({"locals", "eval", "exec", "vars", "dir", "_getframe", "currentframe", "stack"})
_analysed: dict[
    int, tuple[CodeType, list[int], list[frozenset[str]], list[str]]
] = {}  # by id; the code is kept, or ids would return


def read_locals(frame: Any) -> dict[str, Any]:
    """The frame's local names, without the copy that Python before 3.13 leaves in the frame and that would keep them alive."""
    names = frame.f_locals
    copy = dict(names)
    is_function = frame.f_code.co_flags & inspect.CO_OPTIMIZED  # elsewhere f_locals is the namespace itself
    if sys.version_info < (3, 13) and is_function and sys.getrefcount(names) <= 3:  # else the program has called locals()
        names.clear()
    return copy


def live_after(code: CodeType, offset: int) -> frozenset[str]:
    """Local names that may be read after the instruction at `offset` (a call in progress) has returned or raised.

    Not among them are cell variables, which others may read at any time.
    """
    offsets, live, _ = _analyse(code)
    return live[max(bisect.bisect_right(offsets, offset) - 1, 0)]


def operation_at(code: CodeType, offset: int) -> str:
    """The name of the instruction at `offset`, its keyword names left out of account: 'CALL', 'CALL with keywords', 'BINARY_OP'."""
    offsets, _, operations = _analyse(code)
    return operations[max(bisect.bisect_right(offsets, offset) - 1, 0)]


def _analyse(code: CodeType) -> tuple[list[int], list[frozenset[str]], list[str]]:
    known = _analysed.get(id(code))
    if known is None:
        known = _analysed[id(code)] = (code, *_find_live(code))
    return known[1:]


def _find_live(code: CodeType) -> tuple[list[int], list[frozenset[str]], list[str]]:
    """Backward over the instructions until nothing changes. An exception may leave any instruction for its handler."""
    bytecode: Any = dis.Bytecode(code)
    instructions = list(bytecode)
    offsets = [each.offset for each in instructions]
    place = {offset: index for index, offset in enumerate(offsets)}
    handlers: list[int] = [-1] * len(instructions)
    for entry in reversed(bytecode.exception_entries):  # the first that covers an instruction is its handler
        for index in range(bisect.bisect_left(offsets, entry.start), bisect.bisect_left(offsets, entry.end)):
            handlers[index] = place[entry.target]
    effects = [_effects(each) for each in instructions]
    before: list[frozenset[str]] = [frozenset()] * (len(instructions) + 1)
    after = list(before)
    is_changed = True
    while is_changed:
        is_changed = False
        for index in range(len(instructions) - 1, -1, -1):
            each = instructions[index]
            live = frozenset() if each.opname.startswith(_NO_NEXT) else before[index + 1]
            if each.opcode in dis.hasjrel or each.opcode in dis.hasjabs:
                live |= before[place[each.argval]]
            if handlers[index] >= 0:
                live |= before[handlers[index]]
            after[index] = live
            for kind, name in reversed(effects[index]):
                live = live | {name} if kind == "LOAD" else live - {name}
            if handlers[index] >= 0:
                live |= before[handlers[index]]
            if live != before[index]:
                before[index], is_changed = live, True
    if _READS_LOCALS.intersection(code.co_names):
        after = [frozenset(code.co_varnames)] * len(after)
    operations, keywords = [], ""
    for each in instructions:
        operations.append(each.opname + (keywords if each.opname == "CALL" else ""))
        keywords = " with keywords" if each.opname == "KW_NAMES" else keywords if each.opname == "PRECALL" else ""
    return offsets, after[:-1], operations


def _effects(instruction: dis.Instruction) -> list[tuple[str, str]]:
    """What the instruction does to local names, in order: one of LOAD, STORE, DELETE and the name."""
    kinds = _FAST.findall(instruction.opname)
    names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,) * len(kinds)
    return list(zip(kinds, names, strict=False))


@dataclass(frozen=True)
class _Counts:
    """References that a call in progress holds its argument with, beside locals: a built-in function, one of torch.nn.functional,
    one more module call around it."""

    builtin: int
    functional: int
    module: int


_counts: list[_Counts | None] = []  # filled once


def find_reader(args: tuple[Any, ...], frame: FrameType | None) -> str:
    """Who may read args[0] after the call that a function mode has just been told of: '' nobody, else in words.

    args: as the mode was given them. frame: the one that called the mode. The answer holds for this call only. Nothing else may
    hold the tensor meanwhile: the caller keeps `args` and no name for what is in it.
    """
    found = sys.getrefcount(args[0])
    counts = _counts[0] if _counts else None
    if counts is None or sys.gettrace() is not None:
        return UNKNOWN
    return _account(args, frame, found, counts)


def _account(args: tuple[Any, ...], frame: FrameType | None, found: int, counts: _Counts) -> str:
    if frame is not None and frame.f_code is _HANDLER:
        left = found - counts.functional
        frame = frame.f_back
    elif frame is not None and operation_at(frame.f_code, frame.f_lasti) in ("CALL", "BINARY_OP"):
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
            num_held, reader = _passed_through(args, frame, counts.module, is_hooked=is_hooked)
        if reader:
            return reader
        left -= num_held
        if left <= 0:
            return "" if left == 0 else UNKNOWN
        is_hooked = part == 2 or (part == 1 and is_hooked)
        frame = frame.f_back
    return UNKNOWN


def _names_of(args: tuple[Any, ...], frame: FrameType) -> tuple[int, str]:
    """How many of the frame's names hold args[0], and the first of them that may be read again, in words."""
    names = [name for name, value in read_locals(frame).items() if value is args[0]]
    live = [name for name in names if _is_read(frame, name)]
    code = frame.f_code
    return len(names), f"`{live[0]}` of {code.co_name}, {code.co_filename}:{frame.f_lineno}" if live else ""


def _passed_through(args: tuple[Any, ...], frame: FrameType, num_held: int, *, is_hooked: bool) -> tuple[int, str]:
    """How many references to args[0] a module call holds (`num_held` where it was given it in the plain way), and who else may read it."""
    names = read_locals(frame)
    num_passed = sum(each is args[0] for each in names["args"])
    if any(each is args[0] for each in names["kwargs"].values()) or num_passed > 1:
        return 0, UNKNOWN
    if not num_passed:
        return 0, ""
    if has_foreign_hooks(names["self"]):
        return 0, f"a hook of {type(names['self']).__name__}"
    caller = frame.f_back
    is_plain = is_hooked and caller is not None and operation_at(caller.f_code, caller.f_lasti) == "CALL"
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
            self._note(args)
        return func(*args, **(kwargs or {}))

    def _note(self, args: Any) -> None:
        self.found = _count(args)
        if self._known is not None:
            self.answers.append(_account(args, sys._getframe(2), self.found, self._known))


def _count(args: tuple[Any, ...]) -> int:
    return sys.getrefcount(args[0])


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
        _counts.append(_learn() if (3, 11) <= sys.version_info[:2] <= (3, 13) else None)


def _learn() -> _Counts | None:
    leaf, functional = torch.nn.ReLU(), torch.nn.functional
    with _Listener() as listener:
        torch.relu(torch.empty(1))
        builtin = listener.found
        functional.relu(torch.empty(1))
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
    x = torch.empty(1)
    x = torch.relu(x)
    x = x.relu()
    x = torch.nn.functional.leaky_relu(x, 0.5)  # nothing that draws: the program has its own random state
    x = x + 1
    x = leaf(x)
    x = _Level(_Level(leaf))(x)
    x = torch.nn.Sequential(leaf, leaf)(x)
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
    x = torch.empty(1)
    _Level(_Again())(x)
