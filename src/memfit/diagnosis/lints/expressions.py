"""Evaluating an expression without running it: the value it has, and the events of evaluating it, in Python's order."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from dataclasses import replace

from memfit.diagnosis.lints import facts
from memfit.diagnosis.lints.calls import answer
from memfit.diagnosis.lints.containers import LONGEST, concatenate, grow, make_container, note_effects
from memfit.diagnosis.lints.program import dotted
from memfit.diagnosis.lints.values import NO_GRAPH, NONE, NUMBER, TEXT, UNKNOWN, Value, element_of, join, with_graph
from memfit.diagnosis.lints.walk import Walk

_ARITHMETIC: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


def evaluate(node: ast.AST | None, walk: Walk) -> Value:
    """The value of an expression; unknown kinds of expressions are UNKNOWN, but what is inside them is still seen."""
    if node is None:
        return UNKNOWN
    handler = _HANDLERS.get(type(node))
    if handler is not None:
        return handler(node, walk)
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            evaluate(child, walk)
    return UNKNOWN


def _constant(node: ast.Constant, walk: Walk) -> Value:
    if node.value is None:
        return NONE
    if isinstance(node.value, (str, bytes)):
        return TEXT
    return Value("number", number=node.value) if type(node.value) is int else NUMBER


def _name(node: ast.Name, walk: Walk) -> Value:
    value = walk.look_up(node.id)
    if value is None:
        return UNKNOWN
    walk.record("read", node.id, node, value)
    return value


def _attribute(node: ast.Attribute, walk: Walk) -> Value:
    name = dotted(node)
    root = name.partition(".")[0]
    if name and root in walk.program.imports and root not in walk.env:
        return UNKNOWN
    if name and (found := walk.look_up(name)) is not None:
        walk.record("read", name, node, found)
        if root in walk.env:
            walk.record("read", root, node, walk.env[root])
        return found
    base = evaluate(node.value, walk)
    if name:
        walk.record("read", name, node, UNKNOWN)
    if node.attr in ("data", "grad"):
        return replace(base, kind="tensor", graph=NO_GRAPH, roots=frozenset(), carried=False, leaf=False, op="cut")
    if node.attr in facts.CUTS or base.kind in ("module", "object", "class", "function", "optimizer", "number", "text"):
        return UNKNOWN
    if base.kind == "tensor" and node.attr in facts.VIEWS:
        return base
    # A field of a model's output holds what the output holds.
    return Value(graph=base.graph, roots=base.roots, carried=base.carried, plain=base.plain, origin=base.origin and node)


def _call(node: ast.Call, walk: Walk) -> Value:
    function = node.func
    name = walk.program.resolve(function)
    if not name and isinstance(function, ast.Attribute):
        name = f".{function.attr}"  # a method of what another call returned
    callee, receiver = UNKNOWN, UNKNOWN
    root = dotted(function).partition(".")[0]
    imported = root in walk.program.imports and root not in walk.env
    if isinstance(function, ast.Name):
        callee = UNKNOWN if imported else evaluate(function, walk)
    elif isinstance(function, ast.Attribute):
        if not imported:
            found = walk.look_up(dotted(function)) if dotted(function) else None
            if found is not None and found.kind in ("module", "function", "class"):
                callee = found
                evaluate(function.value, walk)
            else:
                receiver = evaluate(function.value, walk)
    else:
        callee = evaluate(function, walk)
    args = tuple(_argument(arg, walk) for arg in node.args)
    keywords = {item.arg or "**": evaluate(item.value, walk) for item in node.keywords}
    result = answer(node, name, callee, receiver, args, keywords, walk)
    base = callee if callee is not UNKNOWN else receiver
    walk.record("call", name, node, result, base=base, args=args, keywords=keywords)
    if isinstance(function, ast.Attribute):
        note_effects(node, function, receiver, args, keywords, walk)
    return result


def _argument(node: ast.expr, walk: Walk) -> Value:
    if isinstance(node, ast.Starred):
        value = evaluate(node.value, walk)
        return value if value.kind == "list" else replace(value, kind="list")
    return evaluate(node, walk)


def _binary(node: ast.BinOp, walk: Walk) -> Value:
    left, right = evaluate(node.left, walk), evaluate(node.right, walk)
    if left.kind == right.kind == "number":
        fold = _ARITHMETIC.get(type(node.op))
        if fold is not None and left.number is not None and right.number is not None:
            if isinstance(node.op, ast.FloorDiv) and right.number == 0:
                return NUMBER
            return Value("number", number=fold(left.number, right.number))
        return NUMBER
    if left.kind == "text" or right.kind == "text":
        return TEXT
    if left.kind == right.kind == "list" and isinstance(node.op, ast.Add):
        return concatenate(left, right)
    if left.kind == "list" and isinstance(node.op, ast.Mult) and left.items and right.number is not None:
        return replace(left, items=left.items * right.number if right.number <= LONGEST else None)
    found = with_graph([left, right], origin=node, made_by=node)
    if "tensor" not in (left.kind, right.kind) and found.graph == NO_GRAPH:
        return UNKNOWN
    if walk.grad is False:
        return replace(found, graph=NO_GRAPH, roots=frozenset())
    return found


def _unary(node: ast.UnaryOp, walk: Walk) -> Value:
    value = evaluate(node.operand, walk)
    if isinstance(node.op, ast.Not):
        return UNKNOWN
    if value.kind == "tensor" or value.graph:
        return replace(value, origin=node, op="neg", leaf=False)
    return NUMBER if value.kind == "number" else UNKNOWN


def _conditional(node: ast.IfExp, walk: Walk) -> Value:
    evaluate(node.test, walk)
    return join(evaluate(node.body, walk), evaluate(node.orelse, walk))


def _boolean(node: ast.BoolOp, walk: Walk) -> Value:
    found = evaluate(node.values[0], walk)
    for value in node.values[1:]:
        found = join(found, evaluate(value, walk))
    return found


def _subscript(node: ast.Subscript, walk: Walk) -> Value:
    base = evaluate(node.value, walk)
    index = evaluate(node.slice, walk)
    if base.kind == "tensor":
        part = _is_basic_index(node.slice)
        return replace(base, view=base.view or part, leaf=False) if part else replace(base, origin=node, leaf=False)
    if base.items is not None and index.number is not None and -len(base.items) <= index.number < len(base.items):
        return base.items[index.number]
    if base.items is not None and isinstance(node.slice, ast.Slice):
        low, high = evaluate(node.slice.lower, walk).number, evaluate(node.slice.upper, walk).number
        return replace(base, items=base.items[low:high])
    if base.kind == "checkpoint":
        return base
    return element_of(base)


def _is_basic_index(index: ast.expr) -> bool:
    """Whether indexing with it gives a view: numbers, slices, None, `...`; a tensor or list as index copies."""
    parts = index.elts if isinstance(index, ast.Tuple) else [index]
    basic = (ast.Slice, ast.Constant, ast.UnaryOp)
    if not all(isinstance(part, basic) for part in parts):
        return False
    whole = ast.dump(ast.Slice())
    return any(ast.dump(part) != whole for part in parts)


def _display(node: ast.List | ast.Tuple | ast.Set, walk: Walk) -> Value:
    items: list[Value] | None = []
    values = []
    for element in node.elts:
        value = evaluate(element.value if isinstance(element, ast.Starred) else element, walk)
        values.append(value)
        if isinstance(element, ast.Starred):
            items = items + list(value.items) if items is not None and value.items is not None else None
        elif items is not None:
            items.append(value)
    return make_container("list", values, tuple(items) if items is not None else None, node)


def _dictionary(node: ast.Dict, walk: Walk) -> Value:
    values = []
    for key, item in zip(node.keys, node.values, strict=True):
        evaluate(key, walk)
        values.append(evaluate(item, walk))
    return make_container("dict", values, tuple(values), node)


def _comprehension(node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp, walk: Walk) -> Value:
    outer = dict(walk.env)
    count: int | None = 1
    owners = frozenset[str]()
    for generator in node.generators:
        source = evaluate(generator.iter, walk)
        owners |= source.owners
        length = source.number if source.number is not None else len(source.items) if source.items is not None else None
        count = count * length if count is not None and length is not None and not generator.ifs else None
        bind_target(generator.target, element_of(source), walk)
        for test in generator.ifs:
            evaluate(test, walk)
    element = evaluate(node.value if isinstance(node, ast.DictComp) else node.elt, walk)
    walk.env = outer
    items = (element,) * count if count is not None and 0 < count <= LONGEST else None
    return Value(
        "dict" if isinstance(node, ast.DictComp) else "list",
        element.graph,
        roots=element.roots,
        carried=element.carried,
        parts=element.parts,
        items=items,
        element=element,
        owners=owners,
        number=count,
        made_by=node,
    )


def bind_target(target: ast.expr, value: Value, walk: Walk) -> None:
    """Assigns `value` to a name, attribute, element or tuple of these."""
    if isinstance(target, (ast.Tuple, ast.List)):
        known = value.items if value.items is not None and len(value.items) == len(target.elts) else None
        for position, part in enumerate(target.elts):
            if isinstance(part, ast.Starred):
                part, known = part.value, None
            bind_target(part, known[position] if known else _unpacked(value, part), walk)
    elif isinstance(target, (ast.Name, ast.Attribute)):
        if isinstance(target, ast.Attribute):
            evaluate(target.value, walk)
        name = dotted(target)
        if name:
            walk.bind(name, value, target)
    elif isinstance(target, ast.Subscript):
        base = evaluate(target.value, walk)
        evaluate(target.slice, walk)
        name = dotted(target.value)
        if base.kind == "tensor":
            walk.record("write", "setitem", target, base)
        elif name:
            walk.record("store", name, target, value, base=base)
            grow(name, value, walk)


def _unpacked(value: Value, target: ast.expr) -> Value:
    """One of several results of a call: a tensor with a storage of its own if the call makes tensors."""
    if value.kind == "tensor" and value.items is None:
        return replace(value, leaf=False, view=False, origin=target)
    return element_of(value)


def _lambda(node: ast.Lambda, walk: Walk) -> Value:
    return Value("function", target=walk.program.by_node.get(node), made_by=node)


def _named(node: ast.NamedExpr, walk: Walk) -> Value:
    value = evaluate(node.value, walk)
    walk.bind(node.target.id, value, node.target)
    return value


def _compare(node: ast.Compare, walk: Walk) -> Value:
    evaluate(node.left, walk)
    for part in node.comparators:
        evaluate(part, walk)
    return UNKNOWN


def _inner(node: ast.Await | ast.Starred | ast.FormattedValue, walk: Walk) -> Value:
    return evaluate(node.value, walk)


def _yield(node: ast.Yield | ast.YieldFrom, walk: Walk) -> Value:
    value = evaluate(node.value, walk)
    walk.record("return", "yield", node, value)
    return UNKNOWN


def _text(node: ast.JoinedStr, walk: Walk) -> Value:
    for part in node.values:
        evaluate(part, walk)
    return TEXT


_HANDLERS: dict[type[ast.AST], Callable[..., Value]] = {
    ast.Constant: _constant,
    ast.Name: _name,
    ast.Attribute: _attribute,
    ast.Call: _call,
    ast.BinOp: _binary,
    ast.UnaryOp: _unary,
    ast.IfExp: _conditional,
    ast.BoolOp: _boolean,
    ast.Subscript: _subscript,
    ast.List: _display,
    ast.Tuple: _display,
    ast.Set: _display,
    ast.Dict: _dictionary,
    ast.ListComp: _comprehension,
    ast.SetComp: _comprehension,
    ast.GeneratorExp: _comprehension,
    ast.DictComp: _comprehension,
    ast.Lambda: _lambda,
    ast.NamedExpr: _named,
    ast.Compare: _compare,
    ast.Await: _inner,
    ast.Starred: _inner,
    ast.Yield: _yield,
    ast.YieldFrom: _yield,
    ast.JoinedStr: _text,
}
