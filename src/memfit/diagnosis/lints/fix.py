"""Mending a source, file or notebook: only what cannot change results (see `report.Mend`), until nothing is left to mend.

A second run changes nothing. In a notebook a mend stays within its cell; a name of the notebook itself is never deleted, since a
cell may be run again, and what a magic's words may read is left alone.
"""

from __future__ import annotations

import ast
import difflib
import io
import tokenize
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from memfit.core.finding import Finding
from memfit.diagnosis.lints.check import EVERYTHING, NOTEBOOK, Chosen, find_in
from memfit.diagnosis.lints.edit import edit_text
from memfit.diagnosis.lints.notebook import blank_magics, join_cells, read_cells, restore_magics, write_cells
from memfit.diagnosis.lints.queries import names_in
from memfit.diagnosis.lints.report import Mend
from memfit.diagnosis.lints.source import Source, parse_text

_ROUNDS = 5  # a mend may uncover another: each round applies all that can be seen


@dataclass(frozen=True)
class Made:
    """A mend that was made, in lines of the text as it was before all of them.

    finding: what it mends. kind, text: see Mend. first_line, last_line: of what was changed. target_line: where it was moved to, else 0.
    """

    finding: Finding
    kind: str
    text: str
    first_line: int
    last_line: int
    target_line: int = 0

    @property
    def action(self) -> str:
        """The change in a few words: 'del logits'."""
        return {
            "delete": f"del {self.text}",
            "call": f".{self.text}()",
            "wrap": f"with {self.text}",
            "move": f"moved to line {self.target_line}",
            "keyword": self.text,
        }[self.kind]


@dataclass(frozen=True)
class Fixed:
    """The text after mending, and what was made in it. cells: of a notebook, by number (source before, source after) where they differ.
    refused: why nothing was mended, as a sentence, or ''."""

    text: str
    made: tuple[Made, ...] = ()
    cells: tuple[tuple[int, str, str], ...] = ()
    refused: str = ""

    @property
    def num_mends(self) -> int:
        return len(self.made)


def fix_file(text: str, path: Path, chosen: Chosen = EVERYTHING) -> Fixed:
    """`fix_notebook` or `fix_text`, as the file's name says."""
    return (fix_notebook if path.suffix == NOTEBOOK else fix_text)(text, str(path), chosen)


def fix_text(text: str, name: str = "<text>", chosen: Chosen = EVERYTHING) -> Fixed:
    """Applies every safe mend. Raises SyntaxError for a text that is not Python."""
    original, made = text, []
    for _ in range(_ROUNDS):
        source = parse_text(text, name)
        offered = [] if source is None else _offered(source, chosen)
        if source is None or not offered:
            break
        mended, done = edit_text(text, [mend for _, mend in offered], source)
        if not done:
            break
        ast.parse(mended)  # a mend that breaks the program is a bug of ours: let it be seen
        made += _say_made(offered, done, _line_map(original, text))
        text = mended
    return Fixed(text, tuple(made))


def fix_notebook(text: str, name: str = "<notebook>", chosen: Chosen = EVERYTHING) -> Fixed:
    """Applies every mend that is safe in a notebook to its cells; outputs and metadata stay. Raises ValueError for what is none."""
    original = codes = read_cells(text)
    made: list[Made] = []
    for _ in range(_ROUNDS):
        source = join_cells(codes, name)
        if source is not None and source.broken:
            return Fixed(text, refused=f"{name} is not mended: a cell could not be parsed, and it may read anything.")
        offered = [] if source is None else [each for each in _offered(source, chosen) if _is_safe_in_cell(each[1], source)]
        if source is None or not offered:
            break
        after, done = dict(codes), []
        for start, number in source.starts:
            mends = [mend for _, mend in offered if source.cell(_first_line(mend.node)) == number]
            if mends:
                blanked, done_here = edit_text(blank_magics(codes[number]), mends, source, start)
                ast.parse(blanked)
                after[number] = restore_magics(blanked, codes[number])
                done += done_here
        if not done:
            break
        codes = after
        made += _say_made(offered, done, lambda line: line)
    changed = {number: code for number, code in codes.items() if code != original[number]}
    cells = tuple((number, original[number], code) for number, code in changed.items())
    return Fixed(write_cells(text, changed) if changed else text, tuple(made), cells)


def _is_safe_in_cell(mend: Mend, source: Source) -> bool:
    """Whether no magic's words may read what changes, and no name of the notebook itself goes. A move into another cell is not made."""
    touched = [mend.node] if mend.target is None else [mend.node, mend.target]
    names = {mend.text} if mend.kind == "delete" else {name for node in touched for name in names_in(node)}
    if names & source.hidden:
        return False
    functions = (node for node in ast.walk(source.tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
    return mend.kind != "delete" or any(mend.node is part for function in functions for part in ast.walk(function))


def _offered(source: Source, chosen: Chosen) -> list[tuple[Finding, Mend]]:
    """The mends of the source with what they mend, less those that another one makes needless: inside a no_grad block nothing has a
    graph to detach."""
    found = [(finding, mend) for finding, mend in find_in(source, chosen) if mend is not None]
    loops = [mend.node for _, mend in found if mend.kind == "wrap"]
    inside = {node for loop in loops for node in ast.walk(loop) if node is not loop}
    kept: list[tuple[Finding, Mend]] = []
    for finding, mend in found:
        if mend.node in inside and mend.kind in ("call", "wrap") and mend.text != "clone":
            continue
        if not any(other.kind == mend.kind and other.node is mend.node and other.text == mend.text for _, other in kept):
            kept.append((finding, mend))
    return kept


def _say_made(offered: Sequence[tuple[Finding, Mend]], done: Sequence[Mend], original: Callable[[int], int]) -> list[Made]:
    """What was done, in lines of the original text."""
    return [
        Made(
            replace(finding, line=original(finding.line)),
            mend.kind,
            mend.text,
            original(_first_line(mend.node)),
            original(mend.node.end_lineno),  # type: ignore[attr-defined]
            original(_first_line(mend.target)) if mend.target is not None else 0,
        )
        for finding, mend in offered
        if any(mend is each for each in done)
    ]


def _first_line(node: ast.AST) -> int:
    line: int = node.lineno  # type: ignore[attr-defined]
    return line


def _line_map(before: str, after: str) -> Callable[[int], int]:
    """From a line of `after` to the line of `before` it was, or the one next to which it was put; both from 1."""
    if before == after:
        return lambda line: line
    matcher = difflib.SequenceMatcher(None, before.split("\n"), after.split("\n"), autojunk=False)
    opcodes = matcher.get_opcodes()

    def original(line: int) -> int:
        for _, start, end, new_start, new_end in opcodes:
            if new_start < line <= new_end:
                return max(start + 1, min(start + line - new_start, end))
        return line

    return original


def read_exactly(path: Path) -> tuple[str, str]:
    """(text with its own line ends, encoding) of a Python file or notebook. Raises OSError, UnicodeDecodeError, SyntaxError (coding line)."""
    raw = path.read_bytes()
    encoding = "utf-8" if path.suffix == NOTEBOOK else tokenize.detect_encoding(io.BytesIO(raw).readline)[0]
    return raw.decode(encoding), encoding


def write_exactly(path: Path, text: str, encoding: str) -> None:
    """Writes what `read_exactly` read, at once or not at all. Raises OSError."""
    beside = path.with_name(f".{path.name}.memfit")
    beside.write_bytes(text.encode(encoding))
    beside.chmod(path.stat().st_mode)
    beside.replace(path)


def diff(before: str, after: str, name: str) -> str:
    """A unified diff that `patch` and `git apply` take."""
    lines = difflib.unified_diff(before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/{name}", f"b/{name}")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def diff_of(before: str, fixed: Fixed, name: str) -> str:
    """The diff of a mended file; of a notebook, cell by cell, for people to read."""
    if fixed.cells:
        return "".join(diff(f"{old}\n", f"{new}\n", f"{name}:cell {number}") for number, old, new in fixed.cells)
    return diff(before, fixed.text, name)
