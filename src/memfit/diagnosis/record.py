"""What is kept of one running loop while it is watched: samples of the living places, their holders, where containers grew.

Words and numbers, and weak references; a watchpoint holds containers for the one iteration in which it is on. A sample costs a
microsecond a living place.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from memfit.core import growth as core
from memfit.diagnosis.evidence import Holding, Look
from memfit.measurement.births import Site
from memfit.measurement.loops import Loop, LoopFinder
from memfit.measurement.watchpoint import Growth as Grown
from memfit.measurement.watchpoint import Watchpoint

MAX_SAMPLES = 48  # of one place in one loop; then every second one goes


@dataclass
class Record:
    """Of one loop, from its first time around on.

    born_bytes: by all sites, until then; born_here: the same by site. samples, holdings: by site. nodes: of each holder (iteration,
    nodes of its graphs), by_name: the holder. grown: by id of the container.
    """

    born_bytes: int
    born_here: dict[Site, int]
    samples: dict[Site, list[core.Sample]] = field(default_factory=dict)
    holdings: dict[Site, Holding] = field(default_factory=dict)
    nodes: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    by_name: dict[str, Holding] = field(default_factory=dict)
    grown: dict[int, Grown] = field(default_factory=dict)
    _stride: int = 1
    _watchpoint: Watchpoint | None = None

    def sample(self, iteration: int, sites: Iterable[Site]) -> None:
        """Note what is alive of each place now that the iteration begins."""
        if iteration % self._stride:
            return
        is_full = False
        for site in sites:
            samples = self.samples.setdefault(site, [])
            samples.append(core.Sample(iteration, len(site.alive), site.live_bytes))
            is_full = is_full or len(samples) > MAX_SAMPLES
        if is_full:
            self._stride *= 2
            for site, samples in self.samples.items():
                self.samples[site] = [each for each in samples if each.iteration % self._stride == 0]

    def rise(self, site: Site) -> core.Rise | None:
        """The growth of the place so far, None where it has settled."""
        return core.judge(self.samples[site], is_own_input=site.is_own_input)

    def note(self, found: Look, iteration: int) -> None:
        """Keep what a look has found."""
        self.holdings.update(found.by_site)
        for name, holding in found.by_name.items():
            self.by_name[name] = holding
            self.nodes.setdefault(name, []).append((iteration, holding.num_nodes))

    def nodes_per_step(self) -> dict[str, int]:
        """By holder: how many autograd nodes more each step, from the first look to the last."""
        latest = max((seen[-1][0] for seen in self.nodes.values()), default=0)
        found = {}
        for name, seen in self.nodes.items():
            (first, few), (last, many) = seen[0], seen[-1]
            if last == latest and last > first and (many - few) / (last - first) >= 1:
                found[name] = round((many - few) / (last - first))
        return found

    def start_watchpoint(self, finder: LoopFinder, loop: Loop, containers: list[Any], frame: FrameType) -> bool:
        """Watch containers grow for one iteration. False where somebody else traces this run."""
        watchpoint = Watchpoint(finder, loop, containers)
        self._watchpoint = watchpoint if watchpoint.start(frame) else None
        return self._watchpoint is not None

    def end_watchpoint(self, frame: FrameType) -> None:
        """The iteration is over, or the loop is. Nothing where none is on."""
        if self._watchpoint is not None:
            self._watchpoint.stop(frame)
            self.grown.update(self._watchpoint.found)
            self._watchpoint = None
