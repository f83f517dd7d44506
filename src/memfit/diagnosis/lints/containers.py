"""Containers: what a list carries of its elements, and what method calls do to others: a store, a backward pass, a step."""

from __future__ import annotations

import ast
from dataclasses import replace

from memfit.diagnosis.lints.facts import words
from memfit.diagnosis.lints.program import dotted
from memfit.diagnosis.lints.values import GRAPH, Value, element_of, join, with_graph
from memfit.diagnosis.lints.walk import Walk

LONGEST = 4096  # elements of a list that are kept apart
_STORES = words("append appendleft add extend extendleft insert setdefault update put")


_EMPTIES = words("clear pop popleft reset")


def note_effects(
    node: ast.Call, function: ast.Attribute, receiver: Value, args: tuple[Value, ...], keywords: dict[str, Value], walk: Walk
) -> None:
    """What a method call does to others: a backward pass, an element stored, a container emptied."""
    method = function.attr
    owner = dotted(function.value)
    if method in ("backward", "manual_backward"):
        # loss.backward(); accelerator.backward(loss), self.manual_backward(loss)
        helper = (bool(args) and receiver.graph < GRAPH and method != "backward") or (
            bool(args) and owner.rpartition(".")[2] in ("accelerator", "fabric", "engine", "model_engine", "strategy")
        )
        what, value = (node.args[0], args[0]) if helper else (function.value, receiver)
        walk.function.trains = True
        walk.record("backward", dotted(what), node, value, base=receiver)
    elif method == "step" and (
        receiver.kind in ("optimizer", "scaler") or (receiver.kind == "unknown" and "opt" in owner.lower())
    ):
        walk.record("step", owner, node, receiver, args=args)
    elif method in _STORES and args and receiver.kind not in ("tensor", "module", "optimizer", "scaler"):
        name = owner or dotted(function.value.value if isinstance(function.value, ast.Subscript) else function.value)
        value = args[-1]
        if name:
            walk.record("store", name, node, value, base=receiver)
            grow(name, value, walk)
    elif method in _EMPTIES and owner:
        walk.record("empty", owner, node, receiver)


def grow(name: str, value: Value, walk: Walk) -> None:
    """A list that got an element carries the element's graph and layers."""
    old = walk.env.get(name)
    if old is not None and old.kind in ("list", "dict"):
        element = value if old.element is None and not old.items else join(element_of(old), value)
        walk.env[name] = replace(
            old,
            items=None,
            element=element,
            graph=max(old.graph, value.graph),
            roots=old.roots | value.roots,
            parts=old.parts | value.parts,
        )


def concatenate(left: Value, right: Value) -> Value:
    """Two lists one after the other."""
    items = left.items + right.items if left.items is not None and right.items is not None else None
    if items is not None and len(items) > LONGEST:
        items = None
    elements = [value for value in (left.element, right.element) if value is not None]
    return Value(
        "list",
        max(left.graph, right.graph),
        roots=left.roots | right.roots,
        parts=left.parts | right.parts,
        items=items,
        element=elements[0] if elements else None,
        owners=left.owners | right.owners,
    )


def make_container(kind: str, values: list[Value], items: tuple[Value, ...] | None, node: ast.AST) -> Value:
    """A list or dictionary display: it carries the graphs, layers and owners of its elements."""
    found = with_graph(values)
    parts = frozenset[str]().union(*(value.parts for value in values))
    owners = frozenset[str]().union(*(value.owners for value in values))
    return Value(
        kind, found.graph, roots=found.roots, carried=found.carried, parts=parts, items=items, owners=owners, made_by=node
    )
