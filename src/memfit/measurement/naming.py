"""References in words: what an object is called from the one that holds it (`.attribute`, `['key']`, `closure`, `frame step()`)."""

from __future__ import annotations

import collections
import functools
import itertools
import types
from typing import Any

import torch

from memfit.engine.frames import read_locals
from memfit.measurement.graphs import grad_of

_REGISTRIES = ("._parameters", "._buffers", "._modules")
CACHE = type(functools.lru_cache(maxsize=1)(len))


def name_edges(existing: set[int], objects: list[Any]) -> list[str]:
    """A word for each step from an object to the next; an instance and its __dict__ are one step, as are a module's registries."""
    words: list[str] = []
    for index, (holder, held) in enumerate(itertools.pairwise(objects)):
        above = objects[index - 1] if index else None
        if isinstance(held, dict) and held is _space_of(existing, holder):
            continue
        if not isinstance(holder, dict):
            words.append(_edge(existing, holder, held))
            continue
        key = key_in(holder, held)
        if above is not None and _space_of(existing, above) is holder:
            words.append(f".{key}")
        elif words and words[-1] in _REGISTRIES:
            words[-1] = f".{key}"
        else:
            words.append(f"[{key!r}]" if isinstance(key, str) else f"[{_short(key)}]")
    return words


def join_words(words: list[str]) -> list[str]:
    """'runner', '.last_error', '[3]' -> 'runner.last_error[3]'."""
    joined: list[str] = []
    for word in words:
        if joined and word[:1] in (".", "["):
            joined[-1] += word
        else:
            joined.append(word)
    return joined


def _space_of(existing: set[int], each: Any) -> Any:
    """The instance's __dict__. Asking may have made it just now, and its values are held by it from then on."""
    space = None if isinstance(each, type) else getattr(each, "__dict__", None)
    if isinstance(space, dict):
        existing.add(id(space))
    return space


def _edge(existing: set[int], holder: Any, held: Any) -> str:
    if isinstance(holder, tuple) and isinstance(held, types.CellType):
        return "its closure"
    if isinstance(holder, (list, tuple, collections.deque)):
        return f"[{next((index for index, each in enumerate(holder) if each is held), '?')}]"
    if isinstance(holder, types.CellType):
        return "cell"
    if isinstance(holder, types.FunctionType):
        return f"function {holder.__name__}"
    if isinstance(holder, types.MethodType):
        return ".__self__"
    if isinstance(holder, BaseException):
        return f"{type(holder).__name__}'s traceback" if isinstance(held, types.TracebackType) else f"{type(holder).__name__}"
    if isinstance(holder, types.TracebackType):
        return f"frame {held.f_code.co_name}()" if isinstance(held, types.FrameType) else "next"
    if isinstance(holder, types.FrameType):
        return f"local `{key_in(read_locals(holder), held)}`"
    if isinstance(holder, types.GeneratorType):
        names = read_locals(holder.gi_frame) if holder.gi_frame is not None else {}
        return f"generator {holder.__name__}'s `{key_in(names, held)}`"
    if type(holder) is CACHE:
        return f"the lru_cache of {getattr(holder, '__qualname__', '?')}"
    if isinstance(holder, torch.Tensor):
        return ".grad" if grad_of(holder) is held else "hook"
    return f".{_attribute(existing, holder, held)}"


def _attribute(existing: set[int], holder: Any, held: Any) -> str:
    slots = {name: getattr(holder, name, None) for kind in type(holder).__mro__ for name in _slots(kind)}
    return str(key_in({**slots, **(_space_of(existing, holder) or {})}, held))


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def key_in(space: dict[Any, Any], value: Any) -> Any:
    return next((key for key, each in space.items() if each is value), "?")


def _short(key: Any) -> str:
    return str(key) if isinstance(key, (int, float, bool, type(None))) else type(key).__name__
