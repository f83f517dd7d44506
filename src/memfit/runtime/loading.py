"""Import the program's own modules changed: with their releases put in, or from another text than the file's.

The program's own are files under the script's directory, and no installed package.
"""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from memfit.techniques import release

_INSTALLED = ("site-packages", "dist-packages")


class _Loader(SourceFileLoader):
    """Loads from source each time: a .pyc has the plain code, and must go on having it."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return release.load_code(self.get_data(path), path, is_main=False)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.update(release.NAMES)
        super().exec_module(module)


class _Finder:
    """Finds what Python's own PathFinder finds, and changes the loader of the wanted files.

    make_loader(name, path): the loader of a module, None for one that stays as it is.
    """

    def __init__(self, make_loader: Callable[[str, str], SourceFileLoader | None]) -> None:
        self._make_loader = make_loader
        self._loaded = {name.partition(".")[0] for name in sys.modules}  # torch, memfit, and what they brought

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.partition(".")[0] in self._loaded:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or type(spec.loader) is not SourceFileLoader:
            return None
        loader = self._make_loader(spec.loader.name, spec.loader.path)
        if loader is None:
            return None
        spec.loader = loader
        return spec


def releasing_imports(directory: str) -> AbstractContextManager[None]:
    """Inside, modules under the directory are loaded with their releases; those of packages loaded before stay as they are."""
    root = Path(os.path.realpath(directory))

    def make_loader(name: str, path: str) -> SourceFileLoader | None:
        file = Path(os.path.realpath(path))
        is_own = file.is_relative_to(root) and not any(part in _INSTALLED for part in file.relative_to(root).parts)
        return _Loader(name, path) if is_own else None

    return _finding(make_loader)


@contextmanager
def standing_in(texts: Mapping[str, str]) -> Iterator[None]:
    """Inside, these files (absolute paths) are imported from these texts. The files stay as they are.

    From then on Python shows the lines of the texts, afterwards too: tracebacks may still be drawn.
    """

    class Loader(SourceFileLoader):
        def get_code(self, fullname: str) -> CodeType:
            path = self.get_filename(fullname)
            return compile(texts[os.path.abspath(path)], path, "exec", dont_inherit=True)

    def make_loader(name: str, path: str) -> SourceFileLoader | None:
        return Loader(name, path) if os.path.abspath(path) in texts else None

    for path, text in texts.items():
        linecache.cache[path] = (
            len(text),
            None,
            text.splitlines(keepends=True),
            path,
        )  # without a time it is not looked up again
    with _finding(make_loader):
        yield


@contextmanager
def _finding(make_loader: Callable[[str, str], SourceFileLoader | None]) -> Iterator[None]:
    finder = _Finder(make_loader)
    index = sys.meta_path.index(PathFinder) if PathFinder in sys.meta_path else len(sys.meta_path)
    sys.meta_path.insert(index, finder)
    try:
        yield
    finally:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)
