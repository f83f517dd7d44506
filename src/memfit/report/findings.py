"""Findings -> text as linters print it, JSON, or the annotations of GitHub Actions. Static and measured ones alike.

Text is one line a finding, `path:line:column CODE message`, which editors and grep know, and the remedy below it as `help:`.
JSON is a list of objects with the fields of `core.finding.Finding`. The commands of GitHub:
https://docs.github.com/en/actions/reference/workflows-and-actions/workflow-commands
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable
from dataclasses import asdict

from memfit.core.errors import MemfitError
from memfit.core.finding import Finding
from memfit.core.sizes import format_size
from memfit.report.drawing import format_count

FORMATS = ("text", "json", "github")
_INDENT = "    "
_HELP = "    help: "


def render_findings(findings: Iterable[Finding], format: str = "text", *, width: int | None = None) -> str:  # noqa: A002
    """All findings, sorted by place, as one string that ends in a newline; no findings are "" ("[]" in JSON).

    format: one of FORMATS. width: columns at which text is wrapped; None (pipes, files) keeps one line a sentence.
    Raises MemfitError for another format.
    """
    if format not in FORMATS:
        raise MemfitError(f"{format!r} is no format of findings. There are {', '.join(FORMATS)}.")
    ordered = sorted(findings, key=lambda finding: (finding.path, finding.line, finding.column, finding.code))
    if format == "json":
        return json.dumps([asdict(finding) for finding in ordered], indent=2) + "\n"
    draw = _draw_text if format == "text" else _draw_github
    return "".join(f"{line}\n" for finding in ordered for line in draw(finding, width))


def count_findings(findings: Iterable[Finding]) -> str:
    """'3 findings in 2 files'; cells of one notebook are one file."""
    findings = list(findings)
    files = {_split_cell(finding.path)[0] for finding in findings}
    return f"{format_count(len(findings), 'finding')} in {format_count(len(files), 'file')}"


def format_worth(finding: Finding) -> str:
    """'20.00 KiB a step, measured', '512.0 KiB at the peak, measured', or '' where nothing was measured."""
    if finding.num_bytes is None:
        return ""
    when = "a step" if finding.per_step else "at the peak"
    return f"{format_size(finding.num_bytes)} {when}, {'measured' if finding.measured else 'estimated'}"


def _draw_text(finding: Finding, width: int | None) -> list[str]:
    worth = format_worth(finding)
    first = f"{finding.path}:{finding.line}:{finding.column} {finding.code} {finding.message}"
    if worth:
        first += f" [{worth}]"
    lines = _wrap(first, width, "", _INDENT)
    if finding.remedy:
        lines += _wrap(finding.remedy, width, _HELP, " " * len(_HELP))
    return lines


def _wrap(text: str, width: int | None, indent: str, further: str) -> list[str]:
    if width is None:
        return [indent + text]
    return textwrap.wrap(
        text,
        width=width,
        initial_indent=indent,
        subsequent_indent=further,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _draw_github(finding: Finding, width: int | None) -> list[str]:
    path, cell = _split_cell(finding.path)
    place = f"cell {cell}, line {finding.line}: " if cell else ""
    worth = format_worth(finding)
    text = place + finding.message + (f" [{worth}]" if worth else "") + (f"\n{finding.remedy}" if finding.remedy else "")
    # A line inside a cell is no line of the notebook's file, so a notebook is annotated as a whole.
    where = f"file={_escape(path, ',:')}" + ("" if cell else f",line={finding.line},col={finding.column}")
    return [f"::warning {where},title={finding.code}::{_escape(text)}"]


def _split_cell(path: str) -> tuple[str, str]:
    """('a.ipynb', '3') from 'a.ipynb:cell 3'; ('a.py', '') from 'a.py'."""
    name, mark, cell = path.rpartition(":cell ")
    return (name, cell) if mark else (path, "")


def _escape(text: str, more: str = "") -> str:
    """GitHub's own escapes: % and line ends everywhere, commas and colons in properties."""
    text = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    for sign in more:
        text = text.replace(sign, f"%{ord(sign):02X}")
    return text
