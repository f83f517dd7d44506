"""Policy: a plan's moves in the form the tape looks up while it runs: section, module invocation, ordinal."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_PLACE = re.compile(r"(\d+)\|(.*)#(\d+)/(\d+):([^|]*)")


@dataclass(frozen=True)
class CallPolicy:
    """What to do with one call: record it as a recipe; `evict` and `keep` are positions of its cells."""

    function: str
    evict: frozenset[str]
    keep: frozenset[str]


Frame = dict[int, CallPolicy]  # by ordinal within the module invocation


class Policy:
    """Frames by (section, module path, invocation). Sections beyond the last planned one use the last one's."""

    def __init__(self, replayed: Iterable[str], evict: Iterable[str], keep: Iterable[str]) -> None:
        """Places of the calls to record, keys ('place|position') of the cells to evict and to keep."""
        evicted, kept = _by_place(evict), _by_place(keep)
        self._frames: dict[tuple[int, str, int], Frame] = {}
        self.num_sections = 0
        self.num_cells = sum(map(len, evicted.values()))
        for place in {*replayed, *evicted, *kept}:
            match = _PLACE.fullmatch(place)
            assert match is not None, place
            section, path, invocation, ordinal, function = match.groups()
            self.num_sections = max(self.num_sections, int(section) + 1)
            frame = self._frames.setdefault((int(section), path, int(invocation)), {})
            frame[int(ordinal)] = CallPolicy(function, frozenset(evicted.get(place, ())), frozenset(kept.get(place, ())))

    def frame(self, section: int, path: str, invocation: int) -> Frame | None:
        """The planned calls of one module invocation, or None."""
        return self._frames.get((min(section, self.num_sections - 1), path, invocation))


def _by_place(keys: Iterable[str]) -> dict[str, list[str]]:
    places: dict[str, list[str]] = {}
    for key in keys:
        place, _, position = key.rpartition("|")
        places.setdefault(place, []).append(position)
    return places
