"""Which line makes a container grow, and which function made what it takes in: a trace function for one iteration.

`sys.settrace` in the watching thread, for the program's frames alone, for as long as one iteration of a loop runs; it is not used
where a debugger or a coverage tool has set one. Between two traced lines the containers' lengths are compared, so the line that ran
last is the one that made it grow. The containers are held meanwhile.
"""

from __future__ import annotations

import collections.abc
import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any

from memfit.engine.frames import read_locals
from memfit.measurement.loops import Loop, LoopFinder, Token

_MAX_RETURNED = 64


@dataclass(frozen=True)
class Growth:
    """A container grew at this line. made_at: where a function of the program's returned the new element, if one did."""

    path: str
    line: int
    made_at: tuple[str, int] | None = None


class Watchpoint:
    """Watches containers from `start` to `stop`, or until the loop is left."""

    def __init__(self, finder: LoopFinder, loop: Loop, containers: list[Any]) -> None:
        self.found: dict[int, Growth] = {}  # by id of the container
        self._finder = finder
        self._loop = loop
        self._containers = containers
        self._lengths = [len(each) for each in containers]
        self._last: tuple[str, int] = ("", 0)
        self._returned: dict[int, tuple[str, int]] = {}

    def start(self, frame: FrameType | None) -> bool:
        """Begin, in the frames that run and in those to come. False where somebody traces already."""
        if sys.gettrace() is not None:
            return False
        while frame is not None:
            if type(frame.f_trace) is Token and self._last == ("", 0):
                self._last = (frame.f_code.co_filename, frame.f_lineno)
            frame = frame.f_back
        Token.tracer = self._on_event
        sys.settrace(self._on_call)
        return True

    def stop(self, frame: FrameType | None) -> None:
        """End, and let go of everything. Not from inside a trace function: Python would write the cleared locals back."""
        self._detach()
        while frame is not None:  # before Python 3.13 tracing leaves a copy of the locals in each frame
            if frame.f_trace is not None:
                read_locals(frame)
            frame = frame.f_back

    def _detach(self) -> None:
        if Token.tracer == self._on_event:
            self._compare()
            sys.settrace(None)
            Token.tracer = None
        self._containers = []

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> Any:
        if self._finder.is_outside(frame.f_code):
            return None
        if frame.f_trace is None:
            frame.f_trace = Token()
        self._on_event(frame, event, argument)
        return frame.f_trace

    def _on_event(self, frame: FrameType, event: str, argument: Any) -> None:
        self._compare()
        if self._finder.is_outside(frame.f_code):
            return
        self._last = (frame.f_code.co_filename, frame.f_lineno)
        loop = self._loop
        if frame.f_trace is loop.token and (event == "return" or not loop.start <= frame.f_lasti <= loop.end):
            self._detach()
        elif event == "return":
            if isinstance(argument, (dict, tuple, list, collections.abc.Mapping)):
                self._returned[id(argument)] = self._last
                if len(self._returned) > _MAX_RETURNED:
                    self._returned.pop(next(iter(self._returned)))
            caller = frame.f_back  # its line goes on without another event
            while caller is not None and self._finder.is_outside(caller.f_code):
                caller = caller.f_back
            if caller is not None:
                self._last = (caller.f_code.co_filename, caller.f_lineno)

    def _compare(self) -> None:
        for index, container in enumerate(self._containers):
            length = len(container)
            if length > self._lengths[index] and id(container) not in self.found:
                self.found[id(container)] = Growth(*self._last, self._returned.get(id(_newest(container))))
            self._lengths[index] = length


def _newest(container: Any) -> Any:
    if isinstance(container, dict):
        return next(reversed(container.values()), None)
    return None if isinstance(container, set) or not container else container[-1]
