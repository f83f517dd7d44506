"""Questions that several rules ask of the events of a function."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from memfit.diagnosis.lints.facts import EVALUATION_WORDS, words, words_of
from memfit.diagnosis.lints.program import Class, Event, Function, LoopNode, Program, dotted

_TRAINING_WORDS = words("backward finish learn optimize optimise train update step")


def events_of(program: Program, *kinds: str) -> Iterator[Event]:
    """All events of these kinds, function by function."""
    for function in program.functions:
        for event in function.events:
            if event.kind in kinds:
                yield event


def names_in(node: ast.AST | None) -> set[str]:
    """Dotted names in an expression: {'a.b.c', 'a.b', 'a'} for `a.b.c`."""
    if node is None:
        return set()
    return {dotted(part) for part in ast.walk(node) if isinstance(part, (ast.Name, ast.Attribute))} - {""}


def inside(event: Event, loop: LoopNode) -> bool:
    """Whether the event is in the body of the loop."""
    return loop in event.context.loops


def trains(loop: LoopNode, function: Function) -> bool:
    """Whether a backward pass runs in every turn of the loop: here or in a function of this file that is called."""
    for event in function.events:
        if event.kind == "backward" and inside(event, loop):
            return True
        if event.kind == "call" and inside(event, loop):
            target = event.base.target
            if isinstance(target, Class):
                target = target.find(event.name.rpartition(".")[2])
            if isinstance(target, Function) and target is not function and target.trains:
                return True
    return False


def evaluates(function: Function) -> bool:
    """Whether the function is an evaluation: it puts a model into eval mode and no backward pass runs in it."""
    if function.trains:
        return False
    return any(event.kind == "call" and is_eval_call(event) for event in function.events)


def is_eval_call(event: Event) -> bool:
    """`model.eval()`, `model.train(False)`."""
    call = event.node
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return False
    if call.func.attr == "eval":
        return not call.args and event.base.kind in ("module", "unknown")
    given = [*call.args, *(item.value for item in call.keywords)]
    return call.func.attr == "train" and len(given) == 1 and isinstance(given[0], ast.Constant) and given[0].value is False


def is_named_evaluation(function: Function) -> bool:
    """`validate`, `evaluate_model`, `run_test`; not `train_and_validate`."""
    if function.name.startswith("test_"):  # a test of some tool's, more often than a run over the test set
        return False
    words = words_of(function.name)
    return bool(words & EVALUATION_WORDS) and "train" not in words and "fit" not in words


def is_reset(event: Event, name: str) -> bool:
    """Whether `name` starts anew here: assigned from something that does not read it, deleted, emptied."""
    if event.name != name:
        return False
    if event.kind in ("delete", "empty"):
        return True
    if event.kind != "bind" or not isinstance(event.stmt, (ast.Assign, ast.AnnAssign)):
        return event.kind == "bind"
    value = event.stmt.value
    shortened = isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Slice)  # last = last[-10:]
    return shortened or name not in names_in(value)


def survives(event: Event, name: str, loop: LoopNode) -> bool:
    """Whether what `name` holds goes on from one turn of `loop` to the next: no reset in it that every turn passes."""
    assert event.function is not None
    for other in event.function.events:
        if inside(other, loop) and is_reset(other, name) and set(other.context.arms) <= set(event.context.arms):
            return False
    return True


def growing_loop(event: Event, name: str) -> LoopNode | None:
    """The innermost loop over whose steps `name` goes on growing: a training loop, or any loop of an evaluation."""
    function = event.function
    assert function is not None
    for loop in reversed(event.context.loops):
        if not survives(event, name, loop):
            return None
        if trains(loop, function) or evaluates(function):
            return loop
    return None


def names_sent_backward(function: Function) -> set[str]:
    """Every name whose value a backward pass of the function goes through: its operands, and what they were computed from."""
    wanted: set[str] = set()
    for event in function.events:
        if event.kind == "backward" and isinstance(event.node, ast.Call):
            wanted |= names_in(event.node)
        elif event.kind == "call" and isinstance(event.node, ast.Call) and _may_train(event):
            for arg in event.node.args:
                wanted |= names_in(arg)
    while True:
        more = set(wanted)
        for event in function.events:
            if event.kind in ("bind", "augment", "store") and event.name in wanted:
                more |= names_in(_source_of(event))
        if more == wanted:
            return wanted
        wanted = more


def _may_train(event: Event) -> bool:
    target = event.base.target
    if isinstance(target, Function):
        return target.trains
    last = event.name.rpartition(".")[2]
    if event.base.kind in ("module", "list", "dict") or last == "set_postfix":
        return False
    return bool(words_of(last) & {"backward", "learn", "optimize", "optimise", "finish", "train"})


def _source_of(event: Event) -> ast.AST | None:
    if isinstance(event.node, ast.Call):
        return ast.Tuple(list(event.node.args), ast.Load())
    return (
        getattr(event.stmt, "value", None)
        if isinstance(event.stmt, (ast.Assign, ast.AugAssign, ast.AnnAssign))
        else (event.stmt.iter if isinstance(event.stmt, (ast.For, ast.AsyncFor)) else None)
    )


def backward_operands(function: Function) -> set[str]:
    """The names that `.backward()` is called on directly, graphs not retained."""
    found = set()
    for event in function.events:
        if event.kind == "backward" and isinstance(event.node, ast.Call) and not retains(event.node):
            found |= names_in(event.node.func.value) if isinstance(event.node.func, ast.Attribute) else set()
            for arg in event.node.args:
                found |= names_in(arg)
    return found


def retains(call: ast.Call) -> bool:
    """Whether a backward call keeps the graph."""
    for item in call.keywords:
        if (
            item.arg in ("retain_graph", "retain_variables", "create_graph")
            and isinstance(item.value, ast.Constant)
            and item.value.value
        ):
            return True
    return False


def says(value: ast.expr | None, constant: object) -> bool:
    """Whether an argument is written as this constant."""
    return isinstance(value, ast.Constant) and value.value is constant


def line_of(event: Event) -> int:
    """The line an event stands on."""
    line: int = event.node.lineno  # type: ignore[attr-defined]
    return line


def quote(node: ast.AST, longest: int = 40) -> str:
    """The source of an expression in backquotes, shortened."""
    text = " ".join(ast.unparse(node).split())
    return f"`{text}`" if len(text) <= longest else f"`{text[: longest - 1]}…`"
