"""Policy: a plan's moves in the form the tape looks up while it runs: section, module invocation, ordinal."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from memfit.core.trace import PLACE


@dataclass(frozen=True)
class CallPolicy:
    """What to do with one call: record it as a recipe. The rest are positions of its cells.

    evict: what leaves when it was saved. keep: what autograd saves anyway; recipes may lean on it. pin: what it does not save and
    the tape therefore holds until backward begins.
    """

    function: str
    evict: frozenset[str]
    keep: frozenset[str]
    pin: frozenset[str]


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
            match = PLACE.fullmatch(place)
            assert match is not None, place
            section, path, invocation, ordinal, function = match.groups()
            self.num_sections = max(self.num_sections, int(section) + 1)
            frame = self._frames.setdefault((int(section), path, int(invocation)), {})
            self._last[int(section), path] = max(self._last.get((int(section), path), 0), int(invocation))
            frame[int(ordinal)] = CallPolicy(function, *(frozenset(each.get(place, ())) for each in (evicted, kept, pinned)))
        for name in untouched:
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
