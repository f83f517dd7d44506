"""`memfit plan`: what would be done for a budget, what it would cost, and why. Runs without torch."""

from __future__ import annotations

import os
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from memfit.cli.errors import check_output, speak_errors, writing
from memfit.core.sizes import parse_size
from memfit.core.trace import Trace
from memfit.report import draw_plan, follow_progress, open_console


def plan(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="A trace written by `memfit trace`.")],
    budget: Annotated[str, typer.Option(metavar="SIZE", help="Bytes the whole step may take, like 3GiB.")],
    lower: Annotated[
        Path | None,
        typer.Option(
            metavar="TRACE", help="A trace of the same step in lower precision: for where the budget cannot be met without."
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="OUT", help="Where the plan goes.")] = None,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="All moves; tracebacks of errors.")] = False,
) -> None:
    """Find the cheapest plan for a budget.

    Says what would be done, what it would cost, and why.
    """
    with speak_errors(verbose=verbose):
        budget_bytes = parse_size(budget)
        output = check_output(output, "-o")
        taken, taken_lower = Trace.load(trace), None if lower is None else Trace.load(lower)

        from memfit import api

        with follow_progress(open_console(stderr=True), live=True) as on_progress:
            on_progress("planning")
            found = api.plan(taken, budget_bytes, on_progress, lower=taken_lower)
        console = open_console()
        console.print(draw_plan(found, max_moves=None) if verbose else draw_plan(found))
        if output is not None:
            with writing(output):
                found.save(output)
            console.print()
            options = f"--budget {quote(budget)} --plan {quote(os.path.relpath(output))}"
            options += " --allow approximate" if found.precision else ""
            console.print(f"Saved. Next: memfit run {options} SCRIPT", soft_wrap=True)
