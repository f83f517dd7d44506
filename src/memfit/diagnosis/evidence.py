"""What one look at the heap says about the places where memory grows, in words: no tensor is kept.

Also the three kinds of memory held for nothing that need no loop to be seen: frames of a call that failed, kept by its exception; modules
that only an `lru_cache` knows; gradients with a graph (`create_graph=True`) whose parameter nobody holds any more.
"""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from memfit.core import growth as core
from memfit.core.sizes import format_size
from memfit.diagnosis.places import find_attribute_store, find_exception_keeper, find_hook_registration
from memfit.engine.frames import read_locals
from memfit.engine.need import tensors_in
from memfit.measurement import holders
from memfit.measurement.births import Ledger, Site, has_storage, line_text
from memfit.measurement.graphs import has_graph, saved_storages, walk
from memfit.measurement.holders import CONTAINERS, Chain, Heap


@dataclass
class Holding:
    """Who holds the survivors of one place.

    kind: one of core.CODES, or 'model' for parameters, which are no growth.
    name: the root with its attributes, the same for all elements of a list; chain: the whole way, in words.
    place: where the holder was last written (a tensor with a graph, a cycle), or None.
    containers: ids of those on the way; a watchpoint may have seen them grow. is_attached: the tensor has a graph.
    used_share: what the tensor shows of its storage. num_nodes: of the graphs that hang on the name.
    """

    kind: str
    name: str
    chain: str
    place: tuple[str, int] | None = None
    containers: tuple[int, ...] = ()
    is_attached: bool = False
    used_share: float = 1.0
    num_nodes: int = 0


@dataclass
class Look:
    """One look: holdings by site, holdings of tensors with a graph by name, and the containers that may grow (held: use them at once)."""

    by_site: dict[Site, Holding] = field(default_factory=dict)
    by_name: dict[str, Holding] = field(default_factory=dict)
    containers: list[Any] = field(default_factory=list)


def look(heap: Heap, ledger: Ledger, sites: Iterable[Site]) -> Look:
    """Who holds what has been made at these sites, and who holds graphs."""
    found = Look()
    sampled = {}
    for site in sites:
        births = list(site.alive)
        storage = births[(len(births) - 1) // 2]() if births else None  # neither the first nor what the step still uses
        if storage is not None:
            sampled[site] = storage
    holders.add_graphs(heap)
    for (site, storage), chain in zip(sampled.items(), holders.find_chains(heap, sampled.values()), strict=True):
        found.by_site[site] = _hold(heap, ledger, site, storage, chain)
        _collect(found, chain)
    heads = [graph.head for graph in heap.graphs]
    nodes: dict[str, set[Any]] = {}
    for graph, chain in zip(heap.graphs, holders.find_holders(heap, heads), strict=True):
        if not chain.root:
            continue
        nodes.setdefault(chain.name, set()).update(graph.nodes)
        birth = ledger.birth_of(graph.head)
        place = birth.written.place if birth is not None else None
        found.by_name.setdefault(
            chain.name,
            Holding(core.GRAPH, chain.name, chain.text, place, _containers(chain), is_attached=True),
        )
        _collect(found, chain)
    for name, each in nodes.items():
        found.by_name[name].num_nodes = len(each)
    for name, each in nodes.items():
        if not found.by_name[name].containers and any(_covers(each, other) for key, other in nodes.items() if key != name):
            del found.by_name[name]  # it hangs on another's graph, as the loss does on the state carried over
    return found


def _covers(nodes: set[Any], others: set[Any]) -> bool:
    """Whether these nodes are nearly all of the others, and few more."""
    return len(nodes) > len(others) >= 0.8 * len(nodes) and len(others - nodes) <= 0.1 * len(others)


def _collect(found: Look, chain: Chain) -> None:
    known = set(map(id, found.containers))
    found.containers += [each for each in chain.objects if isinstance(each, CONTAINERS) and id(each) not in known]


def _containers(chain: Chain) -> tuple[int, ...]:
    return tuple(id(each) for each in chain.objects if isinstance(each, CONTAINERS))


def _hold(heap: Heap, ledger: Ledger, site: Site, storage: torch.UntypedStorage, chain: Chain) -> Holding:
    if chain.is_ring and chain.head is not None:
        return Holding(core.GRAPH_CYCLE, chain.name, f"{chain.text} -> {chain.graph} -> the same parameter", _created(ledger))
    if chain.is_ring:
        return Holding(core.CYCLE, chain.name, holders.name_ring(heap, chain), _cycle_place(chain))
    if chain.head is not None:
        birth = ledger.birth_of(chain.head)
        place = birth.written.place if birth is not None else None
        return Holding(core.GRAPH, chain.name, f"{chain.text} -> {chain.graph}", place, _containers(chain), is_attached=True)
    if any(isinstance(tensor, torch.nn.Parameter) for tensor in heap.by_storage.get(storage._cdata, ())):
        return Holding("model", chain.name, chain.text)
    shown = [tensor for tensor in heap.by_storage.get(storage._cdata, ()) if any(tensor is each for each in chain.objects[-1:])]
    used = sum(tensor.numel() * tensor.element_size() for tensor in shown) / storage.nbytes() if shown else 1.0
    kind = core.CONTAINER if _containers(chain) or not site.is_own_input else core.NAME
    attached = any(has_graph(tensor) for tensor in shown)
    return Holding(kind, chain.name, chain.text, None, _containers(chain), attached, used)


def _created(ledger: Ledger) -> tuple[str, int] | None:
    return next((place for place, (_, create) in ledger.backwards.items() if create), None)


def _cycle_place(chain: Chain) -> tuple[str, int] | None:
    """Where the cycle is closed: where a hook was registered, else where the attribute is set that leads back."""
    for each in chain.objects:
        if isinstance(each, types.FunctionType):
            code = each.__code__
            line = find_hook_registration(code.co_filename, each.__name__, code.co_firstlineno)
            return code.co_filename, line or code.co_firstlineno
    for holder, word in zip(chain.objects, chain.words[1:], strict=False):
        path = getattr(sys.modules.get(type(holder).__module__), "__file__", None)
        if word.startswith(".") and path is not None and not isinstance(holder, dict):
            line = find_attribute_store(path, type(holder).__name__, word[1:])
            if line is not None:
                return path, line
    return None


# ---- held for nothing, without a loop --------------------------------------------------------------------------------


def find_held(heap: Heap, ledger: Ledger) -> list[core.Growth]:
    """All that is held for nothing now."""
    return [*_find_failed_calls(heap, ledger), *_find_cached_modules(heap), *_find_graph_cycles(heap, ledger)]


def _find_failed_calls(heap: Heap, ledger: Ledger) -> list[core.Growth]:
    running = set(map(id, heap.frames))
    dead = [each for each in heap.dead_frames if id(each) not in running]
    failed: dict[int, tuple[BaseException, Chain, dict[int, int]]] = {}
    handled = _being_handled()
    for frame, chain in zip(dead, holders.find_holders(heap, dead), strict=True):
        error = next((each for each in chain.objects if isinstance(each, BaseException)), None)
        if error is None or not chain.root or id(error) in handled:
            continue
        sizes = failed.setdefault(id(error), (error, chain, {}))[2]
        for tensor in tensors_in(tuple(read_locals(frame).values())):
            birth = ledger.birth_of(tensor)
            others = heap.by_storage.get(tensor.untyped_storage()._cdata, ()) if birth is not None else ()
            if birth is not None and not any(id(each) in heap.names for each in others):
                sizes[birth.key] = birth.nbytes
    found = []
    for error, chain, sizes in failed.values():
        trace = error.__traceback__
        if trace is None or not sizes:
            continue
        path = trace.tb_frame.f_code.co_filename
        line = find_exception_keeper(path, trace.tb_lineno) or trace.tb_lineno
        found.append(
            core.Growth(core.TRACEBACK, path, line, line_text(path, line), num_bytes=sum(sizes.values()), per_step=False, chain=chain.text.replace(" -> next", ""))
        )  # fmt: skip
    return found


def _being_handled() -> set[int]:
    found: set[int] = set()
    error = sys.exc_info()[1]
    while error is not None and id(error) not in found:
        found.add(id(error))
        error = error.__context__
    return found


def _find_cached_modules(heap: Heap) -> list[core.Growth]:
    found = []
    for cache in heap.caches:
        inside = gc.get_referents(cache)
        keys = [each for each in inside if isinstance(each, tuple)]
        keys += [key for each in inside if isinstance(each, dict) for key in each if isinstance(key, tuple)]
        modules = [each for each in (*inside, *(part for key in keys for part in key)) if isinstance(each, torch.nn.Module)]
        if not modules:
            continue
        hidden = {id(cache), *map(id, keys), *(id(each) for each in inside if isinstance(each, dict))} & heap.existing
        heap.existing -= hidden
        chains = holders.find_holders(heap, modules)
        heap.existing |= hidden
        lost = {id(module): module for module, chain in zip(modules, chains, strict=True) if not chain.root}
        storages = {
            tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
            for module in lost.values()
            for tensor in (*module.parameters(), *module.buffers())
            if has_storage(tensor)
        }
        code = getattr(cache.__wrapped__, "__code__", None)
        if not storages or code is None:
            continue
        path, line = code.co_filename, code.co_firstlineno
        kinds = ", ".join(sorted({type(module).__name__ for module in lost.values()}))
        chain = f"the lru_cache of {cache.__wrapped__.__qualname__} -> its key -> {kinds}"
        found.append(core.Growth(core.CACHE, path, line, line_text(path, line), num_bytes=sum(storages.values()), per_step=False, chain=chain))  # fmt: skip
    return found


def _find_graph_cycles(heap: Heap, ledger: Ledger) -> list[core.Growth]:
    owners = {key: owner for key, owner in heap.grads.items() if owner.grad is not None and has_graph(owner.grad)}
    chains = holders.find_holders(heap, list(owners.values()))
    lost = [owner for owner, chain in zip(owners.values(), chains, strict=True) if not chain.root]
    sizes: dict[int, int] = {}
    num_lost = 0
    place = _created(ledger)
    for owner in lost:
        assert owner.grad is not None
        graph = walk(owner.grad)
        saved = saved_storages(graph.nodes)
        if owner.untyped_storage()._cdata not in saved:  # the graph does not lead back to it
            continue
        num_lost += 1
        for key in (*saved, owner.grad.untyped_storage()._cdata):
            birth = ledger.birth_by_key(key)
            if birth is not None:
                sizes[key] = birth.nbytes
                place = place or birth.site.place
    if not sizes or place is None:
        return []
    total = format_size(sum(sizes.values()))
    chain = f"parameter -> .grad -> its graph -> the same parameter ({num_lost} times so far, {total})"
    per_step = sum(sizes.values()) // num_lost
    return [core.Growth(core.GRAPH_CYCLE, *place, line_text(*place), num_bytes=per_step, num_steps=num_lost, chain=chain)]
