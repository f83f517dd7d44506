"""What one statement of Python reads, binds and deletes, by name. `core.liveness` puts them together."""

from __future__ import annotations

import ast

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def reads(*nodes: ast.AST | None) -> frozenset[str]:
    """Names read somewhere in the nodes: more than are, where a comprehension has names of its own."""
    found = set()
    for root in nodes:
        for node in ast.walk(root) if root is not None else ():
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                found.add(node.id)
            elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
    return frozenset(found)


def binds(*nodes: ast.AST | None) -> dict[str, int]:
    """Names that may be bound in the nodes, scopes and comprehensions inside them left out, and the line each is bound in."""
    found: dict[str, int] = {}
    stack = [node for node in nodes if node is not None]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found[node.id] = node.lineno
        elif isinstance(node, (ast.MatchAs, ast.MatchStar)) and node.name:
            found[node.name] = node.lineno
        elif isinstance(node, ast.MatchMapping) and node.rest:
            found[node.rest] = node.lineno
        if isinstance(node, ast.comprehension):
            stack += [node.iter, *node.ifs]  # its target is its own; what `:=` binds in it is ours
        elif not isinstance(node, (*_SCOPES, ast.Lambda)):
            stack += ast.iter_child_nodes(node)
    return found


def targets(stmt: ast.stmt) -> dict[str, int]:
    """Names a simple statement binds for sure once it has run."""
    if isinstance(stmt, ast.Assign):
        return binds(*stmt.targets)
    if isinstance(stmt, ast.AugAssign) or (isinstance(stmt, ast.AnnAssign) and stmt.value is not None):
        return binds(stmt.target)
    return {}


def deletes(stmt: ast.AST) -> frozenset[str]:
    return frozenset(n.id for n in ast.walk(stmt) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Del))


def never_ours(body: list[ast.stmt]) -> set[str]:
    """Names bound to what is no tensor: functions, classes, modules, exceptions, numbers and texts; and `self`."""
    names = {"self", "cls"} | _numbers(body)
    for root in body:
        for node in ast.walk(root):
            if isinstance(node, _SCOPES):
                names.add(node.name)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ExceptHandler) and node.name:
                names.add(node.name)
            elif isinstance(node, (ast.Global, ast.Nonlocal)):
                names |= set(node.names)
    return names


def _numbers(body: list[ast.stmt]) -> set[str]:
    """Names that are only ever bound to a number or a text: a loop over `range` would pay for asking each time."""
    nodes = [node for root in body for node in ast.walk(root)]
    numbers: set[ast.AST] = set()
    for node in nodes:
        if isinstance(node, (ast.Assign, ast.AugAssign)) and _is_number(node.value):
            numbers.update(node.targets if isinstance(node, ast.Assign) else [node.target])
        elif isinstance(node, ast.For) and isinstance(node.iter, ast.Call) and isinstance(node.iter.func, ast.Name):
            if node.iter.func.id == "range":
                numbers.add(node.target)
            elif node.iter.func.id == "enumerate" and isinstance(node.target, ast.Tuple):
                numbers.add(node.target.elts[0])
    others = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store) and n not in numbers}
    return {node.id for node in numbers if isinstance(node, ast.Name)} - others


def _is_number(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in ("len", "int", "float", "bool", "str", "range")
    return isinstance(node, (ast.Constant, ast.JoinedStr))
