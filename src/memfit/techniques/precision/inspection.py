"""Inspection: which module first made an infinity (or a NaN), once loss scaling has given up.

Looks at one forward and backward pass: in the forward pass for the first module whose inputs are finite and whose output is not; failing
that, in the backward pass for the first module output at which a gradient arrives that is not finite. Costs a look at every module's
output, so it is armed only after many overflows in a row.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from memfit.core.errors import PrecisionError

_MAX_OVERFLOWS = 24  # in a row; GradScaler's first scale of 65536 is at 2^-8 by then


class Inspection:
    """What one armed pass found. `look` is told of every module call, innermost first."""

    def __init__(self) -> None:
        self.is_armed = False
        self._forward = ""
        self._backward = ""
        self._roots: list[weakref.ref[torch.nn.Module]] = []

    def begin(self, root: torch.nn.Module) -> None:
        """A root module's forward pass begins."""
        self._roots.append(weakref.ref(root))

    def look(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        """The module has been called."""
        if self._forward:
            return
        if not _is_finite(output) and _is_finite(inputs):
            self._forward = self._name(module)
            return
        note = functools.partial(self._note, self._name(module))
        for tensor in _floats(output):
            if tensor.requires_grad:
                tensor.register_hook(note)

    def note_overflow(self, num_in_a_row: int, scale: float) -> None:
        """A step was held back. Arms after many in a row; raises PrecisionError if the pass that led here was looked at.

        num_in_a_row: steps held back since the last one made, this one included. scale: the loss scale of that pass.
        """
        if self.is_armed:
            raise self.error(num_in_a_row, scale)
        self.is_armed = num_in_a_row >= _MAX_OVERFLOWS

    def _note(self, name: str, gradient: torch.Tensor) -> None:
        if not self._backward and not _is_finite(gradient):
            self._backward = name

    def _name(self, module: torch.nn.Module) -> str:
        kind = type(module).__name__
        for ref in self._roots:
            root = ref()
            for path, each in root.named_modules() if root is not None else ():
                if each is module:
                    return f"{path} ({kind})" if path else kind
        return kind

    def error(self, num_overflows: int, scale: float) -> PrecisionError:
        """The sentence that stops the run."""
        if self._forward:
            where = f"The first module whose output is not finite, although its inputs are, is {self._forward}"
        elif self._backward:
            where = f"The forward pass is finite; the first gradient that is not arrives at the output of {self._backward}"
        else:
            where = "No module's output is infinite; it arises outside of modules, in the loss most likely"
        return PrecisionError(
            f"float16 overflows for ever: {num_overflows} steps in a row were held back and the loss scale went down to {scale:g}, so scaling cannot "
            f"help. {where}. No parameter was changed in these steps. Use bfloat16 (--half bf16, half='bf16'), which has float32's range, or keep that module in float32 "
            "(`with torch.autocast(device, enabled=False)` and .float() inside it)."
        )


def _floats(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _floats(each)
    elif isinstance(value, dict):
        yield from _floats(list(value.values()))


def _is_finite(value: Any) -> bool:
    return all(bool(torch.isfinite(each).all()) for each in _floats(value))
