"""Where reports go: a terminal, a pipe, a file. Nothing is read as markup: names of modules may hold brackets."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import IO

from rich.console import Console, RenderableType

WIDTH = 80  # of pipes and files
MAX_WIDTH = 100  # of terminals: longer lines are not easier to read


def open_console(file: IO[str] | None = None, *, stderr: bool = False, width: int | None = None) -> Console:
    """A console on `file`, else on standard output or error.

    Width is the terminal's up to MAX_WIDTH, and WIDTH in a pipe. Colour follows the terminal, NO_COLOR and FORCE_COLOR.
    """
    if file is None and not stderr and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as standard error is: a strange name must not end the report
    console = Console(file=file, stderr=stderr, highlight=False, markup=False, emoji=False)
    console.width = width or (min(console.width, MAX_WIDTH) if console.is_terminal else WIDTH)
    return console


def draw_text(renderable: RenderableType, *, width: int = WIDTH) -> str:
    """The report as plain text: no colour, no trailing blanks, one newline at the end."""
    console = Console(
        file=io.StringIO(),
        width=width,
        color_system=None,
        force_terminal=False,
        highlight=False,
        markup=False,
        emoji=False,
        legacy_windows=False,
    )
    with console.capture() as capture:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in capture.get().splitlines()).strip("\n") + "\n"


def write_report(renderable: RenderableType, path: str | Path) -> None:
    """Write the report as a file: HTML where its name ends in .html, else plain text at WIDTH columns."""
    if str(path).lower().endswith((".html", ".htm")):
        console = Console(
            file=io.StringIO(),
            width=WIDTH,
            record=True,
            force_terminal=True,
            highlight=False,
            markup=False,
            emoji=False,
        )
        console.print(renderable)
        Path(path).write_text(console.export_html(inline_styles=True), encoding="utf-8")
    else:
        Path(path).write_text(draw_text(renderable), encoding="utf-8")
