"""`memfit check`: paths -> findings. Nothing is imported or run; files that have nothing to do with PyTorch are passed over.

Costs a few milliseconds a file; many files are shared out over the cores.
"""

from __future__ import annotations

import os
import re
import signal
import tokenize
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from memfit.core.errors import MemfitError
from memfit.core.finding import Finding
from memfit.diagnosis.lints.facts import words
from memfit.diagnosis.lints.flow import analyse
from memfit.diagnosis.lints.notebook import join_cells, read_cells
from memfit.diagnosis.lints.program import read_program
from memfit.diagnosis.lints.report import Mend, Report
from memfit.diagnosis.lints.rules import RULES
from memfit.diagnosis.lints.source import Source, parse_text

NOTEBOOK = ".ipynb"
_SUFFIXES = (".py", NOTEBOOK)
_SKIPPED = words("__pycache__ node_modules site-packages venv env build dist")
_MANY_FILES = 64  # from here on starting processes pays


@dataclass(frozen=True)
class Chosen:
    """Which codes are wanted: prefixes to select (all if empty) and to leave out."""

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()

    def takes(self, code: str) -> bool:
        """Whether findings with this code are wanted."""
        return (not self.select or code.startswith(self.select)) and not code.startswith(self.ignore or ("-",))


EVERYTHING = Chosen()


@dataclass(frozen=True)
class Checked:
    """What came out of one file or of many. problems: sentences about what could not be read or parsed.
    interrupted: whether Ctrl-C came, so that this is only the first `num_files` files."""

    findings: tuple[Finding, ...] = ()
    problems: tuple[str, ...] = ()
    num_files: int = 0
    interrupted: bool = False


def check_paths(paths: Iterable[Path], chosen: Chosen = EVERYTHING) -> Checked:
    """Checks files and everything below directories. Ctrl-C ends it with what was found so far.

    Raises MemfitError for a path that does not exist or holds no source.
    """
    files = list(find_files(paths))
    done: list[Checked] = []
    interrupted = False
    try:
        for each in _check_each(files, partial(check_file, chosen=chosen)):
            done.append(each)
    except KeyboardInterrupt:
        interrupted = True
    return Checked(
        tuple(finding for each in done for finding in each.findings),
        tuple(problem for each in done for problem in each.problems),
        len(done),
        interrupted,
    )


def _check_each(files: list[Path], work: Callable[[Path], Checked]) -> Iterator[Checked]:
    """The results in the order of the files, from several processes where there are many."""
    if len(files) < _MANY_FILES or (os.cpu_count() or 1) < 2:
        yield from map(work, files)
        return
    # Ctrl-C is for this process; the others would only print their tracebacks.
    pool = ProcessPoolExecutor(initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN))
    try:
        yield from pool.map(work, files, chunksize=8)
    finally:
        pool.shutdown(cancel_futures=True)


def find_files(paths: Iterable[Path]) -> Iterator[Path]:
    """The Python files and notebooks in `paths`, directories walked in order, each once. Raises MemfitError as check_paths."""
    seen: set[Path] = set()
    for path in paths:
        if not path.exists():
            raise MemfitError(f"There is no file or directory {path}.")
        if path.is_dir():
            found = [file for file in _walk(path) if file not in seen]
            if not found and not seen:
                raise MemfitError(f"{path} holds no Python file and no notebook. Give the script, or the directory it is in.")
        else:
            found = [path] if path not in seen else []
        seen.update(found)
        yield from found


def _walk(directory: Path) -> Iterator[Path]:
    for folder, below, names in os.walk(directory):
        below[:] = sorted(name for name in below if name not in _SKIPPED and not name.startswith("."))
        yield from (Path(folder, name) for name in sorted(names) if name.endswith(_SUFFIXES))


def check_file(path: Path, chosen: Chosen = EVERYTHING) -> Checked:
    """Checks one file; what cannot be read or parsed becomes a problem, not an exception."""
    try:
        source = _read_source(path)
    except SyntaxError as error:
        return Checked(problems=(f"{path}:{error.lineno or 1} could not be parsed: {error.msg}.",), num_files=1)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        return Checked(problems=(f"{path} could not be read: {reason}.",), num_files=1)
    except RecursionError:
        return Checked(problems=(f"{path} could not be parsed: it is nested too deeply.",), num_files=1)
    if source is None:
        return Checked(num_files=1)
    return Checked(tuple(finding for finding, _ in find_in(source, chosen)), source.broken, 1)


def _read_source(path: Path) -> Source | None:
    """The source at `path`; None where it has nothing to do with PyTorch.

    Raises OSError, UnicodeDecodeError, SyntaxError, and ValueError for what calls itself a notebook and is none.
    """
    if path.suffix == NOTEBOOK:
        return join_cells(read_cells(path.read_text(encoding="utf-8")), str(path))
    with tokenize.open(path) as file:  # heeds the coding line
        return parse_text(file.read(), str(path))


def check_text(text: str, name: str = "<text>", chosen: Chosen = EVERYTHING) -> list[Finding]:
    """The findings in a Python text. Raises SyntaxError."""
    source = parse_text(text, name)
    return [] if source is None else [finding for finding, _ in find_in(source, chosen)]


def find_in(source: Source, chosen: Chosen) -> list[tuple[Finding, Mend | None]]:
    """All findings of a source with their mends, sorted by place, those that are not wanted or ignored by comment left out."""
    program = analyse(read_program(source.tree, source.text))
    found: dict[tuple[int, int, str], tuple[Finding, Mend | None]] = {}
    for rule in RULES:
        for report in rule(program):
            finding = _as_finding(report, source)
            line: int = report.node.lineno  # type: ignore[attr-defined]
            if chosen.takes(report.code) and not _is_ignored(report, source):
                found.setdefault((line, finding.column, report.code), (finding, report.mend))
    return [found[key] for key in sorted(found)]


def _as_finding(report: Report, source: Source) -> Finding:
    line: int = report.node.lineno  # type: ignore[attr-defined]
    path, shown = source.place(line)
    column = source.column(line, report.node.col_offset)  # type: ignore[attr-defined]
    message = re.sub(r"\bline (\d+)", lambda match: _say_line(int(match[1]), path, source), report.message)
    return Finding(path, shown, column, report.code, message, report.remedy)


def _say_line(line: int, path: str, source: Source) -> str:
    """'line 4', as the user counts: inside a cell of a notebook, and of which cell if it is another one."""
    other, shown = source.place(line)
    return f"line {shown}" if other == path else f"line {shown} of {other.rpartition(':')[2]}"


def _is_ignored(report: Report, source: Source) -> bool:
    """A comment counts on the first line of what is reported, and on its last where it goes over several."""
    first: int = report.node.lineno  # type: ignore[attr-defined]
    last: int = getattr(report.node, "end_lineno", None) or first
    return source.ignores(first, report.code) or (last - first < 20 and source.ignores(last, report.code))
