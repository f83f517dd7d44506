"""The pieces all reports are drawn from: sizes, seconds, bars, aligned facts, tables without lines.

Everything says its piece without colour, and a terminal that knows no more than ASCII gets `#` for a bar.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.segment import Segment
from rich.style import Style
from rich.table import Column, Table
from rich.text import Text

from memfit.core.finding import Finding
from memfit.core.plan import Move
from memfit.core.sizes import format_size

GOOD, BAD, QUIET, HEAD = "green", "bold red", "dim", "bold"

_NUM_PARTS = 3  # of a file's path that are shown; files have the whole path
MAX_MOVES = 24  # rows of moves on a terminal; files get all of them


def format_seconds(seconds: float) -> str:
    """Seconds for people, with three digits: 0.0123 -> '12.3 ms', 75 -> '75.0 s', 0 -> '0 s'."""
    if seconds == 0:
        return "0 s"
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "us"), (1e9, "ns")):
        value = seconds * factor
        if abs(value) >= 0.9995 or unit == "ns":
            break
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f} {unit}"


def format_percent(part: float, whole: float) -> str:
    """'99.0 %'; '-' where the whole is nothing."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def format_count(count: int, noun: str) -> str:
    """'1 move', '12 moves', '1 buffer'."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


@dataclass(frozen=True)
class Bar:
    """`part` of `whole` as a bar of at most `width` characters; anything above nothing shows at least one."""

    part: float
    whole: float
    width: int
    style: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        share = min(max(self.part / self.whole, 0.0), 1.0) if self.whole else 0.0
        length = max(round(share * self.width), 1 if self.part > 0 else 0)
        yield Segment(("#" if options.ascii_only else "█") * length, Style.parse(self.style))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(self.width, self.width)


def draw_heading(text: str) -> Text:
    """The line above a table."""
    return Text(text, style=HEAD)


def draw_facts(facts: Iterable[tuple[str, str | Text]]) -> Table:
    """Label and sentence, one fact a row, the sentences aligned and wrapped."""
    table = Table.grid(Column(width=11, style=HEAD), Column(overflow="fold"), padding=(0, 2, 0, 0))
    for label, fact in facts:
        table.add_row(Text(label), fact if isinstance(fact, Text) else Text(fact))
    return table


def draw_finding(finding: Finding) -> tuple[str, str]:
    """A measured finding as a fact: its bytes, and place, message and remedy in a sentence."""
    place = f"{shorten_path(finding.path)}:{finding.line}"
    size = format_size(finding.num_bytes) if finding.num_bytes else ""
    return size, f"{place} {finding.code} {finding.message}. {finding.remedy}"


def shorten_path(path: str) -> str:
    """'/home/me/project/nets/bert.py' -> 'project/nets/bert.py'."""
    return "/".join(path.replace("\\", "/").split("/")[-_NUM_PARTS:])


def draw_table(columns: Sequence[str], rows: Iterable[Sequence[str | Text | Bar]], *, wide: int = 0) -> Padding:
    """Rows under quiet headings, two blanks in; the column with index `wide` is left-aligned and may wrap.

    A heading that begins with '<' is left-aligned too.
    """
    table = Table(box=None, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0), header_style=QUIET)
    table.show_header = any(column.strip("<") for column in columns)
    for index, column in enumerate(columns):
        left = index == wide or column.startswith("<")
        table.add_column(
            Text(column.lstrip("<")),
            justify="left" if left else "right",
            overflow="fold",
            no_wrap=index != wide,
        )
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return Padding(table, (0, 0, 0, 2))


def draw_moves(moves: Sequence[Move], *, reasons: bool, max_moves: int | None = MAX_MOVES) -> Padding:
    """The moves in forward order with bytes and seconds; `reasons` adds why, where it differs from the move before.

    Of more than `max_moves` the ones that save most are shown, still in forward order, and the rest as one row.
    """
    shown = set(range(len(moves)))
    if max_moves is not None and len(moves) > max_moves:
        shown = set(sorted(shown, key=lambda i: (-moves[i].saved_bytes, i))[: max_moves - 1])
    rows: list[Sequence[str | Text | Bar]] = []
    reason = ""
    for index in sorted(shown):
        move = moves[index]
        place = Text(move.place or "(top level)")
        if reasons and move.reason and move.reason != reason:
            reason = move.reason
            place.append("\n" + reason, style=QUIET)
        rows.append((move.technique, place, format_size(move.saved_bytes), format_seconds(move.seconds)))
    rest = [move for index, move in enumerate(moves) if index not in shown]
    if rest:
        rows.append(
            (
                "and",
                f"{len(rest)} smaller ones (-v shows all)",
                format_size(sum(move.saved_bytes for move in rest)),
                format_seconds(sum(move.seconds for move in rest)),
            )
        )
    if len(moves) > 1:
        rows.append(
            (
                Text("all", style=HEAD),
                Text("together (peaks are replayed, not summed)", style=QUIET),
                Text(format_size(sum(move.saved_bytes for move in moves)), style=HEAD),
                Text(format_seconds(sum(move.seconds for move in moves)), style=HEAD),
            )
        )
    return draw_table(("<technique", "place", "bytes", "seconds"), rows, wide=1)
