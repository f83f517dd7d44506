"""`memfit run`: the user's script, unmodified, inside a budget."""

from __future__ import annotations

import contextlib
import os
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from memfit.cli.errors import INTERRUPT, USAGE, check_output, say_error, speak_errors, writing
from memfit.cli.script import check_script, show_exception
from memfit.core.errors import MemfitError, PlanError, UnsupportedError
from memfit.core.plan import APPROXIMATE, BITWISE, REORDERED, Plan
from memfit.core.precision import read_precision
from memfit.core.result import Result
from memfit.core.sizes import parse_size
from memfit.core.verify import check_verify
from memfit.report import draw_result, follow_progress, open_console, write_report


class Exactness(str, Enum):
    """What --allow takes: the words of core.plan.EXACTNESS."""

    bitwise = BITWISE
    reordered = REORDERED
    approximate = APPROXIMATE


def run(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="The script that trains.")],
    args: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Its own arguments, untouched.")] = None,
    budget: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Bytes the whole step may take, like 3GiB. Default: the card's free bytes."),
    ] = None,
    allow: Annotated[Exactness, typer.Option(help="How far results may differ from plain PyTorch.")] = Exactness.bitwise,
    precision: Annotated[
        str | None,
        typer.Option(metavar="O0|O1|O2|O3", help="Train in lower precision; results differ (memfit explain precision)."),
    ] = None,
    half: Annotated[str | None, typer.Option(metavar="bf16|fp16", help="For --precision. Default: as torch.autocast.")] = None,
    plan: Annotated[Path | None, typer.Option(metavar="FILE", help="Use this plan instead of measuring first.")] = None,
    json: Annotated[Path | None, typer.Option(metavar="OUT", help="Write the result as JSON.")] = None,
    report: Annotated[Path | None, typer.Option(metavar="OUT", help="Write the report as text, or as HTML for *.html.")] = None,
    verify: Annotated[
        str, typer.Option(metavar="N|always|off", help="Compare restored tensors in the first N planned steps.")
    ] = "3",
    release: Annotated[
        bool, typer.Option("--release/--no-release", help="Let go of variables after their last use, as `del` would.")
    ] = True,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="All moves; progress; tracebacks of errors.")] = False,
) -> None:
    """Run SCRIPT inside a memory budget, with the same results.

    Everything after SCRIPT belongs to it. Its output and exit code are its own; the report goes to standard error.
    """
    console = open_console(sys.stderr)  # bound now: the script may put something else there
    with speak_errors(verbose=verbose, console=console):
        budget_bytes = None if budget is None else parse_size(budget)
        check_verify(verify, "--verify ")
        check_script(script)
        level = read_precision(precision, half, "--half ", "--precision O1")
        json, report = check_output(json, "--json"), check_output(report, "--report")
        chosen = None if plan is None else Plan.load(plan)
        path = os.path.abspath(script)  # for the traceback: the script may change directory

        from memfit import api

        with follow_progress(console, live=False) as on_progress:
            ran = api.run_script(
                script,
                args or [],
                budget=budget_bytes,
                allow=allow.value,
                plan=chosen,
                verify=verify,
                release=release,
                precision=level,
                on_progress=on_progress if verbose or console.is_terminal else _say_nothing,
            )
        if ran.result is not None:
            is_refused = isinstance(ran.error, (PlanError, UnsupportedError))  # its sentence says all there is to say
            _report(ran.result, None if is_refused else console, json, report, verbose=verbose)
    raise typer.Exit(end_script(ran.error, ran.exit_code, path, console, verbose=verbose))


def end_script(error: BaseException | None, exit_code: int, path: str, console: Console, *, verbose: bool) -> int:
    """Say what ended the script, as Python would, and give the exit code of the whole command."""
    if isinstance(error, MemfitError):
        say_error(error, console, verbose=verbose)
        return USAGE
    if error is not None and not isinstance(error, SystemExit):
        show_exception(error, path)
        return INTERRUPT if isinstance(error, KeyboardInterrupt) else exit_code or 1
    if isinstance(error, SystemExit) and error.code is not None and not isinstance(error.code, int):
        console.out(str(error.code), highlight=False)  # sys.exit("words") prints the words and is 1
        return 1
    return exit_code


def _report(result: Result, console: Console | None, json: Path | None, report: Path | None, *, verbose: bool) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or replaced by the script
        sys.stdout.flush()
    if console is not None:
        console.print()
        console.print(draw_result(result, max_moves=None) if verbose else draw_result(result))
    if json is not None:
        with writing(json):
            result.save(json)
    if report is not None:
        with writing(report):
            write_report(draw_result(result, max_moves=None), report)


def _say_nothing(stage: str, done: int = 0, total: int | None = None) -> None:
    """No progress: in a pipe the script's standard error is its own."""
