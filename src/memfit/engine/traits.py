"""Traits: what functions.py says of a tensor function, asked once and looked up at every call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from memfit.engine import functions


@dataclass(frozen=True, slots=True)
class Traits:
    """kind: see functions.kind_of. has_statistics: it may overwrite running statistics. writes_lists: see functions.written_lists.
    is_repeatable: a replay can do again what it does. reads_attention_flags: its kernel depends on them. stops_early: what it saves
    inside are its arguments brought into form. draws: it may move a random generator. is_reproducible_on_cuda: its kernels there are."""

    name: str
    kind: str
    is_looking: bool
    is_plain: bool
    has_statistics: bool
    writes_lists: bool
    is_repeatable: bool
    reads_attention_flags: bool
    stops_early: bool
    draws: bool
    is_reproducible_on_cuda: bool


class _Table(dict[Callable[..., Any], Traits]):
    def __missing__(self, func: Callable[..., Any]) -> Traits:
        name, kind = functions.name_of(func), functions.kind_of(func)
        traits = self[func] = Traits(
            name=name,
            kind=kind,
            is_looking=kind is functions.LOOKING,
            is_plain=kind is functions.PLAIN,
            has_statistics=functions.has_statistics(func),
            writes_lists=functions.writes_lists(func),
            is_repeatable=not functions.is_foreign(func),
            reads_attention_flags=name in functions.READS_ATTENTION_FLAGS,
            stops_early=name in functions.SAVES_BEFORE_WORK,
            draws=kind is not functions.LOOKING and functions.may_draw(func),
            is_reproducible_on_cuda=functions.is_reproducible_on_cuda(func),
        )
        return traits


TRAITS = _Table()
