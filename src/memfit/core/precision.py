"""The opt levels O0 to O3: what each does to weights, operations, batch norm, the optimizer and the loss.

Names and meaning are those of apex's public documentation (nvidia.github.io/apex/amp.html). The O is a letter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from memfit.core.errors import PrecisionError
from memfit.core.sizes import format_size

DYNAMIC = "dynamic"  # the loss scale halves when gradients overflow and doubles after 2000 steps without
HALVES = ("bf16", "fp16")
_NAMES = {"bfloat16": "bf16", "float16": "fp16"}  # PyTorch's -> ours
_SHRINKING = ("activation", "temporary")  # kinds of memory (trace.KINDS) that O1 can make smaller, by half at most


@dataclass(frozen=True)
class Level:
    """One opt level.

    by_lists: operations choose their precision by PyTorch's autocast lists; weights stay float32.
    half_weights: the model computes in half, its inputs are cast to half and its outputs to float32.
    float32_norms: with half_weights, batch norm keeps float32 weights and statistics.
    masters: with half_weights, the optimizer updates float32 weights and the half ones are copies; else it updates half weights.
    loss_scale: DYNAMIC, or a fixed number (1.0: none). In bfloat16, which has float32's range, there is never one.
    """

    name: str
    by_lists: bool
    half_weights: bool
    float32_norms: bool
    masters: bool
    loss_scale: float | str
    title: str

    @property
    def does_nothing(self) -> bool:
        """Whether a float32 program runs as it is."""
        return not self.by_lists and not self.half_weights and self.loss_scale == 1.0


LEVELS = {
    level.name: level
    for level in (
        Level("O0", False, False, False, False, 1.0, "pure float32"),
        Level("O1", True, False, False, False, DYNAMIC, "mixed by operator lists, float32 weights"),
        Level("O2", False, True, True, True, DYNAMIC, "half but for batch norm, float32 master weights"),
        Level("O3", False, True, False, False, 1.0, "pure half"),
    )
}


@dataclass(frozen=True)
class Choice:
    """What the user asked for: a level, and which half ('bf16', 'fp16'; None: what torch.autocast takes on the device)."""

    level: Level
    half: str | None = None

    @classmethod
    def of_label(cls, label: str) -> Choice:
        """The choice that trained in this, like 'O1 bfloat16' (Result.precision, Plan.precision). Raises PrecisionError for other words."""
        level, _, half = label.partition(" ")
        return choose(level, _NAMES.get(half, half))


def choose(level: str, half: str | None = None) -> Choice:
    """The choice these words name. Raises PrecisionError for an unknown level or half."""
    if half is not None and half not in HALVES:
        raise PrecisionError(f"{half!r} is no half precision. Give {' or '.join(map(repr, HALVES))}.")
    return Choice(find_level(level), half)


def read_precision(level: str | None, half: str | None, half_option: str, remedy: str) -> Choice | None:
    """What a user's two words ask for; None where neither was given. Raises PrecisionError for unknown words, and for a half alone.

    half_option: how the second was written, up to its value. remedy: how to write the first.
    """
    if level is None:
        if half is not None:
            raise PrecisionError(f"{half_option}{half} says nothing without an opt level. Add {remedy}, or leave it out.")
        return None
    return choose(level, half)


def find_level(name: str) -> Level:
    """The level of this name. Raises PrecisionError, which names the four."""
    if name in LEVELS:
        return LEVELS[name]
    *others, last = (f"{each.name} ({each.title})" for each in LEVELS.values())
    hint = " The O is a letter, not a zero." if str(name)[:1] == "0" else ""
    raise PrecisionError(f"{name!r} is no opt level.{hint} There are {', '.join(others)} and {last}.")


def suggest(bytes_by_kind: Mapping[str, int], needed_bytes: int, budget_bytes: int) -> str:
    """A sentence for a budget that float32 cannot meet: what O1 could do at most, by the bytes that are alive when it is exceeded.

    '' where half of all activations and temporaries would not be enough either.
    """
    shrinking = sum(bytes_by_kind.get(kind, 0) for kind in _SHRINKING)
    if needed_bytes - shrinking // 2 > budget_bytes:
        return ""
    return (
        f"Lower precision may help: O1 at best halves the {format_size(shrinking)} of activations and temporaries among it (`memfit run --precision O1` or "
        "`--allow approximate`; memfit.fit(..., precision='O1')). It changes results."
    )
