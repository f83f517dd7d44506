"""A notebook as one program: its code cells joined, and mended sources put back into their cells.

A notebook's magics (`%time`, `!pip`) are blanked by a statement on the same line, which names the line it stands for, so that places
stay what they are and the magic can be put back. Format: https://nbformat.readthedocs.io
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping

from memfit.diagnosis.lints.source import Source, find_ignored, may_train

_MARK = "  # memfit:magic "
_MARKED = re.compile(rf"(\s*)(?:pass|[\w., ]+=\s*None){_MARK}(\d+)")
_PYTHON_CELL = re.compile(r"%%(time|timeit|capture|prun|memit|mprun|script python)\b")


def read_cells(text: str) -> dict[int, str]:
    """The sources of the code cells by their number, counted from 1 over all cells. Raises ValueError for what is no notebook."""
    try:
        cells = enumerate(json.loads(text)["cells"], start=1)
        return {number: "".join(cell["source"]) for number, cell in cells if cell["cell_type"] == "code"}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"it is no notebook of format 4 ({type(error).__name__}: {error})") from error


def write_cells(text: str, codes: Mapping[int, str]) -> str:
    """The notebook with these sources in its cells; outputs, metadata and the form of the file are kept."""
    data = json.loads(text)
    forms = [{"indent": indent, "ensure_ascii": is_plain} for indent in (1, 2, 4, None) for is_plain in (False, True)]
    end = text[len(text.rstrip()) :]
    # Jupyter writes an indent of 1; where no form gives the file back as it is, that one is taken.
    form = next((each for each in forms if json.dumps(data, **each) + end == text), forms[0])  # type: ignore[arg-type]
    for number, code in codes.items():
        cell = data["cells"][number - 1]
        cell["source"] = code.splitlines(keepends=True) if isinstance(cell["source"], list) else code
    return json.dumps(data, **form) + end  # type: ignore[arg-type]


def join_cells(codes: Mapping[int, str], name: str) -> Source | None:
    """The cells as one source; None where they have nothing to do with PyTorch. Cells that cannot be parsed are left out and said."""
    joined: list[str] = []
    starts: list[tuple[int, int]] = []
    broken: list[str] = []
    hidden: set[str] = set()
    for number, code in codes.items():
        blanked = blank_magics(code)
        try:
            ast.parse(blanked)
        except (SyntaxError, ValueError) as error:
            line = getattr(error, "lineno", None) or 1
            broken.append(
                f"{name}:cell {number}:{line} could not be parsed ({getattr(error, 'msg', error)}); the other cells were."
            )
            continue
        lines = blanked.split("\n")
        starts.append((len(joined) + 1, number))
        hidden.update(
            word
            for before, after in zip(code.split("\n"), lines, strict=True)
            if before != after
            for word in re.findall(r"\w+", before)
        )
        joined += lines
    whole = "\n".join(joined)
    if not may_train(whole) and not broken:
        return None
    return Source(name, whole, ast.parse(whole), tuple(starts), find_ignored(whole), tuple(broken), frozenset(hidden))


def blank_magics(code: str) -> str:
    """The cell without its magics and shell lines; a cell of another language (`%%bash`) is all comment."""
    lines = code.split("\n")
    first = next((line for line in lines if line.strip()), "")
    if first.startswith("%%") and not _PYTHON_CELL.match(first):
        return "\n".join("#" for _ in lines)
    return "\n".join(_blank_magic(line, index) for index, line in enumerate(lines))


def _blank_magic(line: str, index: int) -> str:
    """`!nvidia-smi`, `%matplotlib inline`, `model?` -> `pass` at the same indent; `x = !ls` and `x = %time f()` -> `x = None`."""
    indent, body = line[: len(line) - len(line.lstrip())], line.lstrip()
    if body.startswith(("%", "!", "?")) or re.fullmatch(r"[\w.]+\?{1,2}", body.rstrip()):
        return f"{indent}pass{_MARK}{index}"
    assigned = re.match(r"([\w., ]+=\s*)[!%]\w", body)
    return f"{indent}{assigned.group(1)}None{_MARK}{index}" if assigned else line


def restore_magics(blanked: str, code: str) -> str:
    """A blanked and then mended cell with the magics of `code` where they stood, at the indent the mend gave them."""
    lines = code.split("\n")

    def restore(line: str) -> str:
        marked = _MARKED.fullmatch(line)
        return marked.group(1) + lines[int(marked.group(2))].lstrip() if marked else line

    return "\n".join(restore(line) for line in blanked.split("\n"))
