"""Where in the source a reference is kept, for the kinds that a run cannot show a line for: read with `ast`.

Each function gives a 1-based line, or None where the source is not there or does not say.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator


def find_exception_keeper(path: str, raised_line: int) -> int | None:
    """The line that keeps an exception: in the handler of the `try` that holds `raised_line`, the first use of its name as a value."""
    handlers = [
        handler
        for node in _walk(path)
        if isinstance(node, ast.Try) and node.body[0].lineno <= raised_line <= (node.body[-1].end_lineno or raised_line)
        for handler in node.handlers
        if handler.name
    ]
    for handler in reversed(handlers):  # the innermost try comes last
        for statement in handler.body:
            for node in ast.walk(statement):
                if isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) and _is_name(node.value, handler.name):
                    return node.lineno
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    is_store = node.func.attr in ("append", "add", "insert", "put", "setdefault", "appendleft")
                    if is_store and any(_is_name(each, handler.name) for each in node.args):
                        return node.lineno
    return None


def find_hook_registration(path: str, function: str, defined_line: int) -> int | None:
    """The line of `….register_…hook(function)`; a lambda is known by the line where it is written."""
    for node in _walk(path):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.startswith("register_"):
            for each in node.args:
                if _is_name(each, function) or (isinstance(each, ast.Attribute) and each.attr == function):
                    return node.lineno
                if isinstance(each, ast.Lambda) and each.lineno == defined_line:
                    return node.lineno
    return None


def find_attribute_store(path: str, kind: str, attribute: str) -> int | None:
    """The line where class `kind` sets, or adds to, its `attribute`; one that puts `self` into it first, then any in the file."""
    found: list[tuple[int, int]] = []
    for node in _walk(path):
        if isinstance(node, ast.ClassDef):
            for inner in ast.walk(node):
                if (line := _stores(inner, attribute)) is not None:
                    says_self = any(_is_name(each, "self") for each in _values(inner))
                    found.append(((0 if node.name == kind else 2) + (0 if says_self else 1), line))
        elif (line := _stores(node, attribute)) is not None:
            found.append((4, line))
    return min(found)[1] if found else None


def _walk(path: str) -> Iterator[ast.AST]:
    try:
        yield from ast.walk(ast.parse("".join(linecache.getlines(path))))
    except (SyntaxError, ValueError):
        return


def _is_name(node: ast.AST | None, name: str | None) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _stores(node: ast.AST, attribute: str) -> int | None:
    if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(isinstance(each, ast.Attribute) and each.attr == attribute for each in targets):
            return node.lineno
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        holder = node.func.value
        if isinstance(holder, ast.Attribute) and holder.attr == attribute and node.args:
            return node.lineno
    return None


def _values(node: ast.AST) -> Iterator[ast.AST]:
    """The names in what is stored, not in where it is stored."""
    stored = node.args if isinstance(node, ast.Call) else [node.value] if hasattr(node, "value") and node.value else []
    for each in stored:
        for inner in ast.walk(each):
            if isinstance(inner, ast.Name):
                yield inner
