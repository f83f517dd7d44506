"""Reads that no name shows: what in a module's source may read a variable without writing its name there.

`core.liveness` is right only where every read of a name stands in the source as that name. Frames, debuggers, `eval`, objects and
addresses by number and work of other streams or processes break this; where their words occur, nothing is let go. A list of words
refuses too much (a method of one's own called `data_ptr`) and that is the side to err on.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

_ANYWHERE = frozenset(
    [
        # frames, and what walks them
        *("_getframe", "currentframe", "getouterframes", "getinnerframes", "getargvalues", "f_locals", "f_globals", "f_back"),
        *("tb_frame", "gi_frame", "cr_frame", "ag_frame", "walk_stack", "walk_tb", "getgeneratorlocals", "getcoroutinelocals"),
        *("getclosurevars", "__globals__", "__closure__"),
        # debuggers and tracers
        *("settrace", "setprofile", "breakpoint", "set_trace", "post_mortem", "pdb", "ipdb", "pudb", "debugpy", "IPython"),
        # objects and bytes by number; engines that look names up in their caller
        *("get_referrers", "get_objects", "data_ptr", "_cdata", "ctypes", "cffi", "numexpr", "duckdb"),
        *("__array_interface__", "__cuda_array_interface__"),
        # compilers of bytecode, which cannot compile a release
        *("numba",),
        # work that goes on while the program does other things
        *("Stream", "ExternalStream", "stream", "record_stream", "CUDAGraph", "make_graphed_callables"),
        *("isend", "irecv", "batch_isend_irecv", "share_memory_", "SimpleQueue", "JoinableQueue", "Pipe"),
    ]
)
_MAIN = "__main__"  # whoever has the module has all its variables
_KEYWORDS = frozenset(["async_op", "capture_locals", "show_locals"])
_NUMBERS = ("id", "hash")  # a tensor's hash is its id: a new tensor may get a dead one's
_BY_TEXT = ("eval", "exec")
_OF_SCOPE = ("vars", "dir")  # without an argument


def find_unseen_read(tree: ast.Module) -> str:
    """What in the module may read any variable of the program without its name, as 'line 12: data_ptr'; '' where nothing does."""
    bound = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    bound |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    compared = {id(part) for node in ast.walk(tree) if isinstance(node, ast.Compare) for part in ast.walk(node)}
    for node in ast.walk(tree):
        for word in _words(node):
            if word in _ANYWHERE or word == _MAIN:
                return _say(node, word)
        if isinstance(node, ast.Constant) and node.value == _MAIN and id(node) not in compared:  # not `__name__ == "__main__"`
            return _say(node, _MAIN)
        if isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Name) and called.id in _NUMBERS:
                return _say(node, called.id)
            if isinstance(called, ast.Attribute) and node.args:
                is_text = isinstance(node.args[0], ast.JoinedStr) or (
                    isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str)
                )
                if called.attr in _BY_TEXT or (called.attr == "query" and is_text):  # pandas; `model.eval()` has no argument
                    return _say(node, called.attr)
            if _dotted(called) in ("inspect.stack", "inspect.trace"):
                return _say(node, _dotted(called))
            for keyword in node.keywords:
                if keyword.arg in _KEYWORDS:
                    return _say(node, keyword.arg)
        elif isinstance(node, ast.Name) and node.id in _NUMBERS and node.id not in bound:  # map(id, tensors)
            return _say(node, node.id)
    return ""


def reads_its_locals(function: ast.AST) -> bool:
    """Whether the function, or one inside it, may read its local variables by name: `locals()`, `vars()`, `eval`, `exec`."""
    return any(_is_scope_read(node) for node in ast.walk(function))


def reads_its_globals(tree: ast.Module) -> bool:
    """Whether the module may read its global variables by name, or hands out the dictionary that has them."""
    for node in ast.walk(tree):
        if _is_scope_read(node) or (isinstance(node, ast.Name) and node.id in ("globals", "fire")):
            return True
        if _dotted(node) == "sys.modules":
            return True
        if isinstance(node, (ast.Import, ast.ImportFrom)) and not {"__main__", "modules", "fire"}.isdisjoint(_words(node)):
            return True
    return False


def _is_scope_read(node: ast.AST) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _OF_SCOPE:
        return not node.args
    return isinstance(node, ast.Name) and node.id in ("locals", *_BY_TEXT)


def _dotted(node: ast.AST) -> str:
    return f"{node.value.id}.{node.attr}" if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) else ""


def _words(node: ast.AST) -> Iterator[str]:
    """The names that stand in this very node."""
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from node.module.split(".")
        for alias in node.names:
            yield from alias.name.split(".")


def _say(node: ast.AST, word: str) -> str:
    return f"line {getattr(node, 'lineno', 1)}: {word}"
