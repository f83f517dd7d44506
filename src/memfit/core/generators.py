"""The generators of random numbers that a program may draw from: Python's, and NumPy's and PyTorch's where they are loaded.

Nothing memfit does for itself may move them, or training would not be what it is without. (rich, for one, draws from Python's when it
is imported.)
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class Generators:
    """Their states at the moment."""

    def __init__(self) -> None:
        self._python = random.getstate()
        numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
        self._numpy = numpy.random.get_state() if numpy is not None else None
        self._cpu = torch.get_rng_state() if torch is not None else None
        self._cuda = torch.cuda.get_rng_state_all() if torch is not None and torch.cuda.is_initialized() else []

    def put_back(self) -> None:
        """What was loaded since is left alone."""
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        if self._cpu is not None:
            sys.modules["torch"].set_rng_state(self._cpu)
        if self._cuda:
            sys.modules["torch"].cuda.set_rng_state_all(self._cuda)


@contextmanager
def unmoved() -> Iterator[None]:
    """Whatever the body draws, or the decorated function, the program will not notice."""
    before = Generators()
    try:
        yield
    finally:
        before.put_back()
