"""Progress while memfit measures and plans, on standard error.

While the script runs, a live line would fight with the script's own progress bars, so each stage is one plain line.
Where nothing of the user's prints (`memfit plan`), a terminal gets one live line that leaves nothing behind.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from memfit.report.drawing import QUIET, format_seconds


class OnProgress(Protocol):
    """Told what goes on: `stage` in words ('measuring step 1'), `done` of `total` parts, total None if unknown."""

    def __call__(self, stage: str, done: int = 0, total: int | None = None) -> None: ...


@contextmanager
def follow_progress(console: Console, *, live: bool) -> Iterator[OnProgress]:
    """Yields the `on_progress` to hand to a verb. Live line on a terminal if `live`, else one plain line a stage."""
    if live and console.is_terminal:
        with _live_line(console) as on_progress:
            yield on_progress
    else:
        yield _plain_lines(console)


def _plain_lines(console: Console, clock: Callable[[], float] = time.perf_counter) -> OnProgress:
    """One line when a stage begins, with the seconds that the stage before it took."""
    current: list[tuple[str, float]] = []

    def on_progress(stage: str, done: int = 0, total: int | None = None) -> None:
        if current and current[-1][0] == stage:
            return
        now = clock()
        before = f" ({current[-1][0]}: {format_seconds(now - current[-1][1])})" if current else ""
        current[:] = [(stage, now)]
        console.print(Text(f"memfit: {stage} ...{before}", style=QUIET), soft_wrap=True)

    return on_progress


@contextmanager
def _live_line(console: Console) -> Iterator[OnProgress]:
    columns = (
        SpinnerColumn("line"),
        TextColumn("memfit: {task.description}", markup=False),
        BarColumn(24),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False) as progress:
        task = progress.add_task("", total=None)

        def on_progress(stage: str, done: int = 0, total: int | None = None) -> None:
            if progress.tasks[0].description != stage:
                progress.reset(task, description=stage, total=total, completed=done)
            progress.update(task, completed=done, total=total)

        yield on_progress
