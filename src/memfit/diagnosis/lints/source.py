"""A source that is checked: its text, its tree, and the places in it as the user knows them. `notebook` makes one of cells."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from dataclasses import dataclass
from functools import cached_property

_IGNORE = re.compile(r"#\s*memfit:\s*ignore(?:\[([^\]]*)\])?")
# Only files that speak of these can train anything with PyTorch.
_TRAINING = re.compile(r"\b(torch|lightning|pytorch_lightning|transformers|accelerate|apex|torchmetrics)\b")


@dataclass(frozen=True)
class Source:
    """A readable source. text: what is parsed; tree: its ast. starts: of a notebook, (first line in text, cell number) of every
    cell; () of a file. ignored: line -> codes, or None for all. broken: sentences about cells that could not be parsed. hidden: words of
    a notebook's magics, which may read or bind variables."""

    path: str
    text: str
    tree: ast.Module
    starts: tuple[tuple[int, int], ...] = ()
    ignored: tuple[tuple[int, tuple[str, ...] | None], ...] = ()
    broken: tuple[str, ...] = ()
    hidden: frozenset[str] = frozenset()

    def place(self, line: int) -> tuple[str, int]:
        """(path, line) as the user knows it: 'work.ipynb:cell 3' and the line in that cell."""
        for start, cell in reversed(self.starts):
            if line >= start:
                return f"{self.path}:cell {cell}", line - start + 1
        return self.path, line

    def cell(self, line: int) -> int:
        """The number of the notebook's cell in which the line is; 0 in a file."""
        return next((cell for start, cell in reversed(self.starts) if line >= start), 0)

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


def parse_text(text: str, name: str) -> Source | None:
    """The source of a Python text. Raises SyntaxError (ValueError for null bytes)."""
    if not may_train(text):
        return None
    return Source(name, text, ast.parse(text), ignored=find_ignored(text))


def find_ignored(text: str) -> tuple[tuple[int, tuple[str, ...] | None], ...]:
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
