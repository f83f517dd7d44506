"""Fingerprints of what a program computes, so that two runs of it can be compared: bit for bit, without keeping a tensor.

Outputs of the modules the program calls itself, and at the end of each backward pass the gradients of their parameters. Costs two passes
over those bytes and a copy of one output at a time (`engine.fingerprint`).

A program that sets no seed draws other numbers in each run. So that two runs can be compared, each begins with the same state of
the generators; one that sets its own seed does not notice.
"""

from __future__ import annotations

import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

from memfit.engine.fingerprint import fingerprint
from memfit.engine.need import tensors_in
from memfit.engine.private import at_end_of_backward
from memfit.measurement.births import has_storage

_SEED = 0


class ValueLog:
    """Fills `outputs` and `gradients`, a fingerprint for each call and each backward pass, between `start` and `stop`."""

    def __init__(self) -> None:
        self.outputs: list[int] = []
        self.gradients: list[int] = []
        self._modules: list[weakref.ref[torch.nn.Module]] = []  # that the program has called, in the order of their first calls
        self._depth = 0
        self._thread = 0
        self._undo: list[Callable[[], None]] = []
        self._quiet: Callable[[], AbstractContextManager[None]] | None = None

    def start(self, quiet: Callable[[], AbstractContextManager[None]]) -> None:
        """quiet: a context inside which nobody watches our own operations."""
        self._quiet = quiet
        random.seed(_SEED)
        torch.manual_seed(_SEED)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(_SEED)
        self._thread = threading.get_ident()
        hooks = torch.nn.modules.module
        self._undo = [
            hooks.register_module_forward_pre_hook(self._before_module).remove,
            hooks.register_module_forward_hook(self._after_module, always_call=True).remove,
        ]

    def stop(self) -> None:
        """Idempotent."""
        while self._undo:
            self._undo.pop()()

    def note_backward(self) -> None:
        """A backward pass runs: look at the gradients when it ends."""
        if self._undo:
            at_end_of_backward(self._note_gradients)

    def _before_module(self, module: torch.nn.Module, _: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        if not self._depth and all(ref() is not module for ref in self._modules):
            self._modules.append(weakref.ref(module))
        self._depth += 1

    def _after_module(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() != self._thread or not self._depth:
            return
        self._depth -= 1
        if not self._depth:
            self.outputs.append(self._add_up(tensors_in((output,))))

    def _note_gradients(self) -> None:
        parameters = {id(p): p for ref in self._modules if (module := ref()) is not None for p in module.parameters()}
        self.gradients.append(self._add_up(p.grad for p in parameters.values() if p.grad is not None))

    def _add_up(self, tensors: Iterable[torch.Tensor]) -> int:
        assert self._quiet is not None
        total = 0
        with self._quiet(), torch.no_grad():
            for each in tensors:
                if has_storage(each):
                    bits = fingerprint(each.clone(memory_format=torch.contiguous_format).untyped_storage())
                    total = (31 * total + bits) & ((1 << 63) - 1)
        return total
