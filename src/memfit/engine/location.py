"""The line of the user's program that is running."""

from __future__ import annotations

import sys
from types import FrameType

_SKIP = ("/torch/", "/memfit/")


def user_line(depth: int = 1) -> str:
    """'file:line' of the nearest frame of the user's program, from `depth` frames above the caller on; '' if there is none."""
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None:
        if not is_library(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def is_library(path: str) -> bool:
    """Whether the file is PyTorch's or memfit's, and not the user's."""
    return any(part in path for part in _SKIP)
