"""Who holds an object: the chain of references from a named root (a local or global name) down to it.

Breadth first, upwards: one `gc.get_referrers` over the whole frontier a level, so its cost is that of a scan of the collector's
objects (about 15 ms for 170,000) times the depth of the chains. Tensors that only autograd's graph holds are looked up in the graphs
(`graphs`). Nothing found is kept: a chain is made of words, and the containers to watch are handed out for one iteration.
"""

from __future__ import annotations

import collections
import gc
import inspect
import itertools
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from memfit.engine.frames import read_locals
from memfit.measurement.births import has_storage
from memfit.measurement.graphs import Graph, grad_of, has_graph, saved_storages, walk
from memfit.measurement.loops import LoopFinder, Token
from memfit.measurement.naming import CACHE, join_words, key_in, name_edges

UNKNOWN = "C++ or another thread"  # or what a function is still putting together
MAX_DEPTH = 14
MAX_OBJECTS = 20_000  # visited upwards
MAX_HEADS = 200  # tensors with a graph that are looked at
MAX_WALKED = 200_000  # nodes, all heads together

CONTAINERS = (list, dict, set, collections.deque)


@dataclass
class Chain:
    """The references from a root to an object.

    words: one each, the root's name first; root: where that name is, 'train()' or '__main__'; '' where no root was found.
    objects: what they stand for, from the root's object to the target. Let go of it soon.
    is_ring: the way upwards came back to an object it had passed, and no root was found: garbage for the cycle collector.
    head: the tensor whose graph holds the target, or None. graph: what of the graph lies between, in words.
    """

    words: list[str] = field(default_factory=list)
    root: str = ""
    objects: list[Any] = field(default_factory=list)
    is_ring: bool = False
    head: torch.Tensor | None = None
    graph: str = ""

    @property
    def name(self) -> str:
        """The root and its attributes, without indices: the same for all elements of one list."""
        return "".join(word for word in self.words if not word.startswith("[") or word.startswith("['")) + f" in {self.root}"

    @property
    def text(self) -> str:
        """'`log.history['out'][2]` in train()', and what follows if the way goes through more than names."""
        first, *rest = join_words(self.words) or [UNKNOWN]
        return " -> ".join([f"`{first}` in {self.root}" if self.root else first, *rest])


@dataclass
class Heap:
    """Names and tensors that exist now, taken once for several searches. Holds tensors: drop it at once."""

    frames: list[types.FrameType]
    names: dict[int, tuple[str, str]]  # id of a value: (name, where) in a running frame
    globals: dict[int, str]  # id of a module's namespace: the module's name
    tensors: list[torch.Tensor]
    by_storage: dict[int, list[torch.Tensor]]
    grads: dict[int, torch.Tensor]  # id of a gradient: its parameter
    graphs: list[Graph]
    dead_frames: list[types.FrameType]  # with a token, of calls that are over (a running frame is not the collector's yet)
    caches: list[Any]  # of functools.lru_cache
    objects: list[Any]  # all that the collector knew before the search began

    @cached_property
    def existing(self) -> set[int]:
        """The ids of `objects`: what came later is our own and holds nothing. Made where a search is needed at all."""
        return set(map(id, self.objects))

    @property
    def num_nodes(self) -> int:
        """Nodes of all graphs, each counted once."""
        return len({node for graph in self.graphs for node in graph.nodes})


def take_heap(frame: types.FrameType) -> Heap:
    """All of it, as seen from the running frame."""
    frames: list[types.FrameType] = []
    names: dict[int, tuple[str, str]] = {}
    stack: types.FrameType | None = frame
    while stack is not None:
        if not LoopFinder.is_ours(stack.f_code):
            frames.append(stack)
        stack = stack.f_back
    for each in reversed(
        frames
    ):  # the innermost name wins; read before `objects` holds all, or what was read could not be emptied
        if each.f_code.co_flags & inspect.CO_OPTIMIZED:
            for name, value in read_locals(each).items():
                names[id(value)] = (name, f"{each.f_code.co_name}()")
    heap = Heap(frames, names, {}, [], {}, {}, [], [], [], gc.get_objects())
    _sort_objects(heap)
    for module in list(sys.modules.values()):
        space = getattr(module, "__dict__", None)
        if isinstance(space, dict):
            heap.globals[id(space)] = getattr(module, "__name__", "?")
    for each in frames:
        heap.globals.setdefault(id(each.f_globals), str(each.f_globals.get("__name__", "?")))
    for tensor in heap.tensors:
        if has_storage(tensor):
            heap.by_storage.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
        if (gradient := grad_of(tensor)) is not None:
            heap.grads[id(gradient)] = tensor
    return heap


def _sort_objects(heap: Heap) -> None:
    kinds = set(map(type, heap.objects))
    tensors = {kind for kind in kinds if issubclass(kind, torch.Tensor)}
    wanted = {*tensors, CACHE, types.FrameType}
    for each in itertools.compress(heap.objects, map(wanted.__contains__, map(type, heap.objects))):  # 300,000, none in Python
        if type(each) in tensors:
            heap.tensors.append(each)
        elif type(each) is CACHE:
            heap.caches.append(each)
        elif type(each.f_trace) is Token:
            heap.dead_frames.append(each)


def add_graphs(heap: Heap) -> None:
    """Walk the graphs of the tensors that have one, the oldest first."""
    left = MAX_WALKED
    heads = [tensor for tensor in heap.tensors if has_graph(tensor)]
    for head in heads[:: max(1, len(heads) // MAX_HEADS)]:
        graph = walk(head, max(left, 1))
        left -= len(graph.nodes)
        heap.graphs.append(graph)


def find_chains(heap: Heap, storages: Iterable[torch.UntypedStorage]) -> list[Chain]:
    """The chain that holds each storage, in order: through a Python tensor if one leads to a root, else through a graph."""
    keys = [storage._cdata for storage in storages]
    targets = {id(tensor): tensor for key in keys for tensor in heap.by_storage.get(key, ())}
    direct = _search(heap, list(targets.values()))
    chains: list[Chain | None] = []
    orphans: list[int] = []
    for key in keys:
        found = [direct[id(tensor)] for tensor in heap.by_storage.get(key, ()) if id(tensor) in direct]
        best = min((chain for chain in found if chain.root), key=lambda chain: len(chain.words), default=None)
        chains.append(best)
        if best is None:
            orphans.append(key)
    if orphans:
        through = _through_graphs(heap, orphans)
        for index, key in enumerate(keys):
            if chains[index] is None:
                rings = [direct[id(tensor)] for tensor in heap.by_storage.get(key, ()) if id(tensor) in direct]
                chains[index] = through.get(key) or next((ring for ring in rings if ring.is_ring), Chain())
    return [chain or Chain() for chain in chains]


def _through_graphs(heap: Heap, keys: list[int]) -> dict[int, Chain]:
    """Chains to storages that a graph holds, by key. Of several heads the one with the smallest graph: nearest to the cause."""
    if not heap.graphs:
        add_graphs(heap)
    nodes = {node: None for graph in heap.graphs for node in graph.nodes}
    saved = saved_storages(nodes)
    wanted = {key: saved[key] for key in keys if key in saved}
    heads: dict[int, list[Graph]] = {key: [g for g in heap.graphs if node in g.nodes] for key, (node, _) in wanted.items()}
    holders = _search(heap, [graph.head for graphs in heads.values() for graph in graphs])
    found: dict[int, Chain] = {}
    for key, (node, name) in wanted.items():
        rooted = [graph for graph in heads[key] if holders[id(graph.head)].root]
        best = min(rooted, key=lambda graph: len(graph.nodes), default=None)
        words = f"a graph of {{}} nodes -> {type(node).__name__} saved `{name}`"
        if best is not None:
            chain = holders[id(best.head)]
            found[key] = Chain(chain.words, chain.root, chain.objects, head=best.head, graph=words.format(len(best.nodes)))
            continue
        for graph in heads[key]:  # a gradient with a graph that leads back to its own parameter
            owner = heap.grads.get(id(graph.head))
            if owner is not None and any(tensor is owner for each in graph.nodes for tensor in _leaf_of(each)):
                found[key] = Chain(["parameter", ".grad"], is_ring=True, head=graph.head, graph=words.format(len(graph.nodes)))
                break
    return found


def _leaf_of(node: Any) -> Iterator[torch.Tensor]:
    if type(node).__name__ == "AccumulateGrad":
        yield node.variable


def find_holders(heap: Heap, objects: list[Any]) -> list[Chain]:
    """The chain to each Python object."""
    found = _search(heap, objects)
    return [found[id(each)] for each in objects]


def _search(heap: Heap, targets: list[Any]) -> dict[int, Chain]:
    """Chains to the targets by id. One search for all of them."""
    seen: dict[int, Any] = {id(each): each for each in targets}
    holders: dict[int, list[int]] = {}  # id: ids of what refers to it
    roots: dict[int, tuple[str, str]] = {}  # id: a name for it, and the function or module where
    frontier = list(seen.values())
    ours = {id(seen), id(holders), id(heap), *map(id, vars(heap).values())}  # an address among `existing` may be theirs by now
    for _ in range(MAX_DEPTH):
        for each in frontier:
            if id(each) in heap.names:
                roots[id(each)] = heap.names[id(each)]
        wanted = {id(each): each for each in frontier if id(each) not in roots}
        following: list[Any] = []
        passing = ours | {id(frontier), id(wanted), id(following)}

        def add(child: Any, holder: Any, following: list[Any] = following) -> None:
            holders.setdefault(id(child), []).append(id(holder))
            if id(holder) not in seen:
                seen[id(holder)] = holder
                following.append(holder)

        for each in wanted.values():
            if id(each) in heap.grads:
                add(each, heap.grads[id(each)])
        for holder in gc.get_referrers(*wanted.values()) if wanted else ():
            if (
                id(holder) not in heap.existing
                or id(holder) in passing
                or (isinstance(holder, types.FrameType) and holder in heap.frames)
            ):
                continue
            for child in gc.get_referents(holder):
                if id(child) not in wanted:
                    continue
                if id(holder) in heap.globals:
                    roots.setdefault(id(child), (str(key_in(holder, child)), heap.globals[id(holder)]))
                else:
                    add(child, holder)
        frontier = following
        if not frontier or len(seen) > MAX_OBJECTS or all(_climb(id(each), holders, roots)[0][0] in roots for each in targets):
            break
    found = {}
    for each in targets:
        way, is_ring = _climb(id(each), holders, roots)
        chain = Chain(objects=[seen[key] for key in way], is_ring=is_ring and not frontier)
        name, where = roots.get(way[0], (f"a {type(chain.objects[0]).__name__}", ""))
        chain.root = where
        chain.words = [name, *name_edges(heap.existing, chain.objects)]
        found[id(each)] = chain
    seen.clear()  # should it hold itself after all, it must not live on with all it holds
    return found


def _climb(start: int, holders: dict[int, list[int]], roots: dict[int, Any]) -> tuple[list[int], bool]:
    """The shortest way from a root to start; without one, a ring through start or through what holds it, as (way, True)."""
    came: dict[int, int] = {start: 0}
    queue = collections.deque([start])
    ring: list[int] = []
    while queue:
        each = queue.popleft()
        if each in roots:
            return _way(each, start, came), False
        for holder in holders.get(each, ()):
            if holder not in came:
                came[holder] = each
                queue.append(holder)
            elif not ring:
                way = _way(each, start, came)
                if holder in way:
                    ring = [holder, *way]
    return ring or [start], bool(ring)


def _way(top: int, start: int, came: dict[int, int]) -> list[int]:
    way = [top]
    while way[-1] != start:
        way.append(came[way[-1]])
    return way


def name_ring(heap: Heap, chain: Chain) -> str:
    """The ring of a chain that is one, from an instance back to it: 'Net._forward_hooks[0] -> function log -> closure -> the same Net'."""
    ring = chain.objects[
        : 1 + next(index for index in range(1, len(chain.objects)) if chain.objects[index] is chain.objects[0])
    ]
    plain = (dict, list, tuple, set, types.CellType, types.FunctionType, types.MethodType, collections.deque)
    turn = next((index for index, each in enumerate(ring) if not isinstance(each, plain)), 0)
    ring = [*ring[turn:-1], *ring[:turn], ring[turn]]
    name = type(ring[0]).__name__
    return " -> ".join([*join_words([name, *name_edges(heap.existing, ring)]), f"the same {name}"])
