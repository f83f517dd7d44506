"""The opt levels O0 to O3: what each does to weights, operations, batch norm, the optimizer and the loss.

Names and meaning are those of apex's public documentation (nvidia.github.io/apex/amp.html). The O is a letter.
"""

from __future__ import annotations

from dataclasses import dataclass

from memfit.core.errors import PrecisionError

DYNAMIC = "dynamic"  # the loss scale halves when gradients overflow and doubles after 2000 steps without
HALVES = ("bf16", "fp16")


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


def choose(level: str, half: str | None = None) -> Choice:
    """The choice these words name. Raises PrecisionError for an unknown level or half."""
    if half is not None and half not in HALVES:
        raise PrecisionError(f"{half!r} is no half precision. Give {' or '.join(map(repr, HALVES))}.")
    return Choice(find_level(level), half)


def find_level(name: str) -> Level:
    """The level of this name. Raises PrecisionError, which names the four."""
    if name in LEVELS:
        return LEVELS[name]
    *others, last = (f"{each.name} ({each.title})" for each in LEVELS.values())
    hint = " The O is a letter, not a zero." if str(name)[:1] == "0" else ""
    raise PrecisionError(f"{name!r} is no opt level.{hint} There are {', '.join(others)} and {last}.")
