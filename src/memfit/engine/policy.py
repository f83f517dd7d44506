"""Policy: a plan's moves in the form the tape looks up while it runs: section, module invocation, ordinal."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from memfit.core.trace import PLACE


@dataclass(frozen=True)
class CallPolicy:
    """What to do with one call: record it as a recipe. The rest are positions of its cells.

    evict: what leaves when it was saved. keep: what autograd saves anyway; recipes may lean on it. pin: what it does not save and
    the tape therefore holds until backward begins. in_place: the result is written over the first argument, if that is safe then.
    """

    function: str
    evict: frozenset[str]
    keep: frozenset[str]
    pin: frozenset[str]
    in_place: bool = False

    def out_of_place(self) -> CallPolicy:
        """What it says if the call has to run out of place after all: its result is a cell of its own."""
        evict, keep, pin = (
            frozenset("out0" if each == "mut0" else each for each in cells) for cells in (self.evict, self.keep, self.pin)
        )
        return CallPolicy(self.function, evict, keep, pin, in_place=False)


Frame = dict[int, CallPolicy]  # by ordinal within the module invocation


class Policy:
    """Frames by (section, module path, invocation). Beyond the last section or invocation the plan knows of, the last one's holds: a
    forward pass more than was planned for (one that no backward follows, say) must not leave the rest of the step without a plan."""

    def __init__(
        self,
        replayed: Iterable[str],
        evict: Iterable[str],
        keep: Iterable[str],
        pin: Iterable[str],
        untouched: Iterable[str] = (),
    ) -> None:
        """Places of the calls to record, keys ('place|position') of the cells to evict, to keep and to pin; invocations
        ('section|path#invocation') of these modules in which nothing is planned."""
        evicted, kept, pinned = _by_place(evict), _by_place(keep), _by_place(pin)
        self._frames: dict[tuple[int, str, int], Frame] = {}
        self._last: dict[tuple[int, str], int] = {}  # the last invocation the plan knows of
        self.num_sections = 0
        self.num_cells = sum(map(len, evicted.values()))
        for place in {*replayed, *evicted, *kept, *pinned}:
            frame, ordinal, function = self._frame_of(place)
            evict, keep, pin = (frozenset(each.get(place, ())) for each in (evicted, kept, pinned))
            frame[ordinal] = CallPolicy(function, evict, keep, pin)
        self._know(untouched)

    def with_in_place(self, places: Iterable[str], untouched: Iterable[str] = ()) -> Policy:
        """The same, and the calls at these places in place."""
        policy = Policy((), (), (), (), untouched)
        policy.num_cells, policy.num_sections = self.num_cells, self.num_sections
        policy._frames = {key: dict(frame) for key, frame in self._frames.items()}
        policy._last |= {key: max(last, policy._last.get(key, 0)) for key, last in self._last.items()}
        for place in places:
            frame, ordinal, function = policy._frame_of(place)
            nothing = CallPolicy(function, frozenset(), frozenset(), frozenset())
            frame[ordinal] = replace(frame.get(ordinal, nothing), in_place=True)
        return policy

    def _frame_of(self, place: str) -> tuple[Frame, int, str]:
        """The frame a place lies in, made if need be; its ordinal and function."""
        match = PLACE.fullmatch(place)
        assert match is not None, place
        section, path, invocation, ordinal, function = match.groups()
        self.num_sections = max(self.num_sections, int(section) + 1)
        self._last[int(section), path] = max(self._last.get((int(section), path), 0), int(invocation))
        return self._frames.setdefault((int(section), path, int(invocation)), {}), int(ordinal), function

    def _know(self, invocations: Iterable[str]) -> None:
        for name in invocations:
            module, _, number = name.rpartition("#")
            section, _, path = module.partition("|")
            self._last[int(section), path] = max(self._last.get((int(section), path), 0), int(number))

    def frame(self, section: int, path: str, invocation: int) -> Frame | None:
        """The planned calls of one module invocation, or None."""
        section = min(section, self.num_sections - 1)
        last = self._last.get((section, path))
        return self._frames.get((section, path, min(invocation, last))) if last is not None else None


def _by_place(keys: Iterable[str]) -> dict[str, list[str]]:
    places: dict[str, list[str]] = {}
    for key in keys:
        place, _, position = key.rpartition("|")
        places.setdefault(place, []).append(position)
    return places
