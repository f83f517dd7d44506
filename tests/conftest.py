"""What tests of bytes share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def lazy_imports() -> None:
    """torch registers atexit functions when an optimizer is first made; in a script run in this process they would keep all of its variables."""
    torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1).step()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Workspaces depend on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def alone(one_thread: None) -> Iterator[None]:
    """One thread, and what is here already left out of the collector's and the oracle's looking."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
