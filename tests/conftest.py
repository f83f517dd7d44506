"""What tests of bytes share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def alone() -> Iterator[None]:
    """One thread (workspaces depend on it), and what is here already left out of the collector's and the oracle's looking."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)
