"""Policy: a plan's moves in the form the tape looks up while it runs: section, module invocation, ordinal."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace

from memfit.core.trace import PLACE


@dataclass(frozen=True, slots=True)
class CallPolicy:
    """What to do with one call: record it as a recipe. The rest are positions of its cells.

    evict: what leaves when it was saved. keep: what autograd saves anyway; recipes may lean on it. pin: what it does not save and
    the tape therefore holds until backward begins. transient: what a replay that passes it keeps for no later reader. in_place: the result
    is written over the first argument, if that is safe then. is_replayed: what it makes may come back; else all of it is kept.
    """

    function: str
    evict: frozenset[str]
    keep: frozenset[str]
    pin: frozenset[str]
    transient: frozenset[str] = frozenset()
    in_place: bool = False
    is_replayed: bool = True

    def out_of_place(self) -> CallPolicy:
        """What it says if the call has to run out of place after all: its result is a cell of its own."""
        evict, keep, pin, transient = (
            frozenset("out0" if each == "mut0" else each for each in cells)
            for cells in (self.evict, self.keep, self.pin, self.transient)
        )
        return CallPolicy(self.function, evict, keep, pin, transient, is_replayed=self.is_replayed)


Frame = dict[int, CallPolicy]  # by ordinal within the module invocation
Section = dict[str, list[Frame | None]]  # the frames of each module path by invocation


class Policy:
    """Frames by section, module path and invocation. Beyond the last section or invocation the plan knows of, the last one's holds: a
    forward pass more than was planned for (one that no backward follows, say) must not leave the rest of the step without a plan."""

    def __init__(
        self,
        replayed: Iterable[str],
        evict: Iterable[str],
        keep: Iterable[str],
        pin: Iterable[str],
        untouched: Iterable[str] = (),
        transient: Iterable[str] = (),
    ) -> None:
        """Places of the calls to record, keys ('place|position') of the cells to evict, to keep, to pin and to keep for one reader at a
        time; invocations ('section|path#invocation') of these modules in which nothing is planned."""
        moved = _by_place(evict), _by_place(keep), _by_place(pin), _by_place(transient)
        self._sections: list[Section] = []
        shared: dict[
            CallPolicy, CallPolicy
        ] = {}  # one object for all calls treated alike: the processor's cache has it at hand
        for place in {*replayed}.union(*moved):
            frame, ordinal, function = self._frame_of(place)
            evicts, keeps, pins, passes = (frozenset(each.get(place, ())) for each in moved)
            entry = CallPolicy(function, evicts, keeps, pins, passes)
            frame[ordinal] = shared.setdefault(entry, entry)
        self._know(untouched)

    def with_in_place(self, places: Iterable[str], untouched: Iterable[str] = ()) -> Policy:
        """The same, and the calls at these places in place."""
        policy = Policy((), (), (), ())
        policy._sections = [
            {path: [frame and frame.copy() for frame in frames] for path, frames in section.items()}
            for section in self._sections
        ]
        for place in places:
            frame, ordinal, function = policy._frame_of(place)
            nothing = CallPolicy(function, frozenset(), frozenset(), frozenset(), is_replayed=False)
            frame[ordinal] = replace(frame.get(ordinal, nothing), in_place=True)
        policy._know(untouched)
        return policy

    def _frame_of(self, place: str) -> tuple[Frame, int, str]:
        """The frame a place lies in, made if need be; its ordinal and function."""
        match = PLACE.fullmatch(place)
        assert match is not None, place
        section, path, invocation, ordinal, function = match.groups()
        while len(self._sections) <= int(section):
            self._sections.append({})
        frames = self._frames(int(section), path, int(invocation))
        frame = frames[int(invocation)]
        if frame is None:
            frame = frames[int(invocation)] = {}
        return frame, int(ordinal), sys.intern(function)

    def _know(self, untouched: Iterable[str]) -> None:
        """In these module invocations nothing is planned: they do not go by the ones before."""
        for name in untouched:
            module, _, number = name.rpartition("#")
            section, _, path = module.partition("|")
            if int(section) < len(self._sections):
                self._frames(int(section), path, int(number))

    def _frames(self, section: int, path: str, invocation: int) -> list[Frame | None]:
        """The frames of a path, at least up to this invocation."""
        frames = self._sections[section].setdefault(path, [])
        frames.extend([None] * (invocation + 1 - len(frames)))
        return frames

    def section(self, number: int) -> Section:
        """What is planned in a section."""
        return self._sections[min(number, len(self._sections) - 1)] if self._sections else {}


def frame_of(section: Section, path: str, invocation: int) -> Frame | None:
    """The planned calls of one module invocation in a section, or None."""
    frames = section.get(path)
    return frames[min(invocation, len(frames) - 1)] if frames is not None else None


def _by_place(keys: Iterable[str]) -> dict[str, list[str]]:
    places: dict[str, list[str]] = {}
    for key in keys:
        place, _, position = key.rpartition("|")
        places.setdefault(place, []).append(position)
    return places
