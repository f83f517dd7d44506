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


@pytest.fixture(autouse=True)
def quick_collections(lazy_imports: None) -> None:
    """What imports and earlier tests have left is not looked through again and again: every measured step collects garbage first, and in a
    process that has imported everything a collection takes half a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Workspaces depend on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
