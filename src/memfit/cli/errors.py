"""How errors are said: the sentence on standard error and exit code 2; the traceback with -v."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.text import Text

from memfit.core.errors import MemfitError
from memfit.report import open_console
from memfit.report.drawing import BAD

USAGE = 2  # exit code of everything memfit refuses; 1 is the script's uncaught exception, as in Python
INTERRUPT = 130  # 128 + SIGINT, as shells report it


@contextmanager
def speak_errors(*, verbose: bool, console: Console | None = None) -> Iterator[None]:
    """Turn a MemfitError into its sentence and exit code 2, and Ctrl-C into exit code 130."""
    console = console or open_console(stderr=True)
    try:
        yield
    except MemfitError as error:
        say_error(error, console, verbose=verbose)
        raise typer.Exit(USAGE) from None
    except KeyboardInterrupt:
        console.print(Text("memfit: interrupted", style=BAD))
        raise typer.Exit(INTERRUPT) from None


def say_error(error: MemfitError, console: Console, *, verbose: bool) -> None:
    """`memfit: BudgetError: 8.0 GiB is too small. ...`; one line in a pipe, so that it can be searched for."""
    if verbose:
        console.out("".join(traceback.format_exception(error)), end="", highlight=False)
    name = "" if type(error) is MemfitError else f"{type(error).__name__}: "
    text = Text("memfit: ").append(name, style=BAD).append(str(error))
    console.print(text, soft_wrap=not console.is_terminal)


def check_output(path: Path | None, option: str) -> Path | None:
    """The path made absolute, since the script may change directory. Raises MemfitError if it cannot be written.

    Asked before the work begins: hours of training must not end in a file name that was wrong from the start.
    """
    if path is None:
        return None
    path = path.expanduser().absolute()
    if path.is_dir():
        raise MemfitError(f"{option} {path} is a directory. Give the name of a file in it.")
    if not path.parent.is_dir():
        raise MemfitError(f"{option} {path} cannot be written: there is no directory {path.parent}. Make it first.")
    return path


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError while `path` is written into a MemfitError that names it."""
    try:
        yield
    except OSError as error:
        raise MemfitError(f"{path} could not be written: {error.strerror or error}.") from error
