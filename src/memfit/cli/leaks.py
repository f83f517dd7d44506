"""`memfit leaks`: run a script and say what grows from step to step."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from memfit.cli.errors import check_output, speak_errors, writing
from memfit.cli.run import end_script
from memfit.cli.script import check_script
from memfit.core.errors import MemfitError
from memfit.core.growth_file import save
from memfit.core.proof import to_document
from memfit.core.sizes import parse_size
from memfit.report import draw_growth, draw_proof, open_console


def leaks(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="The script that trains or evaluates.")],
    args: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Its own arguments, untouched.")] = None,
    steps: Annotated[int | None, typer.Option(metavar="N", help="Stop the script after N steps. Default: let it end.")] = None,
    budget: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Say in how many steps these bytes are full, like 3GiB.")
    ] = None,
    prove: Annotated[bool, typer.Option("--prove", help="Try the fix on a copy: run SCRIPT again, mended.")] = False,
    json: Annotated[Path | None, typer.Option(metavar="OUT", help="Write the report as JSON.")] = None,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Tracebacks of errors.")] = False,
) -> None:
    """Run SCRIPT and say what grows from step to step, who holds it, and the fix.

    With --prove SCRIPT runs a second time, from a copy with the fix; no file is changed, except by SCRIPT itself.

    Everything after SCRIPT belongs to it. Its output and exit code are its own; the report goes to standard error.
    """
    console = open_console(sys.stderr)  # bound now: the script may put something else there
    with speak_errors(verbose=verbose, console=console):
        budget_bytes = None if budget is None else parse_size(budget)
        if steps is not None and steps < 4:
            raise MemfitError(f"--steps {steps} is too few: growth shows from the fourth step on. Give 4 or more.")
        check_script(script)
        json = check_output(json, "--json")
        path = os.path.abspath(script)  # for the traceback: the script may change directory
        directory = os.getcwd()

        from memfit import api
        from memfit.diagnosis.values import ValueLog

        values = ValueLog() if prove else None
        report, exit_code, error = api.watch_script(script, args or [], budget=budget_bytes, max_steps=steps, values=values)
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or replaced by the script
            sys.stdout.flush()
        with contextlib.suppress(OSError):  # so that paths are shown as they were given
            os.chdir(directory)
        console.print()
        console.print(draw_growth(report))
        proof = None
        if values is not None and not isinstance(error, KeyboardInterrupt):
            proof = api.prove_growth(script, args or [], report, values, error, steps)
            console.print()
            console.print(draw_proof(proof))
        if json is not None:
            with writing(json):
                save(report, json, None if proof is None else to_document(proof))
    raise typer.Exit(end_script(error, exit_code, path, console, verbose=verbose))
