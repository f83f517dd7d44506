"""Running a script a second time in the same process as if it were the first: what the first run may have moved is put back.

Put back: the generators of random numbers (PyTorch's, Python's, and NumPy's where it was loaded) and the import of the program's own modules.
Known limit: what the program changed elsewhere stays changed: files it wrote, settings of libraries (it makes them again).
"""

from __future__ import annotations

import gc
import os
import random
import sys
from pathlib import Path

import torch


class StartingPoint:
    """Taken before the first run. path: the script's."""

    def __init__(self, path: str) -> None:
        self._directory = Path(os.path.realpath(path)).parent
        self._modules = set(sys.modules)
        self._python = random.getstate()
        self._numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def go_back(self) -> None:
        """Once the first run is over, and nobody holds its exception, whose traceback holds its tensors."""
        for name in set(sys.modules) - self._modules:
            file = getattr(sys.modules[name], "__file__", None)
            if (
                file is not None
                and Path(os.path.realpath(file)).parent.is_relative_to(self._directory)
                and "site-packages" not in file
            ):
                del sys.modules[name]
        gc.collect()
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        torch.set_rng_state(self._cpu)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
