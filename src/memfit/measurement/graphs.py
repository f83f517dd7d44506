"""What autograd's graphs hold: nodes, and the storages they saved for a backward pass that may never come.

Walked from the tensors that have a graph, through `grad_fn.next_functions`. Saved tensors are read only where no hook of the program's
(or of `torch.utils.checkpoint`) packed them: unpacking those would run the program's code. What such a node holds stays unnamed.
Cost: about 2 us a node; at most MAX_NODES are walked.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from memfit.engine.private import read_saved
from memfit.measurement.births import has_storage

MAX_NODES = 100_000


@dataclass
class Graph:
    """The graph of one tensor: nodes in walking order, by identity."""

    head: torch.Tensor
    nodes: dict[Any, None] = field(default_factory=dict)


def walk(head: torch.Tensor, max_nodes: int = MAX_NODES) -> Graph:
    """All nodes that the tensor's backward pass would visit, nearest first."""
    graph = Graph(head)
    level: list[Any] = [head.grad_fn]
    while level and len(graph.nodes) < max_nodes:
        following: list[Any] = []
        for node in level:
            if node is not None and node not in graph.nodes:
                graph.nodes[node] = None
                following.extend(child for child, _ in node.next_functions)
        level = following
    return graph


def saved_storages(nodes: Iterable[Any]) -> dict[int, tuple[Any, str]]:
    """What the nodes hold, as storage key (`_cdata`, good while the storage lives): (node, name of the saved tensor)."""
    found: dict[int, tuple[Any, str]] = {}
    for node in nodes:
        for name, tensor in read_saved(node):
            if has_storage(tensor):
                found.setdefault(tensor.untyped_storage()._cdata, (node, name))
    return found


def has_graph(tensor: Any) -> bool:
    """Whether it has been computed under autograd. (A view of a leaf of another mode raises; it counts as none.)"""
    try:
        return isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None
    except RuntimeError:
        return False


def grad_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Its gradient, without the warning that PyTorch gives for tensors that cannot have one."""
    return tensor.grad if tensor.is_leaf or tensor.retains_grad else None
