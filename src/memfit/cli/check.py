"""`memfit check`: findings about memory from the source alone, as linters print them, and mends that change no result."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memfit.cli.errors import USAGE, speak_errors, writing
from memfit.core.errors import MemfitError
from memfit.report import open_console
from memfit.report.drawing import format_count
from memfit.report.findings import FORMATS, count_findings, render_findings

if TYPE_CHECKING:
    from memfit.core.finding import Finding
    from memfit.diagnosis.lints import Chosen

FOUND = 1  # exit code where there are findings, as linters have it


def check(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Scripts, notebooks, directories.")],
    fix: Annotated[bool, typer.Option("--fix", help="Show as a diff what can be mended without changing results.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="With --fix: write it.")] = False,
    format: Annotated[str, typer.Option("--format", metavar="FORMAT", help="text, json or github.")] = "text",  # noqa: A002
    select: Annotated[str, typer.Option("--select", metavar="CODES", help="Only these codes, like MF1,MF201.")] = "",
    ignore: Annotated[str, typer.Option("--ignore", metavar="CODES", help="Not these codes.")] = "",
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Tracebacks of errors.")] = False,
) -> None:
    """Find in the source what costs memory for nothing, grows, or trains wrongly.

    Nothing is run. Exit code 0: no finding, 1: findings, 2: bad input.
    """
    with speak_errors(verbose=verbose):
        if format not in FORMATS:
            raise MemfitError(f"--format {format} is not known. There are {', '.join(FORMATS)}.")
        if yes and not fix:
            raise MemfitError("--yes writes what --fix shows. Give both, or look at the diff with --fix alone.")

        from memfit.diagnosis.lints import Chosen, check_paths

        chosen = Chosen(_read_codes("--select", select), _read_codes("--ignore", ignore))
        if fix:
            _fix(paths, chosen, write=yes)
        checked = check_paths(paths, chosen)
        console = open_console()
        errors = open_console(stderr=True)
        for problem in checked.problems:
            errors.print(f"memfit: {problem}", soft_wrap=not errors.is_terminal)
        if not fix or yes:
            width = console.width if console.is_terminal else None
            console.out(render_findings(checked.findings, format, width=width), end="", highlight=False)
            if format == "text":
                console.print(_summary(checked.findings, checked.num_files), soft_wrap=not console.is_terminal)
        if checked.interrupted:
            raise KeyboardInterrupt
        if checked.findings:
            raise typer.Exit(FOUND)
        if checked.problems:
            raise typer.Exit(USAGE)


def _summary(findings: Sequence[Finding], num_files: int) -> str:
    checked = f"{format_count(num_files, 'file')} checked"
    if not findings:
        return f"No findings, {checked}."
    return f"{count_findings(findings)}, {checked}. `memfit explain {findings[0].code}` says more."


def _read_codes(option: str, asked: str) -> tuple[str, ...]:
    from memfit.diagnosis.codes import expand_codes

    try:
        return expand_codes(asked)
    except ValueError as error:
        raise MemfitError(f"{option}: {error}. `memfit explain` lists them.") from None


def _fix(paths: list[Path], chosen: Chosen, *, write: bool) -> None:
    """Shows the mends of all Python files as one diff, and writes them if asked."""
    from memfit.diagnosis.lints.check import find_files
    from memfit.diagnosis.lints.fix import diff, fix_text, read_exactly, write_exactly

    console = open_console()
    num_mends, num_files = 0, 0
    for path in find_files(paths):
        if path.suffix != ".py":
            continue
        try:
            text, encoding = read_exactly(path)
            fixed = fix_text(text, str(path), chosen)
        except (OSError, SyntaxError, UnicodeDecodeError, ValueError):
            continue  # said once, by the check that follows
        if not fixed.num_mends:
            continue
        num_mends, num_files = num_mends + fixed.num_mends, num_files + 1
        console.out(diff(text, fixed.text, os.path.relpath(path)), end="", highlight=False)
        if write:
            with writing(path):
                write_exactly(path, fixed.text, encoding)
    said = f"{format_count(num_mends, 'change')} in {format_count(num_files, 'file')}"
    after = "" if write or not num_mends else " Nothing is written yet: add --yes."
    open_console(stderr=True).print(f"memfit: {said}{' written' if write and num_mends else ''}.{after}")
