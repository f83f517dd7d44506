"""Places: where in the program a call runs, so that it is known again in the next step.

section | module path # invocation / ordinal : function. The section counts the backward passes since the last optimizer step; the
ordinal counts the differentiable calls of one module invocation.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch

from memfit.engine.policy import CallPolicy, Policy
from memfit.engine.private import in_backward


class Frame:
    """One module invocation on the stack."""

    __slots__ = ("invocation", "ordinal", "path", "planned")

    def __init__(self, path: str, invocation: int, planned: dict[int, CallPolicy] | None) -> None:
        self.path = path
        self.invocation = invocation
        self.ordinal = -1
        self.planned = planned


class Places:
    """policy: what is planned where, or None. backward_seen: autograd has asked for a saved tensor since the section began."""

    def __init__(self) -> None:
        self.policy: Policy | None = None
        self.section = 0
        self.backward_seen = False
        self.frames: list[Frame] = []
        self._invocations: dict[str, int] = {}
        self._invocations_before_root: dict[str, int] = {}
        self._paths: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()

    def begin_section(self, section: int) -> None:
        self.section = section
        self.backward_seen = False
        self._invocations.clear()
        self._invocations_before_root.clear()
        if not self.frames:
            self.frames.append(Frame("", 0, None))
        bottom = self.frames[0]
        bottom.ordinal = -1
        bottom.planned = self._planned("", 0)

    def _planned(self, path: str, invocation: int) -> dict[int, CallPolicy] | None:
        return self.policy.frame(self.section, path, invocation) if self.policy is not None else None

    def begin_root(self) -> None:
        """A module that the program itself calls is about to begin."""
        self._invocations_before_root = dict(self._invocations)

    def enter(self, module: torch.nn.Module) -> None:
        """A module's forward pass begins."""
        path = self._paths.get(module)
        if path is None:
            path = self._name(module)
        if not torch.is_grad_enabled():  # an evaluation now and then must not shift the places of the steps that train
            self.frames.append(Frame(path, -1, None))
            return
        if self.backward_seen and not in_backward():
            self.begin_section(self.section + 1)
        invocation = self._invocations.get(path, 0)
        self._invocations[path] = invocation + 1
        self.frames.append(Frame(path, invocation, self._planned(path, invocation)))

    def leave(self, module: torch.nn.Module, output: Any) -> None:
        """Its forward pass is over; output is None where it failed."""
        if len(self.frames) < 2:
            return
        path = self._paths.get(module)
        while len(self.frames) > 1:
            if self.frames.pop().path == path:
                break
        if len(self.frames) == 1 and output is None and sys.exc_info()[0] is not None:
            self._invocations = (
                self._invocations_before_root
            )  # the forward pass failed: it must not shift the places of the next

    def _name(self, module: torch.nn.Module) -> str:
        parent = self.frames[-1].path
        root = f"{parent}.{type(module).__name__}" if parent else type(module).__name__
        for name, child in module.named_modules():
            self._paths.setdefault(child, f"{root}.{name}" if name else root)
        return self._paths[module]
