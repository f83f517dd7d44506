"""Release: names of the program's own functions let go where the program has read them for the last time, as a `del` there would.

    logits = model(x)                                    logits = model(x)
    loss = F.cross_entropy(logits, y)        ->          loss = F.cross_entropy(logits, y)
                                                         logits = __memfit_let_go__(logits, 7)
    loss.backward()                                      loss.backward()

The source is analysed when it is loaded (`core.liveness`) and such calls are put in; lines stay what they were. Whether a value
goes is decided when the call runs: only tensors and plain containers of them, which nothing watches die. Everything else (files,
iterators, objects with a `__del__`, what somebody holds a weak reference to) stays as it is. Bitwise: values are only dropped.

Cost: 0.1 us a name and pass for what is no tensor, 0.5 us for a tensor.
Known limit: an argument of `nn.Module.__call__` is held by torch's own frames until the module returns, as it is with a `del`.
"""

from __future__ import annotations

import ast
import sys
import warnings
import weakref
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch

from memfit.core.liveness import LET_GO, DeadName, Death, find_deaths
from memfit.core.unseen import find_unseen_read
from memfit.engine.private import base_of

NAME, MAY = LET_GO, "__memfit_may_let_go__"  # what a loaded module calls, among its globals

KEEP = "keep"  # change nothing
NOTE = "note"  # change nothing, but say which names are dead
RELEASE = "release"  # let go, and say so

_MAX_ELEMENTS = 4096  # of a container that is looked through
_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.Size, torch.dtype, torch.device, slice)


# Told of a storage that may die with a name: (storage, name, tensors that go); others may be views of the same storage. Of a name that
# the program deletes itself it is also told where other references hold the tensor, so that none goes.
Watch = Callable[[torch.UntypedStorage, DeadName, int], None]


class Releases:
    """What `let_go` does, for the whole process: a program is loaded once, and its functions outlive every session."""

    def __init__(self) -> None:
        self.mode = KEEP
        self.sites: list[DeadName] = []
        self.stopped_by = ""  # what in the program may read names unseen, as 'train.py, line 12: data_ptr'
        self.watch: Watch | None = None
        self._noted: list[tuple[weakref.ref[torch.UntypedStorage], DeadName, int]] = []

    def start(self, mode: str) -> Callable[[], None]:
        """Begin for a new program; the returned function ends it. Under a debugger or tracer nothing is ever let go."""
        self.mode, self.stopped_by = mode, ""
        if sys.gettrace() is not None:
            self.stop("a debugger or tracer is at work")

        def end() -> None:
            self.mode = KEEP
            self.follow(None)

        return end

    def stop(self, reason: str) -> None:
        """Let nothing go any more: from here on somebody may read what no name shows."""
        self.mode = KEEP
        self.stopped_by = self.stopped_by or reason

    def follow(self, watch: Watch | None) -> None:
        """Tell the watch of what dies from now on, and of what died before and is held all the same."""
        self.watch = watch
        noted, self._noted = self._noted, []
        for ref, name, num_tensors in noted:
            if watch is not None and (storage := ref()) is not None:
                self.tell(storage, name, num_tensors)

    def tell(self, storage: torch.UntypedStorage, name: DeadName, num_tensors: int) -> None:
        """A storage may die with the name, and with `num_tensors` that only the name holds."""
        if self.watch is not None:
            self.watch(storage, name, num_tensors)
        if self.mode == NOTE and num_tensors:
            self._noted.append((weakref.ref(storage), name, num_tensors))


releases = Releases()


def let_go(value: Any, site: int) -> Any:
    """None where the value may be dropped here; else the value itself. Called as `name = let_go(name, site)` and in no other way."""
    kind: type = type(value)
    if kind is not torch.Tensor and not issubclass(kind, (list, tuple, dict)):
        return value
    if releases.mode == KEEP or torch.compiler.is_compiling():
        return value
    tensors: list[torch.Tensor] = []
    if not _is_droppable(value, tensors) or not tensors:
        return value
    if releases.watch is not None:
        own, *inside = _count_refs(value, tensors)
        is_alone = kind is torch.Tensor or own <= _ALONE_CONTAINER
        for tensor, num_refs in zip(tensors, inside, strict=True):
            if is_alone and num_refs <= (_ALONE if tensor is value else _ALONE_INSIDE):
                base = base_of(tensor)
                num_tensors = (
                    2 if base is not None and sys.getrefcount(base) <= _ALONE_BASE else 1
                )  # a view takes its base along
                del base
                releases.tell(tensor.untyped_storage(), releases.sites[site], num_tensors)
            elif releases.sites[site].deleted_line:
                releases.tell(tensor.untyped_storage(), releases.sites[site], 0)
    return value if releases.mode == NOTE else None


def _is_droppable(value: Any, tensors: list[torch.Tensor]) -> bool:
    """Whether nothing notices when the value dies; fills `tensors` with those in it.

    A tensor, a number or a text; a list, tuple or dict of such (a subclass too, if it has no `__del__`: named tuples, the outputs of
    transformers). An attribute put on a tensor may be anything, so such a tensor stays.
    """
    left = [value]
    seen: set[int] = set()
    while left:
        each = left.pop()
        kind = type(each)
        if isinstance(each, _PLAIN) or id(each) in seen:
            continue
        if len(seen) == _MAX_ELEMENTS or weakref.getweakrefcount(each):
            return False
        seen.add(id(each))
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            if vars(each):
                return False
            tensors.append(each)
        elif issubclass(kind, (list, tuple, dict)) and not hasattr(kind, "__del__"):
            left += list.__iter__(each) if issubclass(kind, list) else tuple.__iter__(each) if issubclass(kind, tuple) else ()
            left += [*dict.keys(each), *dict.values(each)] if issubclass(kind, dict) else ()
            left += getattr(each, "__dict__", {}).values()
        else:
            return False
    return True


def load_code(source: bytes, path: str, *, is_main: bool) -> CodeType:
    """The compiled module, with its releases put in; the plain one where the module may read names unseen.

    is_main: it runs as `__main__`, so no other module reads its names. Raises what `compile` raises.
    """
    plain = compile(source, path, "exec", dont_inherit=True)
    if releases.mode == KEEP:
        return plain
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler has said them once
        # Python allows 20 blocks in one another and a stack of a certain depth: a program close to that stays as it is.
        try:
            tree = ast.parse(source, path)
        except RecursionError:
            releases.stop(path)
            return plain
        if found := find_unseen_read(tree):
            if releases.mode == RELEASE:  # a note of what is dead may be wrong there and harms nobody; a release never may
                releases.stop(f"{path}, {found}")
            return plain
        if not (is_main or b"torch" in source):  # plain Python work, in which each call would be felt
            return plain
        try:
            _insert(find_deaths(tree, source, path, with_module=is_main))
            return compile(tree, path, "exec", dont_inherit=True)
        except (SyntaxError, RecursionError):
            return plain


def _insert(deaths: list[Death]) -> None:
    """Put the releases into the tree, where the deaths are; from each block's end, so that the indices stay true."""
    for death in sorted(deaths, key=lambda each: -each.index):
        if not death.dead.function.endswith("__del__"):  # at Python's end it runs when the module's names are gone
            death.block.insert(death.index, _statement(death, len(releases.sites)))
            releases.sites.append(death.dead)


def _statement(death: Death, site: int) -> ast.stmt:
    """`name = let_go(name, site)`, in the place of the statement before; where the name may be unbound, it stays unbound."""
    name = death.dead.name
    call = ast.Call(ast.Name(NAME, ast.Load()), [ast.Name(name, ast.Load()), ast.Constant(site)], [])
    statement: ast.stmt = ast.Assign([ast.Name(name, ast.Store())], call)
    if not death.is_bound:
        unbound = ast.ExceptHandler(ast.Name("NameError", ast.Load()), None, [ast.Pass()])
        statement = ast.If(ast.Call(ast.Name(MAY, ast.Load()), [], []), [ast.Try([statement], [unbound], [], [])], [])
    for node in ast.walk(statement):
        if isinstance(node, (ast.expr, ast.stmt, ast.ExceptHandler)):
            node.lineno = node.end_lineno = death.dead.line
            node.col_offset = node.end_col_offset = 0
    return statement


def may_let_go() -> bool:
    """Whether a name that may be unbound can be looked at: torch.compile cannot follow that, and decides by this that it need not."""
    return not torch.compiler.is_compiling()


NAMES = {
    NAME: let_go,
    MAY: may_let_go,
}  # to be put among the module's globals; pickled functions find them by their import path


def _count_refs(value: Any, tensors: list[torch.Tensor]) -> list[int]:
    return [sys.getrefcount(value), *(sys.getrefcount(tensor) for tensor in tensors)]


def _count_alone(value: Any) -> list[int]:
    """What `let_go` counts, which Python version by Python version differs."""
    tensors: list[torch.Tensor] = []
    _is_droppable(value, tensors)
    return _count_refs(value, tensors)


def _calibrate() -> tuple[int, int, int, int]:
    name: Any = torch.empty(0)
    _, alone = _count_alone(name)
    name = [torch.empty(0)]
    container, inside = _count_alone(name)
    name = torch.empty(1).view(1)
    base = base_of(name)
    return alone, container, inside, sys.getrefcount(base)


_ALONE, _ALONE_CONTAINER, _ALONE_INSIDE, _ALONE_BASE = _calibrate()
