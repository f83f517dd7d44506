"""Growth seen in a loop that is over is a candidate: it may still turn out that the program needed what was piled up.

It did if a backward pass or an optimizer step came while it was alive, and it is gone when the loop around goes around: parts of one
loss, a rollout. What is gone without that was kept "until its loop ended"; what is still there grows on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from memfit.core import growth as core
from memfit.measurement.births import Birth, Site
from memfit.measurement.holders import UNKNOWN as UNNAMED
from memfit.measurement.loops import BACKWARD, NOTHING, Loop

UNKNOWN = "a holder that was not looked for"


@dataclass
class Candidate:
    """Growth of one site in a loop that is over; site None where only graph nodes grow.

    rank, number: of the loop. births: a few of those that had piled up (weak references). outer: the loop around it, if any.
    is_needed: they were alive when a backward pass or an optimizer step came after the loop.
    """

    site: Site | None
    growth: core.Growth
    rank: int
    number: int
    births: tuple[Birth, ...]
    outer: Loop | None
    is_needed: bool = False

    @property
    def order(self) -> tuple[int, bool, int, bool, int]:
        """What makes it the one to report, of several of one site: the loop most surely made of steps, a holder that is known."""
        growth = self.growth
        return self.rank, growth.chain != UNKNOWN, growth.num_steps, growth.until_end, self.number

    @property
    def share_alive(self) -> float:
        """Of what had piled up."""
        return sum(birth in birth.site.alive for birth in self.births) / max(1, len(self.births))


class Candidates:
    """All candidates of a run."""

    def __init__(self) -> None:
        self._open: list[Candidate] = []  # of loops that are over, while the loop around them goes on
        self._kept: dict[Any, Candidate] = {}  # by site
        self._needed: set[Site | None] = set()  # what was piled up here was needed once: a run cut short does not change it

    def add(self, candidate: Candidate) -> None:
        self._open.append(candidate)

    def note_use(self) -> None:
        """A backward pass or an optimizer step: it may need what is alive."""
        for each in self._open:
            if each.share_alive >= 0.5 if each.births else each.rank < BACKWARD:  # of nodes nothing more is known
                each.is_needed = True

    def settle(self, outer: Loop) -> None:
        """The loop goes around: what loops inside it piled up is gone, or it stays."""
        inside = [each for each in self._open if each.outer is outer]
        if inside:
            self._open = [each for each in self._open if each.outer is not outer]
        for each in inside:
            self._keep(each, is_released=self._is_gone(each))

    def close(self, *, is_training: bool) -> list[core.Growth]:
        """The run is over: what to report, one growth a line.

        is_training: loops in which nothing tells of a step make layers or data, or call layers in turn: only garbage counts there. Where
        nothing is trained they count if a name holds what they made: a list that is still being built has none.
        """
        for each in self._open:
            self._keep(each, is_released=False)
        self._open = []
        return merge([each.growth for each in self._kept.values() if self._counts(each, is_training)])

    @staticmethod
    def _counts(each: Candidate, is_training: bool) -> bool:
        if each.rank > NOTHING or each.growth.kind == core.CYCLE:
            return True
        return not is_training and each.growth.chain not in (UNKNOWN, UNNAMED)

    @staticmethod
    def _is_gone(each: Candidate) -> bool:
        return bool(each.births) and each.share_alive <= 0.25

    def _keep(self, each: Candidate, *, is_released: bool) -> None:
        if each.is_needed and (self._is_gone(each) or not each.births):
            self._needed.add(each.site)
            return
        if each.site in self._needed and each.outer is not None:
            return
        if is_released:
            each.growth = replace(each.growth, until_end=True)
        key = each.site if each.site is not None else (each.growth.path, each.growth.line, each.growth.chain)
        known = self._kept.get(key)
        if known is None or each.order > known.order:
            self._kept[key] = each


def merge(growths: list[core.Growth]) -> list[core.Growth]:
    """Growths with the same remedy at the same line as one: bytes added, chains of the largest, nodes of the most."""
    merged: dict[tuple[str, int, str], core.Growth] = {}
    for each in sorted(growths, key=lambda each: -each.num_bytes):
        key = (each.path, each.line, each.kind)
        if each.num_bytes == 0 and key not in merged:  # nodes of what is known by its bytes already
            key = next((known for known in merged if known[:2] == key[:2]), key)
        known = merged.get(key)
        if known is None:
            merged[key] = each
            continue
        merged[key] = replace(
            known,
            num_bytes=known.num_bytes + each.num_bytes,
            nodes_per_step=max(known.nodes_per_step, each.nodes_per_step),
            made_at=known.made_at + each.made_at,
            share=known.share + each.share,
            used_bytes=None if known.used_bytes is None or each.used_bytes is None else known.used_bytes + each.used_bytes,
            until_end=known.until_end and each.until_end,
        )
    return list(merged.values())
