"""Dataclasses from files: every value is compared with the type its field declares, so that a damaged file is refused where it is read.

Known types: int, float, bool, str, dict, and tuples of them (lists in JSON). Costs about 2 us a field.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from functools import cache
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

Row = TypeVar("Row")

LARGEST = 1 << 62  # bytes, or an index: what numpy's integers hold with room to add


def make_row(row_class: type[Row], data: Mapping[str, Any]) -> Row:
    """`row_class(**data)`. Raises ValueError naming the field whose value is of another type, KeyError for an unknown field.

    Numbers must be finite, and integers between -1 ('none') and 2**62. TypeError, by the class, where a field is missing.
    """
    hints = _hints(cast(Hashable, row_class))
    return row_class(**{name: _value(value, hints[name], name) for name, value in data.items()})


@cache
def _hints(row_class: Hashable) -> dict[str, Any]:
    return get_type_hints(row_class)


def _value(value: Any, hint: Any, name: str) -> Any:
    if get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{name} is {value!r:.50}, not a list")
        return tuple(_value(each, get_args(hint)[0], name) for each in value)
    if hint is int:
        is_right = type(value) is int and (-LARGEST if name in _MAY_BE_NEGATIVE else -1) <= value <= LARGEST
    elif hint is float:
        is_right = type(value) in (int, float) and abs(value) <= LARGEST and not math.isnan(value)
    else:
        is_right = isinstance(value, get_origin(hint) or hint)
    if not is_right:
        raise ValueError(f"{name} is {value!r:.50}, not {_WORDS[get_origin(hint) or hint]}")
    return value


_MAY_BE_NEGATIVE = frozenset(["saved_bytes"])  # a move may pin more than it evicts
_WORDS = {int: "a whole number in range", float: "a finite number", bool: "true or false", str: "text", dict: "an object"}
