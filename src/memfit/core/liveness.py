"""Liveness: where in a program's source the value of a local name has been read for the last time.

The textbook analysis (backward: which names are live; forward: which may still hold a value) over Python's syntax tree, one scope
at a time; what the scopes are, Python's own `symtable` says. It errs to one side only: a name is called dead where *no* path reads
its value again, exceptions included; names that a closure, a generator expression or a class body reads are left out. What can be
read without its name is `core.unseen`'s matter. Costs about 35 ms a thousand lines.
Source: Aho, Sethi, Ullman, *Compilers*, section 10.6.
"""

from __future__ import annotations

import ast
import symtable
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from memfit.core.bindings import binds, deletes, never_ours, reads, targets
from memfit.core.unseen import reads_its_globals, reads_its_locals

MODULE = "<module>"
LET_GO = "__memfit_let_go__"  # what a loaded module calls to let go of a name, among its globals
_Names = frozenset[str]
_Lines = frozenset[int]
_NONE: _Names = frozenset()
_Loops = ast.For | ast.AsyncFor | ast.While
_TRIES: tuple[type[ast.Try], ...] = (ast.Try, getattr(ast, "TryStar", ast.Try))  # `except*` since Python 3.11
_COMPREHENSIONS = ("listcomp", "setcomp", "dictcomp")  # they run at once; a generator expression runs later


@dataclass(frozen=True)
class DeadName:
    """A place from which on nobody reads the value a local name holds, until the name is bound anew.

    path: the file. function: qualified name, or MODULE. bound_lines: lines that may have bound the value, in order.
    line: the last line of the statement before the place; where a block begins there (`at_start`) its first line. A value can die
        at a block's start: on one branch only, or on the way from a loop's end back to its start.
    deleted_line: the line of the program's own `del` of it further down in the function; 0 where there is none.
    """

    path: str
    function: str
    name: str
    line: int
    bound_lines: tuple[int, ...]
    at_start: bool = False
    deleted_line: int = 0


@dataclass(frozen=True)
class Death:
    """Where in the tree a name is dead: a release belongs before `block[index]`.

    is_bound: whether the name is bound there on every path.
    """

    dead: DeadName
    block: list[ast.stmt]
    index: int
    is_bound: bool


def find_deaths(tree: ast.Module, source: str | bytes, path: str, *, with_module: bool) -> list[Death]:
    """The deaths in every function of the tree; with `with_module` also in the module's own code, if only it reads its names.

    source: the text the tree was parsed from, `path` its file.
    """
    table = symtable.symtable(source, "<source>", "exec")  # type: ignore[arg-type]  # bytes are taken too
    tables = {(each.get_name(), each.get_lineno()): each for each in _inside(table) if each.get_type() == "function"}
    found: list[Death] = []
    if with_module and not reads_its_globals(tree):
        names = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned()}
        names -= _read_later(table, symtable.Symbol.is_global)
        found += _Scope(path, MODULE, tree.body, names).find({})
    for function, name in _functions(tree, ""):
        own = tables.get((function.name, function.lineno))
        if own is None or reads_its_locals(function):
            continue
        names = {symbol.get_name() for symbol in own.get_symbols() if symbol.is_local() and not symbol.is_global()}
        names -= _read_later(own, symtable.Symbol.is_free)
        given = function.args
        parameters = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
        if parameters[0] is not None and "super" in reads(*function.body):
            names.discard(parameters[0].arg)  # `super()` reads the first argument, whatever its name
        found += _Scope(path, name, function.body, names).find(
            {each.arg: each.lineno for each in parameters if each is not None}
        )
    return found


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, str]]:
    """Every function below the node, with its qualified name."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield child, prefix + child.name
            yield from _functions(child, f"{prefix}{child.name}.<locals>.")
        else:
            yield from _functions(child, f"{prefix}{child.name}." if isinstance(child, ast.ClassDef) else prefix)


def _inside(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    for child in table.get_children():
        yield child
        yield from _inside(child)


def _read_later(
    table: symtable.SymbolTable, is_ours: Callable[[symtable.Symbol], bool], *, is_at_once: bool = True
) -> set[str]:
    """Names of this scope that scopes inside it read, at whatever time those run. `is_at_once`: the table's own code runs in place."""
    names: set[str] = set()
    for child in table.get_children():
        runs_in_place = is_at_once and child.get_name().strip("<>") in _COMPREHENSIONS
        if not runs_in_place:
            names |= {symbol.get_name() for symbol in child.get_symbols() if is_ours(symbol)}
        names |= _read_later(child, is_ours, is_at_once=runs_in_place)
    return names


# ---- one scope -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Ways:
    """The names live where control goes when it leaves a block otherwise than by its end."""

    on_break: _Names = _NONE
    on_continue: _Names = _NONE
    on_return: _Names = _NONE
    on_raise: _Names = _NONE


@dataclass(frozen=True)
class _State:
    """held: names that may hold a value not yet dead, with the lines that may have bound it. bound: names bound on every path."""

    held: Mapping[str, _Lines]
    bound: _Names


@dataclass
class _Loop:
    """The states in which the loop being walked is left by `break`, and begun again by `continue`."""

    breaks: list[_State | None] = field(default_factory=list)
    continues: list[_State | None] = field(default_factory=list)


def _join(states: list[_State | None]) -> _State | None:
    """The state where paths meet; None is a path that does not arrive."""
    reached = [state for state in states if state is not None]
    if not reached:
        return None
    held: dict[str, _Lines] = {}
    for state in reached:
        for name, lines in state.held.items():
            held[name] = held.get(name, frozenset()) | lines
    return _State(held, frozenset.intersection(*(state.bound for state in reached)))


class _Scope:
    """One function's body, or a module's. Loops are walked until nothing changes; the last walk is the one that counts."""

    def __init__(self, path: str, function: str, body: list[ast.stmt], names: set[str]) -> None:
        self._path = path
        self._function = function
        self._body = body
        # Python mangles `__name` in classes, and a name the program deletes is never known to be bound.
        self._names = {name for name in names - never_ours(body) if not name.startswith("__")}
        self._deleted = frozenset().union(*(deletes(stmt) for stmt in body))
        self._del_lines = sorted(
            (name, node.lineno)
            for stmt in (body if self._deleted else ())
            for node in ast.walk(stmt)
            if isinstance(node, ast.Delete)
            for name in deletes(node)
        )
        self._before: dict[ast.stmt, _Names] = {}
        self._after: dict[ast.stmt, _Names] = {}
        self._found: dict[tuple[int, int], list[Death]] = {}

    def find(self, parameters: Mapping[str, int]) -> list[Death]:
        self._live_block(self._body, _NONE, _Ways())
        self._walk_block(
            self._body, self._bind(_State({}, _NONE), parameters), _Loop(), self._body[0].lineno if self._body else 0
        )
        return [death for found in self._found.values() for death in found]

    # ---- backward: who is live -------------------------------------------------------------------------------------------------

    def _live_block(self, block: list[ast.stmt], out: _Names, ways: _Ways) -> _Names:
        """The names live before the block, if `out` are live after it. Any statement may raise."""
        out |= ways.on_raise
        for stmt in reversed(block):
            self._after[stmt] = out
            self._before[stmt] = out = self._live(stmt, out, ways) | ways.on_raise
        return out

    def _live(self, stmt: ast.stmt, out: _Names, ways: _Ways) -> _Names:
        if isinstance(stmt, ast.If):
            return reads(stmt.test) | self._live_block(stmt.body, out, ways) | self._live_block(stmt.orelse, out, ways)
        if isinstance(stmt, (ast.For, ast.AsyncFor, ast.While)):
            return self._live_loop(stmt, out, ways)
        if isinstance(stmt, (ast.With, ast.AsyncWith)):
            inner = replace(ways, on_raise=ways.on_raise | out)  # the context may swallow an exception
            return reads(*stmt.items) | self._live_block(stmt.body, out, inner)
        if isinstance(stmt, _TRIES):
            return self._live_try(stmt, out, ways)
        if isinstance(stmt, ast.Match):
            cases = [reads(case.pattern, case.guard) | self._live_block(case.body, out, ways) for case in stmt.cases]
            return reads(stmt.subject).union(out, *cases)
        if isinstance(stmt, ast.Return):
            return reads(stmt) | ways.on_return
        if isinstance(stmt, ast.Raise):
            return reads(stmt) | ways.on_raise
        if isinstance(stmt, ast.Break):
            return ways.on_break
        if isinstance(stmt, ast.Continue):
            return ways.on_continue
        # `out - targets(stmt).keys()` would be a set, which a `|=` elsewhere changes in place under all who hold it.
        return out.difference(targets(stmt), deletes(stmt)) | reads(stmt)

    def _live_loop(self, stmt: _Loops, out: _Names, ways: _Ways) -> _Names:
        once, each_time, bound = _loop_parts(stmt)
        after = _NONE if _is_endless(stmt) else self._live_block(stmt.orelse, out, ways)
        head = after
        while True:
            body = self._live_block(stmt.body, head, replace(ways, on_break=out, on_continue=head))
            grown = head | body.difference(binds(bound)) | reads(each_time, bound)
            if grown == head:
                return head | reads(once)
            head = grown

    def _live_try(self, stmt: ast.Try, out: _Names, ways: _Ways) -> _Names:
        inner, finally_in = ways, _NONE
        if stmt.finalbody:
            anywhere = out | ways.on_break | ways.on_continue | ways.on_return | ways.on_raise
            out = finally_in = self._live_block(stmt.finalbody, anywhere, ways)
            inner = _Ways(finally_in, finally_in, finally_in, finally_in)
        handlers = finally_in
        for handler in stmt.handlers:
            handlers |= reads(handler.type) | self._live_block(handler.body, out, inner)
        after_body = self._live_block(stmt.orelse, out, inner)
        return handlers | self._live_block(stmt.body, after_body, replace(inner, on_raise=inner.on_raise | handlers))

    # ---- forward: who may hold a value -----------------------------------------------------------------------------------------

    def _walk_block(self, block: list[ast.stmt], state: _State | None, loop: _Loop, line: int) -> _State | None:
        if state is None or not block:
            return state
        first = 1 if block is self._body and _is_docstring(block[0]) else 0
        state = self._release(block, first, state, self._before[block[0]], line, at_start=True)
        for index, stmt in enumerate(block[first:], first):
            after = self._walk(stmt, state, loop)
            if after is None:
                return None
            state = self._release(block, index + 1, after, self._after[stmt], stmt.end_lineno or stmt.lineno, at_start=False)
        return state

    def _release(self, block: list[ast.stmt], index: int, state: _State, live: _Names, line: int, *, at_start: bool) -> _State:
        self._found[id(block), index] = [  # a later walk of the same loop knows better
            Death(
                DeadName(self._path, self._function, name, line, tuple(sorted(state.held[name])), at_start, self._deleted_after(name, line)),
                block, index, is_bound=name in state.bound,
            )
            for name in sorted(state.held.keys() - live)
        ]  # fmt: skip
        return replace(state, held={name: lines for name, lines in state.held.items() if name in live})

    def _deleted_after(self, name: str, line: int) -> int:
        return next((each for deleted, each in self._del_lines if deleted == name and each >= line), 0)

    def _bind(self, state: _State, names: Mapping[str, int], *, for_sure: bool = True) -> _State:
        ours = {name: frozenset([line]) for name, line in names.items() if name in self._names}
        bound = state.bound | (names.keys() - self._deleted if for_sure else _NONE)
        if not for_sure:
            ours = {name: lines | state.held.get(name, frozenset()) for name, lines in ours.items()}
        return _State({**state.held, **ours}, bound)

    def _walk(self, stmt: ast.stmt, state: _State, loop: _Loop) -> _State | None:
        if isinstance(stmt, ast.If):
            state = self._bind(state, binds(stmt.test), for_sure=False)
            branches = [self._walk_block(block, state, loop, stmt.lineno) for block in (stmt.body, stmt.orelse)]
            return _join(branches)
        if isinstance(stmt, (ast.For, ast.AsyncFor, ast.While)):
            return self._walk_loop(stmt, state, loop)
        if isinstance(stmt, (ast.With, ast.AsyncWith)):
            swallowed = self._bind(state, binds(stmt), for_sure=False)
            state = self._bind(state, binds(*(item.optional_vars for item in stmt.items)))
            return _join([self._walk_block(stmt.body, state, loop, stmt.lineno), swallowed])
        if isinstance(stmt, _TRIES):
            return self._walk_try(stmt, state, loop)
        if isinstance(stmt, ast.Match):
            state = self._bind(state, binds(stmt.subject), for_sure=False)
            cases = [
                self._walk_block(
                    case.body, self._bind(state, binds(case.pattern, case.guard), for_sure=False), loop, stmt.lineno
                )
                for case in stmt.cases
            ]
            return _join([state, *cases])
        if isinstance(stmt, (ast.Return, ast.Raise)):
            return None
        if isinstance(stmt, (ast.Break, ast.Continue)):
            (loop.breaks if isinstance(stmt, ast.Break) else loop.continues).append(state)
            return None
        deleted = deletes(stmt)
        held = {name: lines for name, lines in state.held.items() if name not in deleted}
        state = self._bind(replace(state, held=held), binds(stmt), for_sure=False)
        return self._bind(state, targets(stmt))

    def _walk_loop(self, stmt: _Loops, state: _State, outer: _Loop) -> _State | None:
        once, each_time, bound = _loop_parts(stmt)
        head = state = self._bind(state, binds(once, each_time), for_sure=False)
        while True:
            loop = _Loop()
            end = self._walk_block(stmt.body, self._bind(head, binds(bound)), loop, stmt.lineno)
            grown = _join([state, end, *loop.continues])
            assert grown is not None
            if grown == head:
                break
            head = grown
        after = None if _is_endless(stmt) else self._walk_block(stmt.orelse, head, outer, stmt.lineno)
        return _join([after, *loop.breaks])

    def _walk_try(self, stmt: ast.Try, state: _State, loop: _Loop) -> _State | None:
        body = self._walk_block(stmt.body, state, loop, stmt.lineno)
        failed = self._bind(state, binds(*stmt.body), for_sure=False)
        handled = [self._walk_block(handler.body, failed, loop, handler.lineno) for handler in stmt.handlers]
        ended = _join([self._walk_block(stmt.orelse, body, loop, stmt.lineno), *handled])
        if not stmt.finalbody:
            return ended
        final = self._walk_block(stmt.finalbody, self._bind(state, binds(stmt), for_sure=False), loop, stmt.lineno)
        if final is None or ended is None:
            return None
        return replace(final, bound=final.bound | ended.bound)


def _loop_parts(stmt: _Loops) -> tuple[ast.expr | None, ast.expr | None, ast.expr | None]:
    """What is evaluated once before the loop, what again each time, and what is bound each time."""
    return (None, stmt.test, None) if isinstance(stmt, ast.While) else (stmt.iter, None, stmt.target)


def _is_endless(stmt: _Loops) -> bool:
    return isinstance(stmt, ast.While) and isinstance(stmt.test, ast.Constant) and bool(stmt.test.value)


def _is_docstring(stmt: ast.stmt) -> bool:
    return isinstance(stmt, ast.Expr) and isinstance(stmt.value, ast.Constant) and isinstance(stmt.value.value, str)
