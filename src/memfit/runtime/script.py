"""Run somebody's script inside this process as `python path args…` would, with a session around it.

What the script sees is its own: `sys.argv`, `sys.path[0]`, `__main__` (really the script's module, so pickling, spawned and
forked workers find its classes), `__file__`, the working directory, standard streams, signals, atexit. What it left behind of
these is put back afterwards. Source of the method: `runpy.run_path` and CPython's `pymain_run_file`.

Known limit: torch has been imported before the script's first line, so environment variables that torch's libraries read while
they are loaded (OMP_NUM_THREADS, MKL_NUM_THREADS) must be set in the shell; a script that sets them itself is told so.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from memfit.core.dead import freed_bytes
from memfit.core.errors import BudgetError, MemfitError, TraceError
from memfit.core.precision import Choice
from memfit.core.replay import replay
from memfit.core.result import Result
from memfit.core.trace import Trace
from memfit.measurement.held import HolderWatch
from memfit.runtime.loading import releasing_imports, standing_in
from memfit.runtime.session import OnProgress, Session
from memfit.techniques import release as technique

_SMALLEST_TOLD_BYTES = 1024  # of variables let go
_READ_AT_LOAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_PROC_BIND", "KMP_AFFINITY", "GOMP_CPU_AFFINITY")


@dataclass(frozen=True)
class ScriptRun:
    """How a script ended.

    error: the exception that ended it, SystemExit and memfit's own refusals included; None where it reached its last line.
    exit_code: what the process is to return: the script's own, 130 after Ctrl-C, 2 where memfit refused, 1 for any other exception.
    """

    result: Result
    exit_code: int
    error: BaseException | None

    @property
    def may_lower(self) -> bool:
        """Whether the budget was refused before the first step ended, and lower precision might meet it."""
        return isinstance(self.error, BudgetError) and self.error.may_lower and self.result.num_steps == 0


def run_script(path: str, args: list[str], session: Session, *, release: bool = True) -> ScriptRun:
    """Run the script inside the session, which must not have been entered yet; its result is completed with how the script ended.

    release: whether dead names of the script and of its own modules are let go (techniques.release).
    Raises what the session raises before the script begins; everything later is in the ScriptRun.
    """
    before = {name: os.environ.get(name) for name in _READ_AT_LOAD}
    error: BaseException | None = None
    session.__enter__()
    stop_releasing = technique.releases.start(technique.RELEASE if release else technique.KEEP)
    try:
        execute(path, args)
    except BaseException as caught:
        error = caught
    finally:
        stop_releasing()
        session.__exit__(type(error) if error is not None else None, error, None)
    if error is None:
        error = session.refusal  # the script caught it and went on to its end; the budget was not held all the same
    changed = [name for name, value in before.items() if os.environ.get(name) != value]
    if changed:
        session.messages.append(
            f"the script sets {', '.join(changed)}, which torch reads while it is loaded, and under memfit it was loaded before: "
            "set it in the shell, or results may differ from the plain run in their last bits."
        )
    if release and (reason := technique.releases.stopped_by):
        session.messages.append(f"no variable is let go, since the program may read some without naming them ({reason}).")
    exit_code = exit_code_of(error)
    result = replace(session.result(), program=path, exit_code=exit_code, let_go=_let_go(session))
    return ScriptRun(result, exit_code, error)


def _let_go(session: Session) -> dict[str, int]:
    """See Result.let_go; of the last measured step."""
    sums = freed_bytes(session.traces[-1]) if session.traces else {}
    shown: dict[str, int] = {}
    for name, num_bytes in sums.items():
        if num_bytes >= _SMALLEST_TOLD_BYTES:
            words = f"`{name.name}` ({os.path.basename(name.path)}:{name.line})"
            shown[words] = shown.get(words, 0) + num_bytes
    return shown


@dataclass(frozen=True)
class TraceRun:
    """What was traced of a script that was stopped after its second training step, or ended before.

    trace: of the last whole step, at most the second; where there is none, of all that ran (`num_steps` is 0), if anything did.
    error: what ended the script before its second step; None where nothing did.
    """

    path: str
    trace: Trace | None
    num_steps: int
    error: BaseException | None

    def whole(self) -> Trace:
        """The trace of a whole step. Raises TraceError if the script never trains, and whatever ended it before its second step."""
        if self.error is not None:
            raise self.error
        if self.trace is None or not self.num_steps:
            raise TraceError(
                f"{self.path} ended without a training step, so there is nothing to trace. A step ends when an optimizer of "
                "torch.optim (or one made from its Optimizer) steps in the script's own process. Give the arguments with which it "
                "trains."
            )
        if self.num_steps > 1:
            return self.trace
        return self._with_note(f"The script made a single training step, so this is the first one: {_FIRST}")

    def so_far(self) -> Trace | None:
        """What there is of a script that ended before its second step: its first step, else what ran. None where nothing ran."""
        if self.trace is None or not self.trace.calls:
            return None
        if self.error is None:
            return self.whole()
        words = f"{type(self.error).__name__}: {self.error}".rstrip(": ")
        if self.num_steps:
            return self._with_note(f"The script ended in its second step ({words}). This is the first one: {_FIRST}")
        return self._with_note(f"The script ended before its first step did ({words}). This is what ran until then.")

    def _with_note(self, note: str) -> Trace:
        assert self.trace is not None
        return replace(self.trace, meta={**self.trace.meta, "note": note})


_FIRST = "the optimizer's state arrives in it, and later steps would hold more from their start."


def trace_run(path: str, args: list[str], on_progress: OnProgress | None = None, precision: Choice | None = None) -> TraceRun:
    """Run the script until its second training step has ended; it is stopped there, and its `finally` blocks run."""
    is_done = False

    def stop(trace: Trace, step: int) -> None:
        nonlocal is_done
        if step >= 2:
            is_done = True
            raise _Enough

    def stop_again(*_: Any) -> None:  # the script caught the first one in an `except:` of its own
        if is_done:
            raise _Enough

    session = Session(None, None, precision=precision, on_progress=on_progress, on_trace=stop)
    session.holders = HolderWatch()
    hook = register_optimizer_step_pre_hook(stop_again)
    stop_noting = technique.releases.start(technique.NOTE)
    error: BaseException | None = None
    unfinished: Trace | None = None
    try:
        with session:
            try:
                execute(path, args)
            finally:
                if not session.traces:
                    unfinished = session.unfinished_trace()
    except BaseException as caught:
        error = caught if not is_done and not (isinstance(caught, SystemExit) and not exit_code_of(caught)) else None
    finally:
        stop_noting()
        hook.remove()
    trace = session.traces[min(len(session.traces), 2) - 1] if session.traces else unfinished
    if trace is not None:
        more = {"program": path, "step": len(session.traces)}
        if len(session.traces) > 1:
            more["first_peak_bytes"] = replay(session.traces[0]).peak_bytes
        trace = replace(trace, meta={**trace.meta, **more})
    return TraceRun(path, trace, len(session.traces), error)


class _Enough(BaseException):
    """Both steps are measured. Not an Exception: a script's `except Exception` must not swallow it."""


def exit_code_of(error: BaseException | None) -> int:
    """The exit code of a process that this exception ended, as Python has it; 2 for memfit's own refusals."""
    if error is None:
        return 0
    if isinstance(error, SystemExit):
        if error.code is None:
            return 0
        return error.code if isinstance(error.code, int) else 1
    if isinstance(error, KeyboardInterrupt):
        return 130
    return 2 if isinstance(error, MemfitError) else 1


def execute(
    path: str, args: list[str], at_end: Callable[[], None] | None = None, texts: Mapping[str, str] | None = None
) -> None:
    """Run the file as `__main__`, with its releases if such have been started. Raises what it raises, SyntaxError and SystemExit too.

    at_end: called when its last line has run, or while what ended it is on its way out: its names are all still there.
    texts: by absolute path, what is run in place of a file's own text: the script's, or that of a module it imports.
    """
    file = os.path.abspath(path)  # as Python has it since 3.9; symbolic links are not followed here, but in sys.path[0]
    texts = texts or {}
    if file in texts:
        code = compile(texts[file], file, "exec", dont_inherit=True)
    else:
        code = technique.load_code(Path(file).read_bytes(), file, is_main=True)
    main = ModuleType("__main__")
    main.__dict__.update(
        __file__=file,
        __builtins__=builtins,
        __loader__=SourceFileLoader("__main__", file),
        __package__=None,
        __spec__=None,
        __cached__=None,
    )
    own_modules: AbstractContextManager[None] = standing_in(texts) if texts else contextlib.nullcontext()
    if technique.releases.mode != technique.KEEP:
        main.__dict__.update(technique.NAMES)
        own_modules = releasing_imports(os.path.dirname(file))
    with _world_of(main, [path, *args]), own_modules:
        known = set(threading.enumerate())
        try:
            try:
                exec(code, main.__dict__)
            finally:
                if at_end is not None:
                    at_end()
        except SystemExit:
            _join(known)
            raise
        _join(known)


def _join(known: set[threading.Thread]) -> None:
    """Wait for threads the script left running, as Python does at its end, while `__main__` is still theirs."""
    for thread in threading.enumerate():
        if thread not in known and not thread.daemon and thread is not threading.current_thread():
            thread.join()


@contextmanager
def _world_of(main: ModuleType, argv: list[str]) -> Iterator[None]:
    """What belongs to a script while the body runs, and again while the atexit functions run that it registered."""
    path = list(sys.path)
    if not (getattr(sys.flags, "safe_path", False) or sys.flags.isolated):  # then Python itself puts no directory there
        path[:1] = [os.path.dirname(os.path.realpath(argv[0]))]
    outside = _take_world()
    count = _num_atexit()
    atexit.register(outside)  # runs after the script's own, which were registered later
    sys.argv, sys.path = argv, path
    sys.modules["__main__"] = main
    try:
        yield
    finally:
        if _num_atexit() > count + 1:
            _at_exit.append(atexit.register(_take_world()))  # runs before them
        else:
            atexit.unregister(outside)
        outside()


_at_exit: list[Callable[[], None]] = []  # what `_world_of` has left registered; each holds a script's names, and so its tensors


def forget_scripts() -> None:
    """Hold no script any more that has ended: its atexit functions, if it has any, will find another `__main__`. (A library's look the same:
    torch registers some when a process makes its first optimizer.)"""
    while _at_exit:
        atexit.unregister(_at_exit.pop())


def _take_world() -> Callable[[], None]:
    """What a script calls its own, now; the returned function puts it there again."""
    argv, words, path, entries = sys.argv, list(sys.argv), sys.path, list(sys.path)
    main, directory = sys.modules["__main__"], _directory()

    def put_back() -> None:
        sys.argv, sys.path = argv, path
        argv[:], path[:] = words, entries
        sys.modules["__main__"] = main
        if directory is not None and directory != _directory():
            with contextlib.suppress(OSError):  # it may be gone
                os.chdir(directory)

    return put_back


def _directory() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # deleted under us
        return None


def _num_atexit() -> int:
    """How many atexit functions are registered. CPython has told since 3.3; elsewhere none are assumed."""
    count = getattr(atexit, "_ncallbacks", None)
    return count() if count is not None else 0
