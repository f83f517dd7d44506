"""What is known, without running, of the value a name holds: a tensor with or without a graph, a module and its layers, a list.

One frozen record for all kinds; `join` is what holds on either of two paths.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memfit.diagnosis.lints.program import Class, Function

NO_GRAPH, MAY, GRAPH = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Value:
    """kind: 'tensor', 'module', 'object', 'optimizer', 'scaler', 'loader', 'list', 'dict', 'number', 'text', 'function', 'class',
    'error' (a caught exception), 'checkpoint' (from torch.load), 'parameters', 'none', 'unknown'.

    graph: NO_GRAPH, MAY or GRAPH: whether holding it holds an autograd graph. origin: the expression whose storage this is; aliases
    and views share it. op: the last part of what made it. roots: the module calls its graph goes through. carried: the graph
    is from an earlier turn of the loop. plain: data that certainly needs no gradient. leaf: needs a gradient and has no history.
    view: part of a larger tensor. parts: names of all layers inside a module or list. items: its elements in order, where
    known; element: what each is like otherwise. number: a known integer. num_parameters: of a module, where sizes are visible.
    owners: of an optimizer or parameters, the modules they are of. target: the function or class of this file it is.
    """

    kind: str = "unknown"
    graph: int = NO_GRAPH
    origin: ast.AST | None = None
    op: str = ""
    roots: frozenset[ast.AST] = frozenset()
    carried: bool = False
    plain: bool = False
    leaf: bool = False
    view: bool = False
    frozen: bool = False
    inplace: bool = False
    dtype: str = ""
    parts: frozenset[str] = frozenset()
    items: tuple[Value, ...] | None = None
    element: Value | None = None
    number: int | None = None
    num_parameters: int | None = None
    owners: frozenset[str] = frozenset()
    target: Function | Class | None = None
    made_by: ast.AST | None = None


UNKNOWN = Value()
NUMBER = Value("number")
TEXT = Value("text")
NONE = Value("none")
DATA = Value("tensor", plain=True)
_SAME = ("kind", "origin", "op", "number", "num_parameters", "target", "made_by", "dtype", "items")


def join(left: Value, right: Value) -> Value:
    """What holds whichever of two paths was taken: graphs may be there if one has it; facts must agree."""
    if left is right or left == right:
        return left
    if left.kind in ("number", "none") and right.kind not in ("number", "none"):
        left, right = right, left
    empty = right.kind in ("number", "none")  # `loss = 0` or None before the first turn
    same = {name: getattr(left, name) for name in _SAME} if empty else {}
    if not empty:
        for name in _SAME:
            mine, other = getattr(left, name), getattr(right, name)
            same[name] = mine if mine == other else Value.__dataclass_fields__[name].default
    return Value(
        **same,
        graph=max(left.graph, right.graph),
        roots=left.roots | right.roots,
        carried=left.carried or right.carried,
        plain=left.plain and (right.plain or empty),
        leaf=left.leaf and right.leaf,
        view=left.view and right.view,
        frozen=left.frozen and right.frozen,
        parts=left.parts | right.parts,
        owners=left.owners | right.owners,
        element=left.element if left.element == right.element else _join_elements(left, right),
    )


def _join_elements(left: Value, right: Value) -> Value | None:
    first, second = left.element, right.element
    return first or second if first is None or second is None else join(first, second)


def element_of(value: Value) -> Value:
    """What one gets by iterating over or indexing `value` at an unknown place."""
    if value.items:
        found = value.items[0]
        for item in value.items[1:]:
            if item is not found:
                found = join(found, item)
        return found
    if value.element is not None:
        return value.element
    if value.kind == "tensor":
        return replace(value, view=True, leaf=False)
    if value.kind in ("loader", "number", "text"):
        return Value(plain=value.kind == "loader") if value.kind == "loader" else NUMBER
    return Value(graph=value.graph, roots=value.roots, carried=value.carried, plain=value.plain, parts=value.parts)


def with_graph(values: list[Value], **facts: object) -> Value:
    """A new tensor computed from `values`: their graphs together."""
    graph, roots, carried = NO_GRAPH, frozenset[ast.AST](), False
    for value in values:
        graph = max(graph, value.graph)
        if value.roots:
            roots |= value.roots
        carried = carried or value.carried
    plain = (
        graph == NO_GRAPH and bool(values) and all(value.plain or value.kind in ("number", "none", "text") for value in values)
    )
    return Value("tensor", graph, roots=roots, carried=carried, plain=plain, **facts)  # type: ignore[arg-type]
