"""Replacing an attribute of a class or module for a while, so that it can be taken back in any order."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

_taken_back: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # wrappers that are off, and what they call


def patch(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Put `wrap(original)` in the place of `owner.name`; hand back the function that takes it off.

    If somebody has wrapped it again meanwhile, ours stays under theirs and from then on only calls the original, until theirs is taken
    off by such a function too.
    """
    original = owner.__dict__[name]
    wrapped = wrap(original)
    is_on = True

    @functools.wraps(original)
    def ours(*args: Any, **kwargs: Any) -> Any:
        return wrapped(*args, **kwargs) if is_on else original(*args, **kwargs)

    def undo() -> None:
        nonlocal is_on
        is_on = False
        _taken_back[ours] = original
        found = top = owner.__dict__.get(name)
        while found in _taken_back:
            found = _taken_back[found]
        if found is not top:
            setattr(owner, name, found)

    setattr(owner, name, ours)
    return undo
