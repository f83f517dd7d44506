"""`memfit check`: findings about memory from the source alone, as linters print them, and mends that change no result."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
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
    from memfit.core.trace import Trace
    from memfit.diagnosis.lints import Checked, Chosen
    from memfit.diagnosis.lints.fix import Fixed, Made

FOUND = 1  # exit code where there are findings, as linters have it


def check(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Scripts, notebooks, directories.")],
    fix: Annotated[bool, typer.Option("--fix", help="Show as a diff what can be mended without changing results.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="With --fix: write it.")] = False,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE", help="Say what each mend is worth in this trace of the script.")
    ] = None,
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

        from memfit.core.trace import Trace
        from memfit.diagnosis.lints import Chosen, check_paths

        measured = None if trace is None else Trace.load(trace)
        if trace is not None:
            _say_stale(paths, trace)
        chosen = Chosen(_read_codes("--select", select), _read_codes("--ignore", ignore))
        if fix:
            _fix(paths, chosen, measured, write=yes)
        checked = check_paths(paths, chosen)
        if measured is not None and not fix:
            checked = _weigh(checked, paths, chosen, measured)
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


def _mend(path: Path, chosen: Chosen) -> tuple[str, str, Fixed] | None:
    """(text, encoding, mended) of a file; None where it cannot be read or parsed, which the check says."""
    from memfit.diagnosis.lints.fix import fix_file, read_exactly

    try:
        text, encoding = read_exactly(path)
        return text, encoding, fix_file(text, path, chosen)
    except (OSError, SyntaxError, UnicodeDecodeError, ValueError, RecursionError):
        return None


def _fix(paths: list[Path], chosen: Chosen, trace: Trace | None, *, write: bool) -> None:
    """Shows the mends of all files as one diff, each with its worth if there is a trace, and writes them if asked."""
    from memfit.diagnosis.lints.check import find_files
    from memfit.diagnosis.lints.fix import diff_of, write_exactly

    console, errors = open_console(), open_console(stderr=True)
    made: list[Made] = []
    num_files = 0
    for path in find_files(paths):
        if (mended := _mend(path, chosen)) is None:
            continue
        text, encoding, fixed = mended
        if fixed.refused:
            errors.print(f"memfit: {fixed.refused}", soft_wrap=not errors.is_terminal)
        if not fixed.made:
            continue
        num_files += 1
        made += fixed.made
        console.out(diff_of(text, fixed, os.path.relpath(path)), end="", highlight=False)
        if write:
            with writing(path):
                write_exactly(path, fixed.text, encoding)
    said = f"{format_count(len(made), 'change')} in {format_count(num_files, 'file')}"
    after = "" if write or not made else " Nothing is written yet: add --yes."
    if trace is not None and made:
        _say_worth(made, trace)
    errors.print(f"memfit: {said}{' written' if write and made else ''}.{after}")


def _say_worth(made: list[Made], trace: Trace) -> None:
    """A line for each mend, and one for all of them where there are several."""
    from memfit.core.replay import replay
    from memfit.diagnosis.lints.worth import Worth, peak_with_all, weigh

    errors = open_console(stderr=True)
    for each in made:
        worth = weigh(each, trace)
        said = worth.text if worth is not None else "not in the traced step"
        errors.out(f"{each.finding.path}:{each.finding.line} {each.finding.code} {each.action}: {said}", highlight=False)
    if len(made) > 1:
        errors.out(f"all of them: {Worth(replay(trace).peak_bytes, peak_with_all(made, trace)).text}", highlight=False)


def _weigh(checked: Checked, paths: list[Path], chosen: Chosen, trace: Trace) -> Checked:
    """The findings with the measured bytes of their mends."""
    from memfit.diagnosis.lints.check import find_files
    from memfit.diagnosis.lints.worth import with_worth

    mended = [_mend(path, chosen) for path in find_files(paths)]
    made = [each for one in mended if one is not None for each in one[2].made]
    return replace(checked, findings=tuple(with_worth(checked.findings, made, trace)))


def _say_stale(paths: list[Path], trace: Path) -> None:
    """Lines are matched by number: a source written after the trace may have others."""
    from memfit.diagnosis.lints.check import find_files

    taken = trace.stat().st_mtime
    newer = [str(path) for path in find_files(paths) if path.stat().st_mtime > taken]
    if newer:
        errors = open_console(stderr=True)
        more = f" and {format_count(len(newer) - 1, 'other file')}" if len(newer) > 1 else ""
        errors.print(
            f"memfit: {newer[0]}{more} changed after {trace} was taken, so bytes may be told of the wrong line. Take the trace again.",
            soft_wrap=not errors.is_terminal,
        )
