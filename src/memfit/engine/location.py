"""The line of the user's program that is running."""

from __future__ import annotations

import sys
from types import FrameType

_SKIP = ("/torch/", "/memfit/")


def user_line(depth: int = 1) -> str:
    """'file:line' of the nearest frame of the user's program, from `depth` frames above the caller on; '' if there is none."""
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None:
        name = frame.f_code.co_filename
        if not any(part in name for part in _SKIP):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
