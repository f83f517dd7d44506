"""apex's decorators for functions of the user's own: run them in half, in float32, or in the widest type of their arguments.

They act once `amp.initialize` has chosen O1, like apex's. Unlike apex's, what `float_function` marks runs with autocast off, so that matrix products inside
it stay float32 too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memfit.core.errors import PrecisionError
from memfit.runtime.patching import patch
from memfit.techniques.precision.casting import cast

Function = Callable[..., Any]

_half: torch.dtype | None = None  # of O1 while it is in force
_registered: list[tuple[Any, str, Callable[[Function], Function]]] = []


def activate(half: torch.dtype) -> Callable[[], None]:
    """O1 is in force from now on; hand back the function that ends it."""
    global _half
    _half = half
    undo = [patch(owner, name, decorate) for owner, name, decorate in _registered]

    def end() -> None:
        global _half
        _half = None
        for each in reversed(undo):
            each()

    return end


def half_function(function: Function) -> Function:
    """Casts floating-point arguments to half."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if _half is None:
            return function(*args, **kwargs)
        return function(*cast(args, _half), **cast(kwargs, _half))

    return run


def float_function(function: Function) -> Function:
    """Casts floating-point arguments to float32 and runs with autocast off."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if _half is None:
            return function(*args, **kwargs)
        with disable_casts():
            return function(*cast(args, torch.float32), **cast(kwargs, torch.float32))

    return run


def promote_function(function: Function) -> Function:
    """Casts floating-point arguments to the widest type among them."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        dtypes = [
            each.dtype for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor) and each.is_floating_point()
        ]
        if _half is None or not dtypes:
            return function(*args, **kwargs)
        widest = functools.reduce(torch.promote_types, dtypes)
        return function(*cast(args, widest), **cast(kwargs, widest))

    return run


def register_half_function(module: Any, name: str) -> None:
    """`module.name` becomes a half_function when amp.initialize is called, which must come after."""
    _register(module, name, half_function)


def register_float_function(module: Any, name: str) -> None:
    """The same for float_function."""
    _register(module, name, float_function)


def register_promote_function(module: Any, name: str) -> None:
    """The same for promote_function."""
    _register(module, name, promote_function)


def _register(module: Any, name: str, decorate: Callable[[Function], Function]) -> None:
    if name not in vars(module):
        raise PrecisionError(f"{getattr(module, '__name__', module)} has no function {name!r} to register. Check the name.")
    _registered.append((module, name, decorate))


@contextmanager
def disable_casts() -> Iterator[None]:
    """No operation chooses its precision inside."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield
