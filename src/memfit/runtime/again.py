"""Running a script a second time in the same process as if it were the first: what the first run may have moved is put back.

Put back: the generators of random numbers (PyTorch's, Python's, and NumPy's where it was loaded) and the import of the program's own modules.
Known limit: what the program changed elsewhere stays changed: files it wrote, settings of libraries (it makes them again).
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

from memfit.core.generators import Generators
from memfit.runtime.script import forget_scripts


class StartingPoint:
    """Taken before the first run. path: the script's."""

    def __init__(self, path: str) -> None:
        self._directory = Path(os.path.realpath(path)).parent
        self._modules = set(sys.modules)
        self._generators = Generators()

    def go_back(self) -> None:
        """Once the first run is over, and nobody holds its exception, whose traceback holds its tensors."""
        forget_scripts()
        for name in set(sys.modules) - self._modules:
            file = getattr(sys.modules[name], "__file__", None)
            if (
                file is not None
                and Path(os.path.realpath(file)).parent.is_relative_to(self._directory)
                and "site-packages" not in file
            ):
                del sys.modules[name]
        gc.collect()
        self._generators.put_back()
