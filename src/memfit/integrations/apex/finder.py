"""Makes `from apex import amp` find memfit's, in a process whose Python finds no such module itself.

An import that the program guards with `try` is left to fail as it would without memfit: such programs have another way, and libraries use it to choose
other kernels, which would change results behind the program's back.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FrameType, ModuleType

_PARTS = ("amp", "optimizers", "parallel", "normalization")
_OURS = "memfit.integrations.apex"


@contextmanager
def standing_in() -> Iterator[list[str]]:
    """Inside, apex's names are found. Yields the messages there are to give, empty until the program imports one."""
    messages: list[str] = []
    before = set(sys.modules)

    def tell(importer: str) -> None:
        if not messages:
            messages.append(
                f"apex.amp is not installed; what {importer} imports from apex is memfit's (memfit explain precision)."
            )

    finder = _Finder(tell)
    sys.meta_path.append(finder)  # last: an apex that is there comes first
    try:
        yield messages
    finally:
        sys.meta_path.remove(finder)
        if messages:
            importlib.import_module(f"{_OURS}.amp").reset()
        for name in [each for each in sys.modules if each not in before]:
            if isinstance(getattr(sys.modules[name], "__loader__", None), _StandIn):
                del sys.modules[name]


class _StandIn(Loader):
    """Loads a module that holds the public names of one of memfit's."""

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__.partition(".")[2]
        if not name:
            module.__path__ = []  # a package, whose parts Python asks the finders for
            module.__doc__ = "memfit's stand-in for apex."
            for part in _PARTS:
                setattr(module, part, importlib.import_module(f"apex.{part}"))
            return
        ours = importlib.import_module(f"{_OURS}.{name}")
        module.__doc__ = ours.__doc__
        module.__dict__.update({each: getattr(ours, each) for each in ours.__all__})


class _Finder(MetaPathFinder):
    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._is_ours = False  # the program's import was one to answer, and its parts follow

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "apex" and not name.startswith("apex."):
            return None
        part = name.partition(".")[2]
        parent = sys.modules.get("apex")
        if isinstance(getattr(parent, "__loader__", None), _StandIn):
            if part not in _PARTS:
                raise ModuleNotFoundError(
                    f"No module named {name!r}. apex is not installed, and memfit stands in for apex.{', apex.'.join(_PARTS)} only. Install apex for the "
                    "rest of it, or take that part out.",
                    name=name,
                )
        elif part not in ("", "amp"):  # the real apex: only its amp is gone
            return None
        importer = _importer()
        if importer is None or not _is_plain_import(importer):
            return None if parent is None or not isinstance(parent.__loader__, _StandIn) else ModuleSpec(name, _StandIn())
        self._tell(Path(importer.f_code.co_filename).name)
        return ModuleSpec(name, _StandIn(), is_package=not part)


def _importer() -> FrameType | None:
    """The frame whose import statement is being carried out."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and ("importlib" in frame.f_code.co_filename or frame.f_globals.get("__name__") == __name__):
        frame = frame.f_back
    return frame


def _is_plain_import(frame: FrameType) -> bool:
    """Whether the frame stands at an import statement outside any `try` that could catch its failure."""
    try:
        tree = ast.parse(Path(frame.f_code.co_filename).read_bytes())
    except (OSError, SyntaxError, ValueError):  # typed in, or made up: nobody can tell
        return False
    return _holds(tree, frame.f_lineno) is True


def _holds(node: ast.AST, line: int, guarded: bool = False) -> bool | None:
    """Is the import at this line plain (True) or guarded (False)? None: it is not below this node."""
    if isinstance(node, (ast.Import, ast.ImportFrom)) and node.lineno <= line <= (node.end_lineno or node.lineno):
        return not guarded
    for field, children in ast.iter_fields(node):
        inside = guarded or (isinstance(node, ast.Try) and field == "body" and bool(node.handlers))
        for child in children if isinstance(children, list) else [children]:
            if isinstance(child, ast.AST) and (found := _holds(child, line, inside)) is not None:
                return found
    return None
