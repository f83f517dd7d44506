"""MF101-MF104: what keeps the graphs of earlier steps: sums, lists, states carried over.

A sum that a backward pass reads is no finding: a loss made of parts needs its parts.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from memfit.diagnosis.lints.facts import words, words_of
from memfit.diagnosis.lints.program import Event, LoopNode, Program, dotted
from memfit.diagnosis.lints.queries import (
    backward_operands,
    events_of,
    growing_loop,
    names_in,
    names_sent_backward,
    quote,
    retains,
    says,
)
from memfit.diagnosis.lints.report import Mend, Report
from memfit.diagnosis.lints.values import GRAPH

# Calls that look at a value and do not compute on with it.
_SHOW = words("add debug float format info int len log print report round scalar set show str write writer")
_ONE_MORE = words("append appendleft add extend insert")


def find_sums(program: Program) -> Iterator[Report]:
    """`total += loss`, `total = total + loss`, where loss has its graph and total lives longer than the step."""
    for event in events_of(program, "augment", "bind"):
        added = _added(event)
        if added is None or event.value.graph < GRAPH or not event.context.loops:
            continue
        assert event.function is not None
        if growing_loop(event, event.name) is None or event.name in names_sent_backward(event.function):
            continue
        done = backward_operands(event.function)
        carriers = {name for name in names_in(added) if _has_graph(name, event)} - {event.name}
        mend = _detach(added, event)
        if carriers and carriers <= done:
            yield Report(
                "MF102",
                event.stmt,
                f"`{event.name}` keeps the graph nodes of every step: {quote(added)} still has its graph after backward. "
                "That is host memory, a few nodes a step; the saved tensors are already freed.",
                "Add the number: `.item()`, or `.detach()`.",
                mend,
            )
        else:
            yield Report(
                "MF101",
                event.stmt,
                f"`{event.name}` keeps the graph of every step with the tensors saved in it: no backward pass frees "
                f"{quote(added)}, and the sum lives on.",
                "Add `.item()` or `.detach()` of it, or compute it under torch.no_grad().",
                mend,
            )


def _added(event: Event) -> ast.expr | None:
    """What is added to the running value, if the event is such a step."""
    if event.value.kind == "list" or event.base.kind == "list":
        return None
    if event.kind == "augment" and isinstance(event.stmt, ast.AugAssign):
        return event.stmt.value if isinstance(event.stmt.op, (ast.Add, ast.Sub)) and event.name else None
    if event.kind == "bind" and isinstance(event.stmt, ast.Assign) and len(event.stmt.targets) == 1:
        return _added_to(event.name, event.stmt.value)
    return None


def _added_to(name: str, value: ast.expr) -> ast.expr | None:
    """`b` of `name + b` and `0.9 * name + b`, also in an arm of `if`; of `torch.lerp(name, b, 0.1)` the second argument."""
    if isinstance(value, ast.IfExp):
        return _added_to(name, value.body) or _added_to(name, value.orelse)
    if isinstance(value, ast.BinOp) and isinstance(value.op, (ast.Add, ast.Sub)):
        left, right = name in names_in(value.left), name in names_in(value.right)
        return value.right if left and not right else value.left if right and not left else None
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in ("add", "lerp", "maximum"):
        given = [value.func.value, *value.args]
        if any(dotted(part) == name for part in given[:2]):
            return next((part for part in given if names_in(part) - {name, "torch"}), None)
    return None


def _has_graph(name: str, event: Event) -> bool:
    """Whether `name` is read in the statement of the event with a graph."""
    assert event.function is not None
    return any(
        other.kind == "read" and other.name == name and other.stmt is event.stmt and other.value.graph == GRAPH
        for other in event.function.events
        if other.value.kind not in ("module", "object", "function")
    )


def _detach(added: ast.expr, event: Event) -> Mend | None:
    """`.detach()` leaves every value as it is, bit for bit, where `.item()` would go on in double precision."""
    assert event.function is not None
    if _escapes(event.name, event):
        return None
    return Mend("call", added, "detach")


def _escapes(name: str, event: Event) -> bool:
    """Whether others could run a backward pass on the sum: it is returned, stored on an object, or handed to a call."""
    assert event.function is not None
    if "." in name:
        return True
    for other in event.function.events:
        if other.kind == "return" or (other.kind == "store" and other.name != name):
            value = getattr(other.stmt, "value", None)
            if name in names_in(value) and other.value.graph:
                return True
        elif other.kind == "call" and isinstance(other.node, ast.Call) and not words_of(other.name) & _SHOW:
            given = any(name in names_in(arg) for arg in other.node.args)
            if given and other.base.kind in ("unknown", "object", "function"):
                return True
    return False


def find_lists(program: Program) -> Iterator[Report]:
    """`losses.append(loss)`, `history[step] = loss`, where the tensor has its graph and the list lives longer than the step."""
    for event in events_of(program, "store"):
        if event.value.graph < GRAPH or event.value.leaf or not event.context.loops or not _is_one_more(event):
            continue
        assert event.function is not None
        loop = growing_loop(event, event.name)
        if loop is None or event.name in names_sent_backward(event.function) or not _made_in(event, loop):
            continue
        stored = _stored(event)
        yield Report(
            "MF103",
            event.node,
            f"`{event.name}` keeps {quote(stored)} of every step with its graph.",
            "Store `.item()` of a number; of a tensor `.detach()`, and `.cpu()` if it is not needed on the device.",
            _detach_stored(stored, event),
        )


def _made_in(event: Event, loop: LoopNode) -> bool:
    """Whether the graph is of this step: its calls stand inside the loop (a parameter put into a list once is another thing)."""
    assert event.function is not None
    calls = {other.node for other in event.function.events if any(part is loop for part in other.context.loops)}
    return not event.value.roots or any(root in calls for root in event.value.roots)


def _is_one_more(event: Event) -> bool:
    """Whether the container gets longer with it: not a fixed key that is overwritten, not a bounded deque."""
    if "maxlen" in ast.dump(event.base.made_by) if event.base.made_by is not None else False:
        return False
    node = event.node
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Attribute) and node.func.attr in _ONE_MORE
    if isinstance(node, ast.Subscript):
        turning = {
            name for loop in event.context.loops if isinstance(loop, (ast.For, ast.AsyncFor)) for name in names_in(loop.target)
        }
        return bool(names_in(node.slice) & turning)
    return isinstance(node, ast.AugAssign)


def _stored(event: Event) -> ast.expr:
    if isinstance(event.node, ast.Call):
        return event.node.args[-1]
    value = getattr(event.stmt, "value", None)
    assert isinstance(value, ast.expr)
    return value


def _detach_stored(stored: ast.expr, event: Event) -> Mend | None:
    if event.value.kind != "tensor" or _escapes(event.name, event):
        return None
    return Mend("call", stored, "detach")


def find_carried_states(program: Program) -> Iterator[Report]:
    """`loss.backward(retain_graph=True)` where the loss hangs on what the step before computed."""
    for event in events_of(program, "backward"):
        if event.value.carried and event.context.loops and isinstance(event.node, ast.Call) and retains(event.node):
            if not any(item.arg == "retain_graph" for item in event.node.keywords):
                continue
            state = _carried_name(event)
            yield Report(
                "MF104",
                event.node,
                f"This backward goes through all earlier steps: {state} still has the graph of the step before, and "
                "retain_graph=True keeps every one of them.",
                f"Cut {state} with `.detach()` at the start of the step and drop retain_graph=True.",
            )


def _carried_name(event: Event) -> str:
    """The name that is read in the loop before it is assigned there."""
    assert event.function is not None
    loop = event.context.loops[-1]
    for other in event.function.events:
        if other.kind == "read" and inside_with_carried(other, loop):
            return f"`{other.name}`"
    return "a value"


def inside_with_carried(event: Event, loop: LoopNode) -> bool:
    """Whether the event reads, in the loop, what an earlier turn left."""
    return loop in event.context.loops and event.value.carried


def find_needless_retains(program: Program) -> Iterator[Report]:
    """`loss.backward(retain_graph=True)` where no second backward comes: nothing saved is freed until the name is let go."""
    for function in program.functions:
        backwards = [event for event in function.events if event.kind == "backward"]
        for event in backwards:
            call = event.node
            if event.value.carried or not event.context.loops or not isinstance(call, ast.Call) or event.value.graph < GRAPH:
                continue
            if (
                not any(item.arg == "retain_graph" and says(item.value, True) for item in call.keywords)
                or not event.value.roots
            ):
                continue
            if any(item.arg == "create_graph" for item in call.keywords) or _is_needed(event, backwards):
                continue
            yield Report(
                "MF108",
                call,
                "retain_graph=True keeps everything this backward would free, and no second backward goes through the graph: it "
                "stays until the loss is overwritten, which is after the next forward.",
                "Drop retain_graph=True.",
            )


def _is_needed(event: Event, backwards: list[Event]) -> bool:
    """Whether another backward, or a gradient asked for, goes through the same calls."""
    assert event.function is not None
    if any(other is not event and other.value.roots & event.value.roots for other in backwards):
        return True
    for other in event.function.events:
        if other.kind == "call" and other.name.endswith("autograd.grad") and other.index > event.index:
            return True
        if other.kind in ("store", "return") and other.value.roots & event.value.roots and other.value.graph:
            return True  # somebody else may go through it
    inner = event.context.loops[-1]
    assert event.function is not None
    made = {other.node for other in event.function.events if other.kind == "call" and inner in other.context.loops}
    return not event.value.roots <= made  # a part of the graph is from before the loop and gone through in every turn


RULES = (find_sums, find_lists, find_carried_states, find_needless_retains)
