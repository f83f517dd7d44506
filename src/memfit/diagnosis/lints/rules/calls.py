"""MF801-MF803: calls that cost time and give nothing back, and the retry that holds what it wants to free."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from memfit.diagnosis.lints.facts import OUT_OF_MEMORY
from memfit.diagnosis.lints.program import Event, Function, LoopNode, Program, dotted
from memfit.diagnosis.lints.queries import evaluates, events_of, trains
from memfit.diagnosis.lints.report import Report
from memfit.diagnosis.lints.rules.references import callee_of, does_tensor_work

_EMPTY_CACHE = frozenset(f"torch.{device}.empty_cache" for device in ("cuda", "mps", "xpu", "accelerator"))


def find_cache_calls(program: Program) -> Iterator[Report]:
    """`torch.cuda.empty_cache()` or `gc.collect()` in every step."""
    for event in events_of(program, "call"):
        empties, collects = event.name in _EMPTY_CACHE, event.name == "gc.collect"
        if not (empties or collects) or not event.context.loops or event.context.handler is not None:
            continue
        assert event.function is not None
        loop = event.context.loops[-1]
        if _is_sometimes(event, loop) or not (trains(loop, event.function) or evaluates(event.function)):
            continue
        if empties:
            yield Report(
                "MF801",
                event.node,
                "empty_cache() in every step waits for the device and makes the next step ask for its memory anew. It frees nothing "
                "that a name still holds, so it cures no growth.",
                "Take it out of the loop. Once between phases of different shapes it can be right.",
            )
        else:
            yield Report(
                "MF802",
                event.node,
                "gc.collect() in every step costs milliseconds and frees cycles only; tensors without cycles go by themselves.",
                "Take it out of the loop and break the cycle, if there is one.",
            )


def _is_sometimes(event: Event, loop: LoopNode) -> bool:
    """Whether an `if` inside the loop lets it run in some turns only; asking for a device is no such thing."""
    for arm, _ in event.context.arms:
        if isinstance(arm, ast.If) and loop.lineno < arm.lineno <= (loop.end_lineno or 0):
            test = ast.unparse(arm.test)
            if "is_available" not in test and "device" not in test:
                return True
    return False


def find_retries_in_handlers(program: Program) -> Iterator[Report]:
    """The smaller batch is tried inside the except block, while the exception still holds the failed step."""
    for function in program.functions:
        for event in function.events:
            handler = event.context.handler
            if event.kind != "call" or handler is None or not isinstance(event.node, ast.Call) or not event.name:
                continue
            attempt = next((arm for arm, _ in reversed(event.context.arms) if isinstance(arm, ast.Try)), None)
            if attempt is None or handler not in attempt.handlers or not _catches_memory(handler, program):
                continue
            again = any(
                other.kind == "call" and other.name == event.name and (attempt, "try") in other.context.arms and other.args
                for other in function.events
            )
            if (again or callee_of(event.node, function) is function) and _is_heavy(event.node, event, program, function):
                yield Report(
                    "MF803",
                    event.stmt,
                    "This retry runs inside the except block: until the block ends the exception holds the frames of the failed "
                    "step, so both are in memory at once.",
                    "Set a flag in the block, leave it, and retry after it.",
                )


def _catches_memory(handler: ast.ExceptHandler, program: Program) -> bool:
    types = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    names = {program.resolve(kind).rpartition(".")[2] for kind in types if kind is not None}
    if names & OUT_OF_MEMORY:
        return True
    text = ast.unparse(handler).lower()
    return (not names or "Exception" in names) and ("out of memory" in text or "oom" in text)


def _is_heavy(call: ast.Call, event: Event, program: Program, function: Function) -> bool:
    """Whether the call makes tensors: a module, a backward, or a function of this file that does such work."""
    callee = callee_of(call, function)
    if callee is not None:
        return does_tensor_work(callee.node, program, callee)
    return event.base.kind == "module" or dotted(call.func).endswith(".backward")


RULES = (find_cache_calls, find_retries_in_handlers)
