"""Standing aside: the tape's function mode is off the stack while an optimizer computes what nobody waits for.

An optimizer without foreach makes some twenty calls and attribute reads a parameter, each 0.7 us under a function mode that does nothing:
two thirds of all that a mode sees in a step of a small model.
"""

from __future__ import annotations

from torch.overrides import TorchFunctionMode

from memfit.engine.private import put_back, take_off


class Aside:
    """Whether the mode is off the stack for now, and where it belongs."""

    def __init__(self, mode: TorchFunctionMode) -> None:
        self._mode = mode
        self._depth: int | None = None  # of the stack below it, while it is off

    def stand(self) -> None:
        """Off, if it is the innermost."""
        self._depth = take_off(self._mode)

    def come_back(self) -> None:
        """On again, where it was off. If the stack has changed meanwhile, it stays off until it is as it was."""
        if self._depth is not None and put_back(self._mode, self._depth):
            self._depth = None

    def leave(self) -> None:
        """Off for good."""
        if self._depth is None:
            self._mode.__exit__(None, None, None)
        self._depth = None
