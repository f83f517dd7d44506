"""The user's script as memfit sees it from outside: is it one, and what did its uncaught exception look like."""

from __future__ import annotations

import difflib
import itertools
import os
import re
import sys
import traceback
from pathlib import Path
from types import TracebackType

import memfit
from memfit.core.errors import MemfitError

# A frame of memfit in which the user's own call was running: the call is written in C, so it has no frame of its own.
_CALLS_USER = re.compile(r"(?<![.\w])func\(\*")
_WAYS = ("/torch/overrides.py", "/torch/_compile.py", "/torch/_dynamo/eval_frame.py", "/torch/_ops.py")
_PACKAGE = os.path.join(os.path.dirname(os.path.abspath(memfit.__file__)), "")


def check_script(path: str) -> None:
    """Raises MemfitError, with the remedy, for what cannot be a Python script.

    A syntax error in a .py file passes: it is the script's own, and is shown as Python shows it.
    """
    script = Path(path)
    if script.is_dir():
        inside = script / "__main__.py"
        advice = f"Give {inside}." if inside.is_file() else "Give the script in it."
        raise MemfitError(f"{path} is a directory, not a script. {advice}")
    if not script.exists():
        raise MemfitError(f"There is no script {path}. {_suggest(script)}")
    if script.suffix == ".ipynb":
        raise MemfitError(
            f"{path} is a notebook, not a script. Convert it (`jupyter nbconvert --to script {path}`), "
            "or use `memfit.fit` inside it."
        )
    try:
        source = script.read_bytes()
    except OSError as error:
        raise MemfitError(f"{path} cannot be read: {error.strerror or error}.") from error
    try:
        compile(source, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:  # ValueError: null bytes, before Python 3.12
        if script.suffix in (".py", ".pyw") and b"\0" not in source:
            return
        reason = f"line {error.lineno}: {error.msg}" if isinstance(error, SyntaxError) else str(error)
        raise MemfitError(f"{path} is not Python ({reason}). Give the Python script that trains.") from error


def _suggest(script: Path) -> str:
    try:
        names = [entry.name for entry in script.parent.iterdir() if entry.suffix == ".py"]
    except OSError:
        return f"There is no directory {script.parent} either."
    matches = difflib.get_close_matches(script.name, names, n=1)
    if matches:
        return f"Did you mean {script.parent / matches[0]}?"
    return "memfit's own options stand before the script: `memfit run --budget 3GiB train.py --epochs 3`."


def show_exception(error: BaseException, script: str) -> None:
    """Show the script's uncaught exception on standard error as Python would: without a frame of memfit.

    A hook the script put into `sys.excepthook` gets it instead, with a traceback that begins in the script.
    """
    if sys.excepthook is not sys.__excepthook__:
        sys.excepthook(type(error), error, _begin_in_script(error.__traceback__, script))
        return
    shown = traceback.TracebackException.from_exception(error)
    if isinstance(error, SyntaxError) and _begin_in_script(error.__traceback__, script) is None:
        shown.stack.clear()  # the script could not even be compiled; format() shows its line
    else:
        _leave_out_memfit(shown, script, outermost=True)
    sys.stderr.write("".join(shown.format()))


def _begin_in_script(trace: TracebackType | None, script: str) -> TracebackType | None:
    """The traceback from the script's first frame on; None if it has none (a syntax error, say)."""
    while trace is not None and not _same_file(trace.tb_frame.f_code.co_filename, script):
        trace = trace.tb_next
    return trace


def _leave_out_memfit(shown: traceback.TracebackException, script: str, *, outermost: bool) -> None:
    """Drop what called the script, and memfit's own frames in between; keep them where memfit itself raised."""
    frames = list(shown.stack)
    if outermost:
        starts = [index for index, frame in enumerate(frames) if _same_file(frame.filename, script)]
        if starts:
            frames = frames[starts[0] :]
    if frames and (not _is_ours(frames[-1].filename) or _CALLS_USER.search(frames[-1].line or "")):
        frames = _drop_ours(frames)
    shown.stack[:] = frames
    for inner in (shown.__cause__, shown.__context__, *(getattr(shown, "exceptions", None) or ())):
        if inner is not None:
            _leave_out_memfit(inner, script, outermost=False)


def _drop_ours(frames: list[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Without the runs of frames that are memfit's, or PyTorch's way into a mode of memfit's and out of it."""
    kept: list[traceback.FrameSummary] = []
    for is_way, run in itertools.groupby(frames, lambda frame: _is_ours(frame.filename) or _is_way(frame.filename)):
        frames_of_run = list(run)
        if not is_way or not any(_is_ours(frame.filename) for frame in frames_of_run):
            kept += frames_of_run
    return kept


def _is_way(filename: str) -> bool:
    return filename.replace(os.sep, "/").endswith(_WAYS)


def _same_file(filename: str, script: str) -> bool:
    return os.path.abspath(filename) == os.path.abspath(script)


def _is_ours(filename: str) -> bool:
    return os.path.abspath(filename).startswith(_PACKAGE)
