"""Places: where in the program a call runs, so that it is known again in the next step.

section | module path # invocation / ordinal : function. The section counts the backward passes since the last optimizer step; the
ordinal counts the differentiable calls of one module invocation.
"""

from __future__ import annotations

import sys
import weakref
from functools import partial
from typing import Any

import torch

from memfit.engine.policy import CallPolicy, Policy, Section, frame_of
from memfit.engine.private import in_backward


class Frame:
    """One module invocation on the stack. ordinal: of its last differentiable call. module: None for what runs outside of modules."""

    __slots__ = ("invocation", "module", "ordinal", "path", "planned")

    def __init__(
        self, module: torch.nn.Module | None, path: str, invocation: int, planned: dict[int, CallPolicy] | None
    ) -> None:
        self.module = module
        self.path = path
        self.invocation = invocation
        self.ordinal = -1
        self.planned = planned


class Places:
    """policy: what is planned where, or None. frame: the invocation that runs. backward_seen: autograd has asked for a saved tensor
    since the section began."""

    def __init__(self) -> None:
        self.policy: Policy | None = None
        self.section = 0
        self.backward_seen = False
        self.frame = Frame(None, "", 0, None)
        self._outer: list[Frame] = []  # the frames around it
        self._planned: Section = {}
        self._invocations: dict[str, int] = {}
        self._invocations_before_root: dict[str, int] = {}
        self._paths: dict[int, tuple[weakref.ref[torch.nn.Module], str]] = {}  # by id(module), until it dies

    @property
    def is_outside(self) -> bool:
        """Whether no module runs."""
        return not self._outer

    def follow(self, policy: Policy | None) -> None:
        """From the next module invocation on this is planned."""
        self.policy = policy
        self._planned = policy.section(self.section) if policy is not None else {}

    def begin_section(self, section: int) -> None:
        self.section = section
        self.backward_seen = False
        self._invocations.clear()
        self._invocations_before_root.clear()
        self.follow(self.policy)
        bottom = self._outer[0] if self._outer else self.frame
        bottom.ordinal = -1
        bottom.planned = frame_of(self._planned, "", 0)

    def begin_root(self) -> None:
        """A module that the program itself calls is about to begin."""
        self._invocations_before_root = self._invocations.copy()

    def enter(self, module: torch.nn.Module) -> None:
        """A module's forward pass begins."""
        named = self._paths.get(id(module)) or self._name(module)
        path = named[1]
        self._outer.append(self.frame)
        if not torch.is_grad_enabled():  # an evaluation now and then must not shift the places of the steps that train
            self.frame = Frame(module, path, -1, None)
            return
        if self.backward_seen and not in_backward():
            self.begin_section(self.section + 1)
        invocation = self._invocations.get(path, 0)
        self._invocations[path] = invocation + 1
        self.frame = Frame(module, path, invocation, frame_of(self._planned, path, invocation))

    def leave(self, module: torch.nn.Module, output: Any) -> None:
        """Its forward pass is over; output is None where it failed."""
        outer = self._outer
        if not outer:
            return
        while outer:
            left, self.frame = self.frame, outer.pop()
            if left.module is module:
                break
        if output is None and not outer and sys.exc_info()[0] is not None:  # it must not shift the places of the next
            self._invocations = self._invocations_before_root

    def _name(self, module: torch.nn.Module) -> tuple[weakref.ref[torch.nn.Module], str]:
        parent = self.frame.path
        root = f"{parent}.{type(module).__name__}" if parent else type(module).__name__
        for name, child in module.named_modules():
            if id(child) not in self._paths:
                forget = partial(self._paths.pop, id(child))
                self._paths[id(child)] = weakref.ref(child, forget), f"{root}.{name}" if name else root
        return self._paths[id(module)]
