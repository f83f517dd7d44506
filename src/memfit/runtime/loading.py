"""Import the program's own modules with their releases put in: files under the script's directory, and no installed package."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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
    """Finds what Python's own PathFinder finds, and changes the loader of the program's own files."""

    def __init__(self, directory: str) -> None:
        self._directory = Path(os.path.realpath(directory))
        self._loaded = {name.partition(".")[0] for name in sys.modules}  # torch, memfit, and what they brought

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.partition(".")[0] in self._loaded:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or type(spec.loader) is not SourceFileLoader or not self._is_own(spec.loader.path):
            return None
        spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec

    def _is_own(self, path: str) -> bool:
        file = Path(os.path.realpath(path))
        if not file.is_relative_to(self._directory):
            return False
        return not any(part in _INSTALLED for part in file.relative_to(self._directory).parts)


@contextmanager
def releasing_imports(directory: str) -> Iterator[None]:
    """Inside, modules under the directory are loaded with their releases; those of packages loaded before stay as they are."""
    finder = _Finder(directory)
    index = sys.meta_path.index(PathFinder) if PathFinder in sys.meta_path else len(sys.meta_path)
    sys.meta_path.insert(index, finder)
    try:
        yield
    finally:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)
