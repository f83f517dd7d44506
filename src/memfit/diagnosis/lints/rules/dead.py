"""MF201, MF202: tensors that are alive for nothing: logits after their loss, the graph of the turn before."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from memfit.diagnosis.lints.facts import CROSS_ENTROPIES, SAVE_OUTPUT, words
from memfit.diagnosis.lints.program import Event, Function, Program, dotted
from memfit.diagnosis.lints.queries import (
    evaluates,
    events_of,
    inside,
    is_named_evaluation,
    line_of,
    names_in,
    names_sent_backward,
    survives,
    trains,
)
from memfit.diagnosis.lints.report import Mend, Report
from memfit.diagnosis.lints.values import GRAPH

_LOOKS_AT_NAMES = words("locals globals vars eval exec dir")
_WRAPPERS = words("contiguous double flatten float log_softmax permute reshape squeeze to transpose type view unsqueeze")


def find_dead_logits(program: Program) -> Iterator[Report]:
    """`loss = cross_entropy(logits, y)` and later `loss.backward()` with `logits` never read in between or after."""
    for event in events_of(program, "call"):
        call = event.node
        assert isinstance(call, ast.Call)
        if not _is_cross_entropy(event) or not call.args or not isinstance(event.stmt, ast.Assign):
            continue
        name = _peeled(call.args[0])
        if name and _is_dead_after(name, event):
            yield Report(
                "MF201",
                event.stmt,
                f"`{name}` is never read after this line, but the name keeps it through backward: cross entropy saves its "
                "log-softmax, not the logits.",
                f"`del {name}` after this line.",
                _delete(name, event),
            )


def find_dead_outputs(program: Program) -> Iterator[Report]:
    """`loss = outputs.loss` and later `loss.backward()`: the other fields of `outputs` stay alive for nothing."""
    for event in events_of(program, "bind"):
        stmt = event.stmt
        if not isinstance(stmt, ast.Assign) or not isinstance(stmt.value, (ast.Attribute, ast.Subscript)):
            continue
        value = stmt.value
        field = value.attr if isinstance(value, ast.Attribute) else getattr(value.slice, "value", None)
        name = dotted(value.value)
        if field in ("loss", 0) and name and "." not in name and _is_dead_after(name, event):
            yield Report(
                "MF201",
                stmt,
                f"`{name}` is never read after this line, but the name keeps all of it, logits included, through backward.",
                f"`del {name}` after this line.",
                _delete(name, event),
            )


def find_dead_companions(program: Program) -> Iterator[Report]:
    """`logits, loss = model(x, y)` and later `loss.backward()`: nobody reads the logits."""
    for event in events_of(program, "bind"):
        stmt = event.stmt
        if not isinstance(stmt, ast.Assign) or not isinstance(stmt.targets[0], ast.Tuple) or not _calls_module(event):
            continue
        names = [dotted(target) for target in stmt.targets[0].elts]
        for name in names:
            if event.name == names[-1] and any(word in name for word in _BIG) and _is_dead_after(name, event):
                yield Report(
                    "MF201",
                    stmt,
                    f"`{name}` is never read, but the name keeps it through backward; inside the model only the loss needed it.",
                    f"`del {name}` after this line.",
                    _delete(name, event),
                )


_BIG = ("logit", "out", "pred", "score")


def _is_cross_entropy(event: Event) -> bool:
    return event.name.rpartition(".")[2] == "cross_entropy" or event.base.op.rpartition(".")[2] in CROSS_ENTROPIES


def _peeled(node: ast.expr) -> str:
    """'logits' of `logits.view(-1, n).float()` and of `logits[:, :-1]`."""
    while True:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _WRAPPERS:
            inner = node.func.value
            node = node.args[0] if dotted(inner) in ("F", "torch", "nn.functional") and node.args else inner
        elif isinstance(node, ast.Subscript):
            node = node.value
        else:
            return node.id if isinstance(node, ast.Name) else ""


def _is_dead_after(name: str, event: Event) -> bool:
    """Whether `name` holds a tensor with a graph, is read by nobody after the statement of the event, and a backward follows."""
    function = event.function
    assert function is not None
    mine = [other for other in function.events if other.name == name or other.name.startswith(f"{name}.")]
    binds = [other for other in mine if other.kind == "bind" and other.name == name]
    before = [other for other in binds if other.index <= event.index]
    last = max((other.index for other in function.events if other.stmt is event.stmt), default=event.index)
    if not before or name in function.parameters:
        return False
    made = before[-1].value
    if made.graph < GRAPH or made.op in SAVE_OUTPUT or made.kind not in ("tensor", "unknown"):
        return False
    if before[-1].context.loops != event.context.loops or not set(before[-1].context.arms) <= set(event.context.arms):
        return False
    if any(other.index > last for other in mine if other.kind != "bind") or not _is_first_bound(name, event, mine):
        return False
    if any(
        other.value.origin is made.origin and made.origin is not None for other in function.events if _is_alias(other, name)
    ):
        return False
    if any(_keeps(other, made.graph) for other in mine if other.kind == "read" and other.stmt is not event.stmt):
        return False
    if _is_watched(name, function) or _looks_at_names(function, event):
        return False
    target = {part for given in getattr(event.stmt, "targets", []) for part in names_in(given)}
    return any(
        other.kind == "backward"
        and other.index > last
        and other.context.loops == event.context.loops
        and bool(target & names_sent_backward(function))
        for other in function.events
    )


def _is_first_bound(name: str, event: Event, mine: list[Event]) -> bool:
    """In a loop: every turn assigns the name before it reads it, so that a `del` at the end of a turn meets no reader."""
    if not event.context.loops:
        return True
    first = next(other for other in mine if inside(other, event.context.loops[-1]))
    return first.kind == "bind" and len(event.context.loops) == len(first.context.loops)


def _is_alias(event: Event, name: str) -> bool:
    return event.kind in ("bind", "store", "return") and event.name != name


def _keeps(event: Event, graph: int) -> bool:
    """Whether a statement that reads the tensor makes something with a graph of it, which may save it."""
    assert event.function is not None
    results = [
        other for other in event.function.events if other.stmt is event.stmt and other.kind in ("bind", "augment", "store")
    ]
    return any(other.value.graph for other in results) or isinstance(event.stmt, ast.Return)


def _is_watched(name: str, function: Function) -> bool:
    """Whether something looks at the names of the function from outside the flow: closures, global, nonlocal."""
    for part in ast.walk(function.node):
        if isinstance(part, (ast.Global, ast.Nonlocal)) and name in part.names:
            return True
        inner = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
        if part is not function.node and isinstance(part, inner) and name in names_in(part) and not _is_own(name, part):
            return True
    return False


def _looks_at_names(function: Function, event: Event | None = None) -> bool:
    """Whether locals(), exec() or the like are called: anywhere, or where they could still see what the event leaves."""
    loops = event.context.loops if event is not None else ()
    start = loops[0].lineno if loops else 0 if event is None else line_of(event)
    return any(
        isinstance(part, ast.Call)
        and isinstance(part.func, ast.Name)
        and part.func.id in _LOOKS_AT_NAMES
        and part.lineno >= start
        for part in ast.walk(function.node)
    )


def _delete(name: str, event: Event) -> Mend | None:
    """`del name` after the statement, unless code from elsewhere might read it after all: run by exec(), or an importing module."""
    assert event.function is not None
    is_global = isinstance(event.function.node, ast.Module) and not event.context.loops
    return None if is_global or _looks_at_names(event.function) else Mend("delete", event.stmt, name)


def _is_own(name: str, inner: ast.AST) -> bool:
    """Whether the name is a local variable or parameter of the inner function itself."""
    return any(
        (isinstance(part, ast.Name) and part.id == name and isinstance(part.ctx, ast.Store))
        or (isinstance(part, ast.arg) and part.arg == name)
        for part in ast.walk(inner)
    )


def find_previous_graphs(program: Program) -> Iterator[Report]:
    """`loss = model(x).mean()` in a loop without backward: the old graph is let go only when the new one is complete."""
    for function in program.functions:
        if function.trains or evaluates(function) or is_named_evaluation(function):
            continue
        if function.cls is not None and function.cls.is_module:
            continue
        reported = set()
        sent = names_sent_backward(function)
        for event in reversed(function.events):
            loops = event.context.loops
            if event.kind != "bind" or not loops or event.context.grad is not True or loops[-1] in reported:
                continue
            loop = loops[-1]
            if event.value.graph < GRAPH or event.value.carried or "." in event.name or event.name in sent:
                continue
            if not _calls_module(event) or trains(loop, function) or _is_used_on(event):
                continue
            if any(other.kind == "delete" and other.name == event.name and inside(other, loop) for other in function.events):
                continue
            reported.add(loop)
            yield Report(
                "MF202",
                event.stmt,
                f"While the right side builds the new graph, `{event.name}` still holds the one of the turn before: two sets of "
                "activations at the peak.",
                f"`del {event.name}` at the end of the turn; if no gradient is wanted, torch.no_grad() around the loop.",
            )


def _calls_module(event: Event) -> bool:
    assert event.function is not None
    return any(
        other.kind == "call" and other.stmt is event.stmt and other.node in event.value.roots and other.base.kind == "module"
        for other in event.function.events
    )


def _is_used_on(event: Event) -> bool:
    """Whether something of the turn that lives on is made from it: then its graph is needed, or is another rule's matter."""
    assert event.function is not None
    loop, names = event.context.loops[-1], {event.name}
    for other in event.function.events:
        if not inside(other, loop) or other.stmt is event.stmt:
            continue
        if not names & names_in(getattr(other.stmt, "value", None)):
            continue
        if other.kind in ("bind", "augment") and other.value.graph:
            if survives(other, other.name, loop):
                return True
            names.add(other.name)
        elif (other.kind in ("store", "return") and other.value.graph) or (
            other.kind == "call" and other.base.kind in ("unknown", "object") and any(arg.graph for arg in other.args)
        ):
            return True
    return False


RULES = (find_dead_logits, find_dead_outputs, find_dead_companions, find_previous_graphs)
