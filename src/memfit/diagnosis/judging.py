"""A loop is over: what of its samples and holders is growth, where it is to be mended, and what has only settled. Keeps nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from memfit.core import growth as core
from memfit.diagnosis.candidates import UNKNOWN, Candidate
from memfit.diagnosis.evidence import Holding
from memfit.diagnosis.record import Record
from memfit.measurement.births import Ledger, Site, line_text
from memfit.measurement.loops import BACKWARD, Loop

_MIN_SETTLED = 1024  # bytes


def judge_loop(loop: Loop, record: Record, ledger: Ledger, outer: Loop | None) -> Iterator[Candidate]:
    """What grew in it. outer: the loop around it that goes on."""
    born = max(1.0, (ledger.born_bytes - record.born_bytes) / max(1, loop.iteration - 1))
    nodes = record.nodes_per_step()
    told: set[str] = set()
    for site, samples in record.samples.items():
        holding = record.holdings.get(site)
        rise = record.rise(site)
        if holding is not None and holding.kind == core.CYCLE:
            per_step = (site.born_bytes - record.born_here.get(site, 0)) / max(1, loop.iteration)  # all of it waits
            rise = core.Rise(per_step, 0.0, loop.iteration)
        if holding is not None and holding.kind not in core.CODES:
            continue
        if rise is None or (holding is None and rise.bytes_per_step < core.MIN_BYTES):
            continue
        growth = _growth(loop, record, ledger, site, holding, rise, rise.bytes_per_step / born)
        if holding is not None and holding.name in nodes:
            growth = replace(growth, nodes_per_step=nodes[holding.name])
            told.add(holding.name)
        piled = round(rise.count_per_step * loop.iteration)
        births = tuple(site.alive)[: samples[-1].count][-piled or None :]  # not those of the last iteration
        births = births[:: max(1, len(births) // 8)]
        yield Candidate(site, growth, loop.rank, loop.number, births, outer)
    for name, per_step in nodes.items():
        if name in record.by_name and name not in told:
            growth = _growth(loop, record, ledger, None, record.by_name[name], core.Rise(0.0, 0.0, loop.iteration), 0.0)
            yield Candidate(None, replace(growth, nodes_per_step=per_step), loop.rank, loop.number, (), outer)


def find_settled(loop: Loop, record: Record) -> dict[str, int]:
    """What arrived in the loop, is still there and grows no more: file:line and bytes."""
    found: dict[str, int] = {}
    for site, samples in record.samples.items():
        if site.first < loop.entered or min(each.num_bytes for each in samples) < _MIN_SETTLED or record.rise(site) is not None:
            continue
        path, line = site.place
        place = f"{core.show_path(path)}:{line}"
        found[place] = max(found.get(place, 0), samples[-1].num_bytes)
    return found


def _growth(
    loop: Loop, record: Record, ledger: Ledger, site: Site | None, holding: Holding | None, rise: core.Rise, share: float
) -> core.Growth:
    made_at: tuple[tuple[str, str, int], ...] = ()
    place = ("", 0)
    if site is not None:
        place = site.place
        made_at = ((f"{core.show_path(place[0])}:{place[1]}", site.module, round(rise.bytes_per_step)),)
    if holding is not None:
        place = holding.place or place
        grown = next((record.grown[key] for key in holding.containers if key in record.grown), None)
        if grown is not None:
            place = grown.made_at or (grown.path, grown.line)
    retained = [place for place, (retain, create) in ledger.backwards.items() if retain and not create]
    if holding is not None and holding.kind == core.GRAPH and site is not None and retained:
        place = retained[0]
    share_used = holding.used_share if holding is not None else 1.0
    return core.Growth(
        kind=holding.kind if holding is not None else core.CONTAINER,
        path=place[0],
        line=place[1],
        text=line_text(*place),
        made_at=made_at,
        num_bytes=round(rise.bytes_per_step),
        num_steps=rise.num_steps,
        loop=f"{core.show_path(loop.code.co_filename)}:{loop.line}",
        chain=holding.chain if holding is not None else UNKNOWN,
        is_attached=holding is not None and holding.is_attached,
        is_backwarded=loop.rank >= BACKWARD,
        used_bytes=round(rise.bytes_per_step * share_used) if share_used < 0.5 else None,
        share=share,
        device=site.device if site is not None else "cpu",
    )
