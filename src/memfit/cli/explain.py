"""`memfit explain`: the long text of a technique, a part or a finding. The texts are Markdown files in `texts/`.

Those of findings stand in `texts/codes/`, a file for each family and a section `## MF101` for each code.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Annotated

import typer
from rich.markdown import Markdown

from memfit.cli.errors import speak_errors
from memfit.core.errors import MemfitError
from memfit.core.trace import Trace
from memfit.diagnosis.codes import CODES
from memfit.report import draw_sites, open_console

_TEXTS = Path(__file__).with_name("texts")


def explain(
    topic: Annotated[str | None, typer.Argument(metavar="[TOPIC]", help="What to explain; else list.")] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="TRACE", help="For inplace: say at which places of this trace, and why not.")
    ] = None,
    place: Annotated[str, typer.Option(metavar="TEXT", help="With --trace: only where module, function or line have it.")] = "",
) -> None:
    """Explain a technique or a part of memfit at length.

    `memfit explain inplace --trace trace.json` says of every call of a traced step whether it may be in place, what that
    saves, and why not where it may not.
    """
    with speak_errors(verbose=False):
        console = open_console()
        if topic is None:
            titles = {name: read_text(name).splitlines()[0].lstrip("# ").partition(": ")[2] for name in list_topics()}
            width = max(len(name) for name in titles)
            for name, title in (*titles.items(), *CODES.items()):
                console.print(f"{name:{width}}  {title}", soft_wrap=True)
            return
        text = read_text(topic)
        if trace is not None:
            if topic.strip().lower() != "inplace":
                raise MemfitError(
                    f"{topic!r} has nothing to say about one trace. Only `memfit explain inplace --trace {trace}` has."
                )
            console.print(draw_sites(Trace.load(trace), place))
            return
        if console.is_terminal:
            console.print(Markdown(text))
        else:
            console.out(text, end="", highlight=False)  # in a pipe the source, which is wrapped at 79 columns


def list_topics() -> list[str]:
    """The names that `memfit explain` knows, sorted."""
    return sorted(path.stem for path in _TEXTS.glob("*.md"))


def read_text(topic: str) -> str:
    """The Markdown of a topic, its title line first (`# name: what it is`). Raises MemfitError with close matches."""
    if topic.strip().upper() in CODES:
        return read_code(topic.strip().upper())
    topics = list_topics()
    name = topic.strip().lower().replace(" ", "-").replace("_", "-")
    if name not in topics:
        known = [*topics, *(code.lower() for code in CODES)]
        matches = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        advice = f"Did you mean {' or '.join(matches)}?" if matches else f"There are: {', '.join(topics)}."
        raise MemfitError(f"There is no text about {topic!r}. {advice}")
    return (_TEXTS / f"{name}.md").read_text(encoding="utf-8")


def read_code(code: str) -> str:
    """The text about a code of CODES: its line as the title, then its section of the family's file."""
    family = (_TEXTS / "codes" / f"{code[2]}xx.md").read_text(encoding="utf-8")
    for section in re.split(r"^## ", family, flags=re.MULTILINE):
        if section.startswith(code):
            return f"# {code}: {CODES[code]}\n\n{section.partition(chr(10))[2].strip()}\n"
    raise AssertionError(f"{code} has no section in texts/codes")  # tests/cli/test_check.py holds both together
