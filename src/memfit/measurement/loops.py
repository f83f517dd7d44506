"""Which loops of the program go around, told from where its tensor operations come from.

At every operation the frames above it are looked at, from the program's outermost down to the first module call. A frame that is now
at an earlier instruction than before, or makes the same call anew, has gone around a loop; which one is read from its bytecode. So
steps are found in programs without an optimizer too, and nothing is traced (`sys.settrace` stays free). Cost: 3-5 us an operation.

A frame cannot be weakly referenced and its address is used again after it ends, so it is given a `Token` to carry, in `f_trace`:
an attribute every frame has, which Python reads only while a trace function is set. A frame that carries another's (a debugger's) is
left alone, and its loops are not seen. Loops inside a module's forward, inside PyTorch and inside memfit are no steps, and left out.

Known limits: a loop whose body is one C call without a Python frame (`map` in C) is not seen; one thread is watched.
"""

from __future__ import annotations

import dis
import inspect
import os
import weakref
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch

NOTHING, MODULE, BACKWARD, OPTIMIZER = range(4)  # what happens in a loop's iterations, by how much it says that they are steps

_TORCH = os.path.join(os.path.dirname(os.path.abspath(torch.__file__)), "")
_OURS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class Token:
    """What a watched frame carries. It knows where the frame was at the last operation.

    offset, key, child: the instruction, what ran from there first (a code or an operator), and the called frame's token.
    tracer: while set, gets the frame's trace events (see `watchpoint`); a token is the frame's trace function, too.
    """

    __slots__ = ("child", "key", "loops", "offset")
    tracer: Callable[[FrameType, str, Any], None] | None = None

    def __init__(self) -> None:
        self.offset = -1
        self.key: Any = None
        self.child: Any = None
        self.loops: list[Loop] = []  # active ones, outermost first

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Token:
        if Token.tracer is not None:
            Token.tracer(frame, event, argument)
        return self


class Loop:
    """A loop of one running frame, from when it was entered.

    iteration: the one that runs now, from 0. marked: in how many iterations each of MODULE, BACKWARD, OPTIMIZER happened.
    modules: those called in it, and in which iteration first. number: how many loops were entered before this one; instance: how often this loop of this code had been entered before.
    entered: how many operations there had been. token: of its frame. data: whatever the listener keeps with it.
    """

    __slots__ = (
        "__weakref__",
        "_last",
        "code",
        "data",
        "end",
        "entered",
        "instance",
        "iteration",
        "marked",
        "modules",
        "number",
        "start",
        "token",
    )

    def __init__(self, token: Token, code: CodeType, start: int, end: int, *, number: int, instance: int, entered: int) -> None:
        self.token = token
        self.entered = entered
        self.code = code
        self.start = start
        self.end = end
        self.number = number
        self.instance = instance
        self.iteration = 0
        self.marked = [0, 0, 0, 0]
        self.modules: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._last = [-1, -1, -1, -1]
        self.data: Any = None

    def mark(self, rank: int) -> None:
        if self._last[rank] != self.iteration:
            self._last[rank] = self.iteration
            self.marked[rank] += 1

    @property
    def rank(self) -> int:
        """OPTIMIZER, BACKWARD, MODULE or NOTHING: the most telling thing that happened in at least two iterations, half of all."""
        for rank in (OPTIMIZER, BACKWARD, MODULE):
            if self.marked[rank] >= 2 and 2 * self.marked[rank] >= self.iteration - 1:
                return rank
        return NOTHING

    @property
    def line(self) -> int:
        """The line of the loop's head."""
        lines = [line for start, end, line in self.code.co_lines() if line and start < self.end and end > self.start]
        return min(lines, default=self.code.co_firstlineno)


class _Code:
    """What is known of a code object: whose it is, and its loops as (start, end) offsets, innermost first."""

    __slots__ = ("is_generator", "is_module_call", "is_outside", "loops")

    def __init__(self, code: CodeType) -> None:
        path = os.path.abspath(code.co_filename)
        self.is_module_call = code in _MODULE_CALLS
        self.is_outside = path.startswith((_TORCH, _OURS)) or code.co_filename.startswith("<frozen")
        self.is_generator = bool(code.co_flags & _GENERATORS)
        self.loops = () if self.is_outside else find_loops(code)


_MODULE_CALLS = frozenset(
    getattr(torch.nn.Module, name).__code__ for name in ("_call_impl", "_wrapped_call_impl") if hasattr(torch.nn.Module, name)
)


def find_loops(code: CodeType) -> tuple[tuple[int, int], ...]:
    """(first, last) instruction offset of every loop of the code, innermost first: its backward jumps, one a target."""
    ends: dict[int, int] = {}
    jumps = {*dis.hasjrel, *dis.hasjabs}
    for each in dis.get_instructions(code):
        if (
            each.opcode in jumps
            and isinstance(each.argval, int)
            and each.argval <= each.offset
            and "NO_INTERRUPT" not in each.opname
        ):
            ends[each.argval] = max(ends.get(each.argval, 0), each.offset)
    return tuple(sorted(ends.items(), key=lambda loop: loop[1] - loop[0]))


class LoopFinder:
    """Finds the loops of one thread. `look` is called at every operation.

    on_around(loop): it has gone around; `loop.iteration` is the one that begins. on_end(loop): it was left.
    """

    def __init__(self, on_around: Callable[[Loop], None], on_end: Callable[[Loop], None]) -> None:
        self._on_around = on_around
        self._on_end = on_end
        self._codes: dict[CodeType, _Code] = {}
        self._stack: list[tuple[Token, _Code]] = []  # at the last look, outermost first
        self._instances: dict[tuple[CodeType, int], int] = {}
        self._num_loops = 0
        self.num_looks = 0  # operations so far
        self.is_marked = False  # the program has called a module, run a backward pass or stepped an optimizer, wherever

    @property
    def active(self) -> list[Loop]:
        """Loops that run now, outermost first."""
        return [loop for token, _ in self._stack for loop in token.loops]

    def mark(self, rank: int) -> None:
        """Something of this rank happens in the iterations that run now."""
        self.is_marked = True
        for token, _ in self._stack:
            for loop in token.loops:
                loop.mark(rank)

    def mark_module(self, module: Any) -> None:
        """The program calls a module itself. It marks a step where an earlier iteration called it, too: layers called in turn do not."""
        self.is_marked = True
        for token, _ in self._stack:
            for loop in token.loops:
                if loop.modules.setdefault(module, loop.iteration) != loop.iteration:
                    loop.mark(MODULE)

    def look(self, frame: FrameType | None, key: Any) -> tuple[CodeType, int] | None:
        """An operation `key` is called from `frame`. Gives the place: code and offset of the innermost frame of the program's."""
        self.num_looks += 1
        place: tuple[CodeType, int] | None = None
        found: list[tuple[FrameType, _Code, FrameType | None]] = []
        child: FrameType | None = None
        while frame is not None:
            code = frame.f_code
            known = self._codes.get(code) or self._know(code)
            if known.is_module_call:
                found.clear()
            elif not known.is_outside:
                if place is None:
                    place = (code, frame.f_lasti)
                found.append((frame, known, child))
            child = frame
            frame = frame.f_back
        found.reverse()
        self._compare(found, key)
        return place

    def find_place(self, frame: FrameType | None) -> tuple[CodeType, int] | None:
        """As `look`, where no loop can have gone around: inside a module's call. The first of the program's frames is enough."""
        self.num_looks += 1
        while frame is not None:
            code = frame.f_code
            if not (self._codes.get(code) or self._know(code)).is_outside:
                return code, frame.f_lasti
            frame = frame.f_back
        return None

    @staticmethod
    def is_ours(code: CodeType) -> bool:
        """Whether the code is memfit's."""
        return os.path.abspath(code.co_filename).startswith(_OURS)

    def is_outside(self, code: CodeType) -> bool:
        """Whether the code is PyTorch's, memfit's or the interpreter's."""
        return (self._codes.get(code) or self._know(code)).is_outside

    def _know(self, code: CodeType) -> _Code:
        known = self._codes[code] = _Code(code)
        return known

    def finish(self) -> None:
        """All loops are over."""
        for token, _ in reversed(self._stack):
            self._end(token, 0)
        self._stack = []

    def _compare(self, found: list[tuple[FrameType, _Code, FrameType | None]], key: Any) -> None:
        stack: list[tuple[Token, _Code]] = []
        for frame, known, _ in found:
            token = _token_of(frame)
            if token is not None:
                stack.append((token, known))
        here = {id(token) for token, _ in stack}
        for token, known in reversed(self._stack):  # frames that have returned
            if id(token) not in here and not known.is_generator:
                self._end(token, 0)
        self._stack = stack
        arounds = []
        for frame, known, child in found:
            token = _token_of(frame)
            if token is None or not known.loops:
                continue
            called = key if child is None else child.f_code
            callee = None if child is None else _token_of(child)
            loop = self._move(token, frame.f_code, known, frame.f_lasti, called, callee)
            if loop is not None:
                arounds.append(loop)
        for loop in arounds:
            self._on_around(loop)

    def _move(self, token: Token, code: CodeType, known: _Code, offset: int, called: Any, callee: Token | None) -> Loop | None:
        """The frame is at this offset now. Gives the loop that has gone around, if one has."""
        before = token.offset
        if offset == before:
            if called is not token.key or (callee is not None and callee is token.child):
                return None
            token.child = callee
            is_around = True
        else:
            token.offset, token.key, token.child = offset, called, callee
            is_around = offset < before
        if offset != before:  # loops that were left, innermost first, and entered
            for index, loop in enumerate(token.loops):
                if not loop.start <= offset <= loop.end:
                    self._end(token, index)
                    break
        around: Loop | None = None
        if is_around and token.loops:
            around = token.loops[-1]
            around.iteration += 1
        for start, end in reversed(known.loops):
            if start <= offset <= end and all(loop.start != start for loop in token.loops):
                instance = self._instances.get((code, start), 0)
                self._instances[code, start] = instance + 1
                loop = Loop(token, code, start, end, number=self._num_loops, instance=instance, entered=self.num_looks)
                token.loops.append(loop)
                self._num_loops += 1
        return around

    def _end(self, token: Token, index: int) -> None:
        while len(token.loops) > index:
            self._on_end(token.loops.pop())


def _token_of(frame: FrameType) -> Token | None:
    """The frame's token, given now if it has none; None where somebody else's trace function is in its place."""
    token: Any = frame.f_trace
    if token is None:
        token = frame.f_trace = Token()
    return token if type(token) is Token else None
