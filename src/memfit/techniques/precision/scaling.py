"""Loss scaling around one backward call: gradients are unscaled and examined before the call returns.

`torch.amp.GradScaler` decides everything (the scale, what an overflow is, when to grow); only *when* differs from its usual use. There
the program unscales once before it reads gradients, here every backward pass does, so that a program that knows nothing of scaling
never sees a scaled gradient: a backward pass plays the part of the optimizer, its leaves that of the parameters. Gradients that
are there already are multiplied by the scale first, in place, and so come back unchanged: the scale is a power of two, and multiplying
by one is exact (float32 above 2^-110). So the bits are those of GradScaler's usual use, and flat gradient buffers stay whole.

The scale is updated when the first backward pass begins after an optimizer has stepped or has been held back: with one optimizer
where everybody writes `scaler.update()`, with several after each round of steps. Costs a walk over the graph, and a pass over the gradients
that are there already.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from memfit.core.precision import DYNAMIC
from memfit.techniques.precision.leaves import address_of, leaves_of

_FIRST_SCALE = 2.0**16  # GradScaler's and apex's
_GROWTH_STEPS = 2000  # GradScaler's and apex's
_NEVER = 2**31 - 1


class _Scaler(torch.amp.GradScaler):
    """Ours, told apart from one the program makes."""


class _Pass:
    """One backward pass as GradScaler sees an optimizer: `step` is called if, and only if, all gradients are finite."""

    def __init__(self, leaves: Sequence[torch.Tensor]) -> None:
        self.leaves = [leaf for leaf in leaves if leaf.grad is not None]
        self.addresses = {address_of(leaf) for leaf in self.leaves}
        self.stand_ins = [_stand_in(leaf) for leaf in self.leaves]
        self.param_groups = [{"params": self.stand_ins}]
        self.is_finite = False

    def step(self) -> None:
        self.is_finite = True

    def hand_back(self) -> None:
        """Unscaled gradients of float16 leaves go back to them; nothing is held any more but the leaves."""
        for leaf, stand_in in zip(self.leaves, self.stand_ins, strict=True):
            if stand_in is not leaf and leaf.grad is not None and stand_in.grad is not None:
                leaf.grad.copy_(stand_in.grad)
        self.stand_ins.clear()


def _stand_in(leaf: torch.Tensor) -> torch.Tensor:
    """GradScaler refuses float16 gradients, whose unscaled values float16 may not hold; O3 has no others."""
    if leaf.grad is None or leaf.grad.dtype is not torch.float16:
        return leaf
    stand_in = torch.empty_like(leaf, dtype=torch.float32, requires_grad=False)
    stand_in.grad = leaf.grad.float()
    return stand_in


class Scaling:
    """One loss scale.

    scale: DYNAMIC, or a number that stays. smallest, largest: limits of a dynamic scale (apex's min_loss_scale, max_loss_scale).
    """

    def __init__(self, scale: float | str = DYNAMIC, smallest: float | None = None, largest: float | None = None) -> None:
        self.is_dynamic = scale == DYNAMIC
        self.num_in_a_row = 0  # updates with an overflow since the last one without
        self._first_scale = _FIRST_SCALE if scale == DYNAMIC else float(scale)
        self._smallest, self._largest = smallest, largest
        if self.is_dynamic and largest is not None:
            self._first_scale = min(self._first_scale, largest)
        self._scaler: torch.amp.GradScaler | None = None  # made when the device is known
        self._state: dict[str, float] = {}
        self._passes: list[_Pass] = []  # since the last update
        self._open: list[torch.Tensor] = []  # leaves of the pass that runs
        self._delayed: list[torch.Tensor] = []  # leaves whose gradients were left scaled
        self._is_due = False

    @property
    def scale(self) -> float:
        """The factor of the next backward pass, unless a step comes in between."""
        return self._scaler.get_scale() if self._scaler is not None else self._state.get("scale", self._first_scale)

    @property
    def reduced_scale(self) -> float:
        """What the scale is after an overflow now."""
        return max(self.scale / 2, self._smallest or 0.0)

    # ---- around backward -------------------------------------------------------------------------------------------

    @contextmanager
    def scaled(self, outputs: Sequence[torch.Tensor], *, unscale: bool = True) -> Iterator[list[torch.Tensor]]:
        """Yields the outputs multiplied by the scale; run backward of them inside. After it all gradients are unscaled.

        unscale: False leaves them scaled, until a later pass unscales these too (apex's delay_unscale).
        """
        scaler = self._begin(outputs[0].device.type)
        self._open = []
        self.reach(outputs)
        try:
            yield [scaler.scale(output) for output in outputs]
        finally:
            leaves, self._open = self._open, []
            known = {id(leaf) for leaf in leaves}
            leaves += [leaf for leaf in self._delayed if id(leaf) not in known]
            self._delayed = [] if unscale else leaves
            if unscale:
                self._unscale(scaler, leaves)

    def reach(self, outputs: Iterable[torch.Tensor]) -> None:
        """A backward pass of these runs inside the open one (a reentrant checkpoint's): its leaves belong to the pass too."""
        known = {id(leaf) for leaf in (*self._open, *self._delayed)}
        leaves = [leaf for leaf in leaves_of(outputs) if id(leaf) not in known]
        with torch.no_grad():
            for leaf in leaves:
                if leaf.grad is not None:
                    leaf.grad.mul_(self.scale)
        self._open += leaves

    def _begin(self, device_type: str) -> torch.amp.GradScaler:
        if self._scaler is None:
            self._scaler = _Scaler(
                device_type, init_scale=self._first_scale, growth_interval=_GROWTH_STEPS if self.is_dynamic else _NEVER
            )
            if self._state:
                self._scaler.load_state_dict({**self._scaler.state_dict(), **self._state})
        if self._is_due or (self._passes and self._was_cleared()):
            self.update()
        return self._scaler

    def _unscale(self, scaler: torch.amp.GradScaler, leaves: list[torch.Tensor]) -> None:
        done = _Pass(leaves)
        if not done.stand_ins:  # no gradient came of it
            return
        scaler.unscale_(done)  # type: ignore[arg-type]
        done.hand_back()
        scaler.step(done)  # type: ignore[arg-type]
        self._passes.append(done)

    # ---- around the optimizer's step -------------------------------------------------------------------------------

    def must_hold_back(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a backward pass since the last update overflowed in what this optimizer would update. It steps, or is held back, now."""
        self._is_due = True
        if not self.is_dynamic or all(done.is_finite for done in self._passes):
            return False
        held = {address_of(p) for group in optimizer.param_groups for p in group["params"]}
        return any(not done.is_finite and held & done.addresses for done in self._passes)

    @property
    def has_overflow(self) -> bool:
        """Whether one of the passes since the last update overflowed."""
        return any(not done.is_finite for done in self._passes)

    def update(self) -> None:
        """A round of steps is over: the scale follows what its passes found."""
        if self._passes and self._scaler is not None:
            self.num_in_a_row = self.num_in_a_row + 1 if self.has_overflow else 0
            if self.is_dynamic:
                self._scaler.update()
                self._keep_within_limits(self._scaler)
            else:
                self._scaler.update(self._first_scale)
        self._passes.clear()
        self._is_due = False

    def _keep_within_limits(self, scaler: torch.amp.GradScaler) -> None:
        scale = scaler.get_scale()
        limited = max(min(scale, self._largest or scale), self._smallest or scale)
        if limited != scale:
            scaler.update(limited)

    def _was_cleared(self) -> bool:
        """Whether the program threw away overflowed gradients itself instead of stepping."""
        overflowed = [leaf.grad for done in self._passes if not done.is_finite for leaf in done.leaves if leaf.grad is not None]
        return self.has_overflow and not any(bool(each.count_nonzero()) for each in overflowed)

    # ---- to and from a file ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, float]:
        """The scale and the steps since it last changed, as apex names them."""
        if self._is_due:
            self.update()
        state = self._scaler.state_dict() if self._scaler is not None else self._state
        return {"loss_scale": self.scale, "unskipped": state.get("_growth_tracker", 0)}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from a `state_dict`."""
        self._passes.clear()
        self._is_due = False
        self._scaler = None
        self._state = {"scale": state["loss_scale"], "_growth_tracker": int(state["unskipped"])}
