"""Reading what is checked: a Python file, or a notebook whose code cells are joined into one program.

A notebook's magics (`%time`, `!pip`) are blanked, so that lines stay where they are. Format: https://nbformat.readthedocs.io
"""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

_IGNORE = re.compile(r"#\s*memfit:\s*ignore(?:\[([^\]]*)\])?")
# Only files that speak of these can train anything with PyTorch.
_TRAINING = re.compile(r"\b(torch|lightning|pytorch_lightning|transformers|accelerate|apex|torchmetrics)\b")


@dataclass(frozen=True)
class Source:
    """A readable source. text: what is parsed; tree: its ast. starts: of a notebook, (first line in text, cell number) of every
    cell; () of a file. ignored: line -> codes, or None for all. broken: sentences about cells that could not be parsed."""

    path: str
    text: str
    tree: ast.Module
    starts: tuple[tuple[int, int], ...] = ()
    ignored: tuple[tuple[int, tuple[str, ...] | None], ...] = ()
    broken: tuple[str, ...] = ()

    def place(self, line: int) -> tuple[str, int]:
        """(path, line) as the user knows it: 'work.ipynb:cell 3' and the line in that cell."""
        for start, cell in reversed(self.starts):
            if line >= start:
                return f"{self.path}:cell {cell}", line - start + 1
        return self.path, line

    def column(self, line: int, offset: int) -> int:
        """The 1-based column in characters of a 0-based offset in UTF-8 bytes."""
        before = self._lines[line - 1].encode()[:offset] if line <= len(self._lines) else b""
        return len(before.decode(errors="replace")) + 1

    @cached_property
    def _lines(self) -> list[str]:
        return re.split(r"\r\n|\r|\n", self.text)  # as Python counts them: str.splitlines also splits at form feeds

    def ignores(self, line: int, code: str) -> bool:
        """Whether a comment on the line silences the code."""
        for ignored, codes in self.ignored:
            if ignored == line and (codes is None or any(code.startswith(prefix) for prefix in codes)):
                return True
        return False


def may_train(text: str) -> bool:
    """Whether a text can be about training with PyTorch at all; everything else is passed over without parsing."""
    return _TRAINING.search(text) is not None


def read_source(path: Path, name: str) -> Source | None:
    """The source at `path`, called `name` in findings; None where it has nothing to do with PyTorch.

    Raises OSError, UnicodeDecodeError, SyntaxError, and ValueError for what calls itself a notebook and is none.
    """
    if path.suffix == ".ipynb":
        return _read_notebook(path.read_text(encoding="utf-8"), name)
    with tokenize.open(path) as file:  # heeds the coding line
        text = file.read()
    return parse_text(text, name)


def parse_text(text: str, name: str) -> Source | None:
    """The source of a Python text. Raises SyntaxError (ValueError for null bytes)."""
    if not may_train(text):
        return None
    return Source(name, text, ast.parse(text), ignored=_find_ignored(text))


def _read_notebook(text: str, name: str) -> Source | None:
    try:
        cells = json.loads(text)["cells"]
        codes = [(number, "".join(cell["source"])) for number, cell in enumerate(cells, start=1) if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"it is no notebook of format 4 ({type(error).__name__}: {error})") from error
    joined: list[str] = []
    starts: list[tuple[int, int]] = []
    broken: list[str] = []
    for number, code in codes:
        code = _blank_magics(code)
        try:
            ast.parse(code)
        except (SyntaxError, ValueError) as error:
            line = getattr(error, "lineno", None) or 1
            broken.append(
                f"{name}:cell {number}:{line} could not be parsed ({getattr(error, 'msg', error)}); the other cells were."
            )
            continue
        starts.append((len(joined) + 1, number))
        joined += code.split("\n")
    whole = "\n".join(joined)
    if not may_train(whole) and not broken:
        return None
    return Source(name, whole, ast.parse(whole), tuple(starts), _find_ignored(whole), tuple(broken))


def _blank_magics(code: str) -> str:
    """The cell with its magics and shell lines as comments; a cell of another language (`%%bash`) is all comment."""
    lines = code.split("\n")
    first = next((line for line in lines if line.strip()), "")
    if first.startswith("%%") and not re.match(r"%%(time|timeit|capture|prun|memit|mprun|script python)\b", first):
        return "\n".join("#" for _ in lines)
    return "\n".join(_blank_magic(line) for line in lines)


def _blank_magic(line: str) -> str:
    """`!nvidia-smi`, `%matplotlib inline`, `model?` -> `pass` at the same indent; `x = !ls` and `x = %time f()` -> `x = None`."""
    indent, body = line[: len(line) - len(line.lstrip())], line.lstrip()
    if body.startswith(("%", "!", "?")) or re.fullmatch(r"[\w.]+\?{1,2}", body.rstrip()):
        return f"{indent}pass"
    assigned = re.match(r"([\w., ]+=\s*)[!%]\w", body)
    return f"{indent}{assigned.group(1)}None" if assigned else line


def _find_ignored(text: str) -> tuple[tuple[int, tuple[str, ...] | None], ...]:
    """Comments `# memfit: ignore` and `# memfit: ignore[MF101, MF2]` by line."""
    if "memfit: ignore" not in text and "memfit:ignore" not in text:
        return ()
    found = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and (match := _IGNORE.search(token.string)):
            codes = match.group(1)
            found.append(
                (token.start[0], None if codes is None else tuple(part.strip() for part in codes.split(",") if part.strip()))
            )
    return tuple(found)
