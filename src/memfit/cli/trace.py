"""`memfit trace`: measure two steps of a script and change nothing."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from memfit.cli.errors import check_output, speak_errors, writing
from memfit.cli.run import end_script
from memfit.cli.script import check_script
from memfit.core.errors import MemfitError
from memfit.core.precision import read_precision
from memfit.core.replay import replay
from memfit.core.trace import Trace
from memfit.diagnosis.collecting import find_idle_calls
from memfit.diagnosis.dead import find_dead, peak_without_dead
from memfit.diagnosis.held import find_held, held_in
from memfit.diagnosis.precision import compare, describe
from memfit.report import draw_dead, draw_in_place, draw_trace, follow_progress, open_console

_NAMES = ("-o", "--output")


def trace(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="The script that trains.")],
    args: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Its own arguments.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="OUT", help="Where the trace goes.")] = None,
    precision: Annotated[
        str | None,
        typer.Option(metavar="O1|O2|O3", help="Measure in lower precision, beside float32, and say what that changes."),
    ] = None,
    half: Annotated[str | None, typer.Option(metavar="bf16|fp16", help="For --precision. Default: as torch.autocast.")] = None,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Tracebacks of errors.")] = False,
) -> None:
    """Measure two steps of SCRIPT, change nothing.

    Says where the peak is and who holds it, and writes the trace; of a script that ends before its second step, of
    what ran until then. With --precision SCRIPT runs twice.

    Options stand before SCRIPT. One may also end the line: `memfit trace train.py --epochs 3 -o trace.json`. If SCRIPT
    has an -o of its own, write memfit's before SCRIPT: then everything after SCRIPT belongs to it.
    """
    console = open_console(sys.stderr)  # bound now: the script may put something else there
    with speak_errors(verbose=verbose, console=console):
        script_args = args or []
        if output is None:
            script_args, output = split_output(script_args)
        check_script(script)
        level = read_precision(precision, half, "--half ", "--precision O1")
        output = check_output(output, "-o")
        shown = "" if output is None else quote(os.path.relpath(output))
        path = os.path.abspath(script)  # for the traceback: the script may change directory

        from memfit import api
        from memfit.runtime.again import StartingPoint
        from memfit.runtime.script import exit_code_of

        plain: Trace | None = None
        with follow_progress(console, live=False) as on_progress:
            start = StartingPoint(script)
            ran = api.trace_run(script, script_args, on_progress)
            if level is not None and ran.error is None:
                plain = ran.whole()
                start.go_back()
                ran = api.trace_run(script, script_args, on_progress, level)
        ending = ran.error
        taken = ran.whole() if ending is None or isinstance(ending, MemfitError) else ran.so_far()
        if taken is None:
            raise typer.Exit(end_script(ending, exit_code_of(ending), path, console, verbose=verbose))
        if level is not None and plain is not None and ending is None:
            console.print("\n".join(describe(compare(plain, taken), level.level.name)), highlight=False)
            console.print()
        console.print(draw_trace(taken))
        if findings := [*find_dead(taken), *find_held(taken)]:
            console.print()
            console.print(draw_dead(findings, replay(taken).peak_bytes, peak_without_dead(taken, held_in(taken))))
        if (in_place := draw_in_place(taken)) is not None:
            console.print()
            console.print(in_place)
        for finding in find_idle_calls(taken):
            console.print(f"{finding.path}:{finding.line} {finding.message}. {finding.remedy}", markup=False)
        console.print()
        if output is None:
            console.print("Not saved. End the line with `-o trace.json` to keep the trace.")
        else:
            with writing(output):
                taken.save(output)
            console.print(f"Saved. Next: memfit plan {shown} --budget SIZE", soft_wrap=True)
    if ending is not None:
        raise typer.Exit(end_script(ending, exit_code_of(ending), path, console, verbose=verbose))


def split_output(args: list[str]) -> tuple[list[str], Path | None]:
    """The script's arguments, and memfit's output if the line ends in `-o OUT`; after a `--` all is the script's."""
    if "--" in args:
        return args, None
    if len(args) >= 2 and args[-2] in _NAMES:
        return args[:-2], Path(args[-1])
    if args and args[-1].startswith("--output="):
        return args[:-1], Path(args[-1].removeprefix("--output="))
    return args, None
