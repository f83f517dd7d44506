"""`memfit`, the console command: the verbs in the order in which one needs them."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Annotated

import typer

import memfit
from memfit.cli.check import check
from memfit.cli.explain import explain
from memfit.cli.leaks import leaks
from memfit.cli.plan import plan
from memfit.cli.run import run
from memfit.cli.trace import trace

# Plain help texts: readable in a pipe, the same everywhere, and no half second of drawing boxes.
app = typer.Typer(
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

# What follows the script is the script's: no option after it is read here, not even --help.
_SCRIPT_SETTINGS = {"allow_interspersed_args": False}

app.command("run", context_settings=_SCRIPT_SETTINGS)(run)
app.command("trace", context_settings=_SCRIPT_SETTINGS)(trace)
app.command("plan")(plan)
app.command("check")(check)
app.command("leaks", context_settings=_SCRIPT_SETTINGS)(leaks)
app.command("explain")(explain)


def show_versions(wanted: bool) -> None:
    """`memfit 0.1.0 (torch 2.13.0, Python 3.11.7)`, and exit."""
    if wanted:
        versions = f"torch {find_version('torch')}, Python {platform.python_version()}"
        typer.echo(f"memfit {memfit.__version__} ({versions})")
        raise typer.Exit(0)


@app.callback()
def choose_verb(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=show_versions, help="Show the versions and exit.")
    ] = False,
) -> None:
    """Make a PyTorch training run fit into a memory budget given in bytes, with the same results.

    memfit run --budget 3GiB train.py --epochs 3
    """


def find_version(name: str) -> str:
    """Version of an installed package, without importing it."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def main(args: list[str] | None = None) -> None:
    """Entry of the console command; leaves by SystemExit with the exit code."""
    # Not `app()`: calling a Typer object replaces sys.excepthook, which is the script's.
    typer.main.get_command(app).main(args=args, prog_name="memfit")
