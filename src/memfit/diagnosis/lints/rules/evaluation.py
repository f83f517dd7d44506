"""MF301, MF302: evaluation that builds graphs nobody goes back through, or keeps every output to reduce it at the end."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from memfit.diagnosis.lints.facts import words, words_of
from memfit.diagnosis.lints.program import Event, Function, LoopNode, Program, dotted
from memfit.diagnosis.lints.queries import (
    evaluates,
    events_of,
    inside,
    is_eval_call,
    is_named_evaluation,
    names_in,
    quote,
    says,
    survives,
)
from memfit.diagnosis.lints.report import Mend, Report
from memfit.diagnosis.lints.values import GRAPH, NO_GRAPH

_CATS = words("cat concat concatenate hstack vstack")
_REDUCTIONS = words("all any amax amin argmax argmin count_nonzero max mean min std sum topk var")
_FAST_PATHS = words("MultiheadAttention Transformer TransformerEncoder TransformerEncoderLayer")
_TEACHERS = words("teacher")
_WANT_GRADIENTS = words("torch.autograd.grad torch.autograd.functional.jacobian torch.func.grad")


def find_graphs_in_evaluation(program: Program) -> Iterator[Report]:
    """A forward after `model.eval()`, in a function without backward, with gradients on."""
    for function in program.functions:
        if function.trains or _wants_gradients(function) or _is_lightning(function):
            continue
        # A name alone is weak evidence: it counts for a plain function that this file calls with gradients on.
        named = is_named_evaluation(function) and bool(function.sites) and function.cls is None
        in_eval = False
        for event in function.events:
            if event.kind != "call":
                continue
            if is_eval_call(event):
                in_eval = True
            elif event.name.endswith(".train") and event.base.kind == "module":
                in_eval = False
            elif _builds_graph(event) and (in_eval or named) and (event.context.loops or is_named_evaluation(function)):
                yield Report(
                    "MF301",
                    event.node,
                    f"{quote(event.node)} builds a graph that no backward goes through: eval() changes dropout and batch norm, it "
                    "does not turn gradients off.",
                    "Put the evaluation under torch.no_grad() or torch.inference_mode().",
                    _wrap(event, function, program),
                )
                break


def _builds_graph(event: Event) -> bool:
    return (
        event.base.kind == "module"
        and event.value.graph == GRAPH
        and event.context.grad is True
        and (event.node in event.value.roots or event.value.kind == "list")
    )


def _wants_gradients(function: Function) -> bool:
    return any(
        (event.kind == "call" and (event.name in _WANT_GRADIENTS or event.name.endswith(("requires_grad_", "retain_grad"))))
        or (event.kind == "bind" and event.name.endswith(".requires_grad"))
        for event in function.events
    )


def _is_lightning(function: Function) -> bool:
    """Steps of a LightningModule run under its trainer's no_grad."""
    return function.cls is not None and any("Lightning" in base for base in function.cls.bases)


def _wrap(event: Event, function: Function, program: Program) -> Mend | None:
    """no_grad around the outermost loop, if nothing with a graph leaves it and no module has another path without gradients."""
    loops = event.context.loops
    torch = next((alias for alias, name in program.imports.items() if name == "torch"), None)
    if not loops or torch is None or function.result is None or function.result.graph != NO_GRAPH:
        return None
    loop = loops[0]
    if any(isinstance(part, (ast.Yield, ast.YieldFrom, ast.Await)) for part in ast.walk(loop)) or isinstance(
        loop, ast.AsyncFor
    ):
        return None
    if event.base.parts & _FAST_PATHS:  # without gradients they take a fused path: equal to rounding only
        return None
    for other in function.events:
        if (
            inside(other, loop)
            and other.value.graph
            and (
                (other.kind == "store" and (other.name.startswith("self.") or other.name in function.parameters))
                or (other.kind == "bind" and "." in other.name)
            )
        ):
            return None
    return Mend("wrap", loop, f"{torch}.no_grad()")


def find_kept_outputs(program: Program) -> Iterator[Report]:
    """`kept = torch.cat((kept, logits))` over an evaluation, or a list of logits that is only ever averaged or argmaxed."""
    for event in events_of(program, "bind"):
        if not event.context.loops or not _evaluating(event):
            continue
        value = getattr(event.stmt, "value", None)
        loop = event.context.loops[-1]
        cat = _cat_in(value)
        if cat is None or event.name not in names_in(cat.args[0]):
            continue
        if survives(event, event.name, loop) and _adds_output(cat, event) and not _feeds_back(event, loop):
            yield Report(
                "MF302",
                event.stmt,
                f"`{event.name}` keeps the full output of every batch on the device, and each cat copies all of it once more.",
                "Reduce each batch at once (argmax, a sum and a count), or move it to the CPU as it comes.",
            )
    for event in events_of(program, "store"):
        if not event.context.loops or not _evaluating(event) or not isinstance(event.node, ast.Call):
            continue
        if event.value.kind == "tensor" and _is_output(event) and _is_only_reduced(event, event.context.loops[-1]):
            yield Report(
                "MF302",
                event.node,
                f"`{event.name}` keeps the full output of every batch on the device, only to reduce it at the end.",
                "Reduce each batch at once (argmax, a sum and a count), or move it to the CPU as it comes.",
            )


def _adds_output(cat: ast.Call, event: Event) -> bool:
    """Whether what is joined on is a floating-point output, and neither an argmax nor the list itself once more."""
    assert event.function is not None
    joined = next(
        (other.args[0] for other in event.function.events if other.node is cat and other.kind == "call" and other.args), None
    )
    parts = joined.items or () if joined is not None else ()
    outputs = {other.node for other in event.function.events if other.kind == "call" and other.base.kind == "module"}
    return any(part.origin in outputs and part.op != "cut" for part in parts[1:])


def _feeds_back(event: Event, loop: LoopNode) -> bool:
    """Whether the loop computes with what it joined: generation, where the whole is the next input."""
    assert event.function is not None
    return any(
        other.kind == "read" and other.name == event.name and inside(other, loop) and other.stmt is not event.stmt
        for other in event.function.events
    )


def _evaluating(event: Event) -> bool:
    assert event.function is not None
    return event.context.grad is False or evaluates(event.function)


def _cat_in(value: ast.AST | None) -> ast.Call | None:
    for node in ast.walk(value) if value is not None else ():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CATS and node.args:
            return node
    return None


def _is_output(event: Event) -> bool:
    """Whether what is stored is a module's output as it came, made in this loop."""
    assert event.function is not None
    loop = event.context.loops[-1]
    return any(
        other.kind == "call" and other.node is event.value.origin and other.base.kind == "module" and inside(other, loop)
        for other in event.function.events
    )


def _is_only_reduced(event: Event, loop: LoopNode) -> bool:
    """Whether every reader after the loop joins the list and reduces the whole at once."""
    assert event.function is not None
    function, name = event.function, event.name
    parents = {child: parent for parent in ast.walk(function.node) for child in ast.iter_child_nodes(parent)}
    readers = [
        node
        for node in ast.walk(function.node)
        if isinstance(node, ast.Name)
        and node.id == name
        and isinstance(node.ctx, ast.Load)
        and node.lineno > (loop.end_lineno or 0)
    ]
    return bool(readers) and all(_is_reduced(node, parents, function) for node in readers)


def _is_reduced(node: ast.AST, parents: dict[ast.AST, ast.AST], function: Function) -> bool:
    parent = parents.get(node)
    while parent is not None and not isinstance(parent, ast.stmt):
        if isinstance(parent, ast.Attribute) and parent.attr in _REDUCTIONS:
            return True
        function_of = parent.func if isinstance(parent, ast.Call) and parent.args else None  # torch.mean(joined)
        if isinstance(function_of, ast.Attribute) and function_of.attr in _REDUCTIONS:
            return True
        parent = parents.get(parent)
    if isinstance(parent, ast.Assign) and len(parent.targets) == 1 and (name := dotted(parent.targets[0])):
        later = [
            other
            for other in ast.walk(function.node)
            if isinstance(other, ast.Name)
            and other.id == name
            and isinstance(other.ctx, ast.Load)
            and other.lineno > parent.lineno
        ]
        return bool(later) and all(_is_reduced(other, parents, function) for other in later)
    return False


def find_attached_teachers(program: Program) -> Iterator[Report]:
    """A teacher that is never trained runs with gradients on inside the training loop."""
    everywhere = {owner for function in program.functions for event in function.events for owner in _frozen_by(event)}
    of_objects = {owner for owner in everywhere if owner.startswith("self.")}
    for function in program.functions:
        if not function.trains:
            continue
        frozen = of_objects.union(*(_frozen_by(event) for event in (*function.events, *program.main.events)))
        trained = {owner for other in function.events for owner in other.value.owners if other.value.kind == "optimizer"}
        in_eval = {other.name.rpartition(".")[0] for other in function.events if other.kind == "call" and is_eval_call(other)}
        for event in function.events:
            if event.kind != "call" or not event.context.loops or not _builds_graph(event) or event.name in frozen | trained:
                continue
            taught = bool(words_of(event.name) & _TEACHERS)
            if (taught or (event.name in in_eval and trained)) and event.value.kind == "tensor" and _gets_data(event):
                yield Report(
                    "MF303",
                    event.node,
                    f"`{event.name}` is not trained here, but {quote(event.node)} builds its graph in every step, and the backward of "
                    "the loss goes through it.",
                    "Call it under torch.no_grad().",
                )
                break


def _frozen_by(event: Event) -> frozenset[str]:
    """The modules whose parameters the event freezes."""
    call = event.node
    if event.kind == "call" and event.name.endswith(".requires_grad_") and isinstance(call, ast.Call):
        off = bool(call.args) and says(call.args[0], False)
        return event.base.owners | {event.name.rpartition(".")[0]} if off else frozenset()
    if event.kind == "bind" and event.name.endswith(".requires_grad") and event.function is not None:
        owner = event.name.rpartition(".")[0]
        return frozenset().union(*(other.value.owners for other in event.function.events if other.name == owner))
    return frozenset()


def _gets_data(event: Event) -> bool:
    """Whether what goes in has no graph: through a critic that is held still, the gradient may have to pass."""
    return all(arg.graph == NO_GRAPH for arg in event.args)


RULES = (find_graphs_in_evaluation, find_kept_outputs, find_attached_teachers)
