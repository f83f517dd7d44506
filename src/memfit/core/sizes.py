"""Byte sizes as people write them. Inside memfit a size is an int in bytes; text exists at the edges only."""

from __future__ import annotations

import re

from memfit.core.errors import BudgetError

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGTP", start=1):
    _UNITS[f"{_letter}IB"] = 1024**_power
    _UNITS[f"{_letter}B"] = 1000**_power
    _UNITS[_letter] = 1024**_power  # nvidia-smi, ulimit and Slurm read a bare letter as binary


def parse_size(text: str | int) -> int:
    """Bytes of a positive size: `3 GiB` (1024**3), `500MB` (1000**2), `3G` (binary), `1048576`.

    Raises BudgetError for anything else, zero and negative sizes included.
    """
    if isinstance(text, bool) or not isinstance(text, (str, int)):
        raise BudgetError(
            f"{text!r} is not a size: it is a {type(text).__name__}. Write it like '3 GiB', '500MB' or 1073741824."
        )
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*([a-zA-Z]*)\s*", str(text))
    unit = match.group(2).upper() if match else ""
    if match is None or unit not in _UNITS:
        raise BudgetError(
            f"{text!r} is not a size: a positive number and one of B, KiB, MiB, GiB, TiB, kB, MB, GB, TB is expected. "
            "Write it like '3 GiB' or '500MB'."
        )
    num_bytes = int(float(match.group(1)) * _UNITS[unit]) if "." in match.group(1) else int(match.group(1)) * _UNITS[unit]
    if num_bytes <= 0:
        raise BudgetError(f"{text!r} is {num_bytes} bytes: a budget must be positive. Write it like '3 GiB'.")
    return num_bytes


def format_size(num_bytes: int) -> str:
    """A size for people, in binary units with three or four digits: 1536 -> '1.50 KiB', 0 -> '0 B'."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(value) < 1024 or unit == "PiB":
            break
        value /= 1024
    if unit == "B":
        return f"{num_bytes} B"
    return f"{value:.2f} {unit}" if abs(value) < 100 else f"{value:.1f} {unit}"


def slack_bytes(budget_bytes: int) -> int:
    """What plans leave free of a budget for the little a program keeps from step to step (losses, counters): 0.1 %, at most 1 MiB."""
    return min(budget_bytes // 1000, 1 << 20)
