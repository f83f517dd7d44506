"""One variant of one workload in a process of its own, stepped on command, so that two can be timed turn by turn.

A process apiece because a live memfit session watches every tensor call of its process, a plain step beside it
included; and so that nothing but the variant is in the memory that is counted.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # before torch: the profiler else writes a line on every start and stop
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # for the processes started here: two of them share the cores

import torch

import oracle
import peers
from workloads import Setup, Workload

# glibc's malloc: keep what is freed, as a card's caching allocator does. Else every step asks the system for its large tensors anew, and a step
# of plain eager takes 0.94 to 1.08 of another (W3); so 0.98 to 0.99. Read when a process starts. Takes the highest moment's memory for good.
# (And scattered: 9.5 GB for BERT-base at 20 x 384 with gradient checkpointing, whose tensors are 2.6 GB at most.)
KEEP_FREED = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(100 << 30), "MALLOC_TOP_PAD_": str(64 << 20)}

# For what is too large for that: from the first step on what malloc would learn to do in the first few (see oracle.StepTime).
NOTHING_TO_LEARN = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(64 << 20)}

EAGER, MEMFIT = "eager", "memfit"  # the other variants are the names in peers.PEERS


class StepBytes(NamedTuple):
    """oracle.StepMemory without its events: at the step's start, at its peak, and of the latter what are activations."""

    baseline: int
    peak: int
    activations: int


class VariantError(Exception):
    """The variant raised in its process. `kind` is the error's class name, `needed_bytes` what a BudgetError knows."""

    def __init__(self, kind: str, message: str, needed_bytes: int | None) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind, self.needed_bytes = kind, needed_bytes


@dataclass
class Variant:
    """The caller's end. `with Variant(WORKLOADS["W1"], "memfit", budget) as variant: variant.trace_step()`.

    workload: its `build` is a function of a module or a functools.partial of one, for it goes to another process.
    timeout_seconds: of the variant's whole life; past it the process is ended and VariantError raised. None: no limit.
    is_planned: memfit follows, from its first step on, the smallest plan made from a trace of the step; `budget_bytes` is then the plan's.
    """

    workload: Workload
    name: str
    budget_bytes: int | None = None
    num_threads: int = 1
    timeout_seconds: float | None = None
    is_planned: bool = False
    _deadline: float | None = field(default=None, repr=False)
    _pipe: Any = field(default=None, repr=False)
    _process: Any = field(default=None, repr=False)

    def __enter__(self) -> Variant:
        if self.timeout_seconds is not None:
            self._deadline = time.monotonic() + self.timeout_seconds
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, self.workload, self.name, self.budget_bytes, self.num_threads, self.is_planned)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._pipe.send("stop")
        self._process.join(timeout=60)
        if self._process.is_alive():
            self._process.terminate()

    def trace_step(self) -> StepBytes:
        """The memory of the next step."""
        return self._ask("trace")

    def finish_with_digest(self) -> tuple[StepBytes, dict[str, str]]:
        """As trace_step, and the digest of all state before the gradients go."""
        return self._ask("digest")

    def time_step(self, num_steps: int = 1) -> oracle.StepTime:
        """Seconds of one of the next `num_steps` steps, on average."""
        return self._ask("time", num_steps)

    def give_back(self) -> None:
        """Give the memory that malloc keeps back to the system: another process needs it."""
        self._ask("give back")

    def facts(self) -> dict[str, Any]:
        """What memfit says of its run; empty for the other variants."""
        return self._ask("facts")

    def _ask(self, command: str, *arguments: Any) -> Any:
        try:
            self._pipe.send((command, *arguments))
            if self._deadline is not None and not self._pipe.poll(max(0.0, self._deadline - time.monotonic())):
                self._process.kill()
                raise VariantError("Timeout", f"not done after {self.timeout_seconds:g} s", None)
            kind, value = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(timeout=10)
            raise VariantError("ProcessDied", f"exit code {self._process.exitcode}", None) from None
        if kind == "error":
            raise VariantError(*value)
        return value


def _serve(
    pipe: Connection, workload: Workload, name: str, budget_bytes: int | None, num_threads: int, is_planned: bool
) -> None:
    torch.set_num_threads(num_threads)
    try:
        plan = _plan_smallest(workload) if is_planned else None
        setup = workload.make()  # seeds the generators: as if nothing had gone before
        with _enter(setup, name, budget_bytes, plan) as session:
            for command, *arguments in iter(pipe.recv, "stop"):
                pipe.send(("done", _obey(setup, session, command, *arguments)))
    except EOFError:
        pass
    except Exception as error:
        with contextlib.suppress(OSError):
            pipe.send(("error", (type(error).__name__, str(error), getattr(error, "needed_bytes", None))))


def _plan_smallest(workload: Workload) -> Any:
    """The plan for the smallest budget that `memfit trace` and `memfit plan` find for the workload's second step."""
    import memfit
    from memfit.core.sizes import slack_bytes
    from memfit.planner import find_frontier, plan

    setup = workload.make()
    setup.step()  # the optimizer's state arrives
    trace = memfit.trace(setup.step)
    del setup
    _give_back()
    frontier = find_frontier(trace)
    try:
        return plan(trace, 1, margin_bytes=1, frontier=frontier)
    except memfit.BudgetError as error:
        budget_bytes = error.needed_bytes or 0
        return plan(trace, budget_bytes, margin_bytes=slack_bytes(budget_bytes), frontier=frontier)


@contextlib.contextmanager
def _enter(setup: Setup, name: str, budget_bytes: int | None, plan: Any) -> Iterator[Any]:
    if name != MEMFIT:
        if name != EAGER:
            peers.PEERS[name](setup)
        yield None
        return
    import memfit

    if plan is not None:
        budget_bytes = plan.budget_bytes
    with memfit.fit(setup.model, setup.optimizer, budget=budget_bytes, plan=plan) as session:
        yield session


def _obey(setup: Setup, session: Any, command: str, *arguments: Any) -> Any:
    if command == "time":
        return oracle.time_step(setup.step, *arguments)
    if command == "give back":
        _give_back()
        return None
    if command == "facts":
        return _read_facts(session) if session is not None else {}
    loss, memory = oracle.measure_activations(lambda: _step_without_clearing(setup), setup.model)
    digest = oracle.digest_state(setup.model, setup.optimizer, loss) if command == "digest" else None
    setup.optimizer.zero_grad(set_to_none=True)  # frees only, so the peak is known already
    step_bytes = StepBytes(memory.baseline_bytes, memory.peak_bytes, memory.activation_bytes)
    return step_bytes if digest is None else (step_bytes, digest)


def _give_back() -> None:
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


def _step_without_clearing(setup: Setup) -> torch.Tensor:
    loss = setup.forward_backward()
    setup.optimizer.step()
    return loss


def _read_facts(session: Any) -> dict[str, Any]:
    result = session.result()
    return {
        "budget_bytes": result.budget_bytes,
        "predicted_peak_bytes": result.predicted_peak_bytes,
        "own_peak_bytes": result.peak_bytes,
        "own_planned_peak_bytes": result.planned_peak_bytes,
        "own_eager_peak_bytes": result.eager_peak_bytes,
        "floor_bytes": result.floor_bytes,
        "installed": result.installed,
        "num_moves": len(result.moves),
        "certificate": result.certificate.verdict,
        "messages": list(result.messages),
    }
