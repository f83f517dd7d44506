"""MF201, MF202, MF211, MF212: tensors that are alive for nothing: logits after their loss, the last step's graph, attention weights."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from memfit.diagnosis.lints.facts import CROSS_ENTROPIES, CUTS, SAVE_OUTPUT, words
from memfit.diagnosis.lints.program import Event, Function, Program, dotted
from memfit.diagnosis.lints.queries import (
    evaluates,
    events_of,
    inside,
    is_named_evaluation,
    names_in,
    names_sent_backward,
    quote,
    says,
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
                Mend("delete", event.stmt, name),
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
                Mend("delete", stmt, name),
            )


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
    before = [other for other in binds if other.index < event.index]
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
    if _is_watched(name, function):
        return False
    target = {dotted(part) for part in getattr(event.stmt, "targets", [])}
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
    """Whether something looks at the names of the function from outside the flow: locals(), closures, global, nonlocal."""
    for part in ast.walk(function.node):
        if isinstance(part, ast.Call) and isinstance(part.func, ast.Name) and part.func.id in _LOOKS_AT_NAMES:
            return True
        if isinstance(part, (ast.Global, ast.Nonlocal)) and name in part.names:
            return True
        inner = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
        if part is not function.node and isinstance(part, inner) and name in names_in(part):
            return True
    return False


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


def find_unread_attention_weights(program: Program) -> Iterator[Report]:
    """`out, _ = attention(q, k, v)`: need_weights is on by default and builds (batch, length, length) for nobody."""
    for event in events_of(program, "call"):
        call = event.node
        assert isinstance(call, ast.Call)
        assert event.function is not None
        if not event.base.op.endswith(".MultiheadAttention") or any(item.arg == "need_weights" for item in call.keywords):
            continue
        if len(call.args) >= 5:  # need_weights by position
            continue
        if _drops_second(event, call):
            yield Report(
                "MF211",
                event.stmt,
                "Nobody reads the attention weights, but need_weights=True is the default: the layer builds and saves a matrix "
                "of length x length for every head.",
                "Pass need_weights=False: the fused kernel does not build it (equal to rounding).",
            )


def _drops_second(event: Event, call: ast.Call) -> bool:
    assert event.function is not None
    stmt = event.stmt
    if isinstance(stmt, ast.Assign) and stmt.value is call and isinstance(stmt.targets[0], ast.Tuple):
        second = stmt.targets[0].elts[-1]
        name = dotted(second)
        if len(stmt.targets[0].elts) != 2 or not name or "." in name:
            return False
        return not any(
            other.kind == "read" and other.name == name and other.index > event.index for other in event.function.events
        )
    for part in ast.walk(stmt):
        if isinstance(part, ast.Subscript) and part.value is call:
            return says(part.slice, 0) or (isinstance(part.slice, ast.Constant) and part.slice.value == 0)
    return False


def find_unread_extras(program: Program) -> Iterator[Report]:
    """`model(x, output_hidden_states=True)` whose `.hidden_states` nobody reads: every layer's output is kept for nothing."""
    for event in events_of(program, "call"):
        call, function = event.node, event.function
        assert isinstance(call, ast.Call)
        if function is None or event.base.kind not in ("module", "unknown") or not isinstance(event.stmt, ast.Assign):
            continue
        name = dotted(event.stmt.targets[0])
        if event.stmt.value is not call or not name or "." in name:
            continue
        for asked, field in _EXTRAS.items():
            if any(item.arg == asked and says(item.value, True) for item in call.keywords) and _reads_only_fields(
                name, field, function
            ):
                yield Report(
                    "MF213",
                    call,
                    f"{asked}=True makes the model keep every layer's, and nobody reads `{name}.{field}`.",
                    f"Leave {asked} out.",
                )


_EXTRAS = {"output_hidden_states": "hidden_states", "output_attentions": "attentions"}


def _reads_only_fields(name: str, field: str, function: Function) -> bool:
    """Whether the whole is read only through `.loss`, `.logits` and other fields than this one, and there is such a reader."""
    fields = {part.attr for part in ast.walk(function.node) if isinstance(part, ast.Attribute) and dotted(part.value) == name}
    whole = [
        part
        for part in ast.walk(function.node)
        if isinstance(part, ast.Name) and part.id == name and isinstance(part.ctx, ast.Load)
    ]
    through = [part for part in ast.walk(function.node) if isinstance(part, ast.Attribute) and dotted(part.value) == name]
    return bool(fields) and field not in fields and len(whole) == len(through)


def find_full_scores(program: Program) -> Iterator[Report]:
    """softmax(q @ k.T) @ v written out: the scores, their softmax and its dropout are saved, each length x length."""
    for function in program.functions:
        if (
            "eager" in function.name
            or isinstance(function.node, ast.Module)
            or not any(event.name.endswith("softmax") for event in function.events if event.kind == "call")
        ):
            continue
        text = ast.unparse(function.node)
        if "scaled_dot_product_attention" in text or "need_weights" in text or "output_attentions" in text:
            continue
        yield from _scores_of(function)


def _scores_of(function: Function) -> Iterator[Report]:
    scores: set[str] = set()
    weights: dict[str, ast.stmt] = {}
    for event in function.events:
        stmt = event.stmt
        value = getattr(stmt, "value", None)
        if not isinstance(value, ast.expr) or event.kind not in ("bind", "return"):
            continue
        names = names_in(value)
        softmax = next(
            (call for call in ast.walk(value) if isinstance(call, ast.Call) and _last(call).endswith("softmax")), None
        )
        if softmax is not None:
            source = (
                softmax.func.value
                if (isinstance(softmax.func, ast.Attribute) and not softmax.args[:1])
                or (isinstance(softmax.func, ast.Attribute) and dotted(softmax.func) and _is_number_first(softmax))
                else (softmax.args[0] if softmax.args else softmax)
            )
            if isinstance(softmax.func, ast.Attribute) and _is_number_first(softmax):
                source = softmax.func.value
            if _is_query_key(source) or names_in(source) & scores:
                if any(_multiplies(part, softmax) for part in ast.walk(value)):
                    yield _report_scores(stmt)
                elif event.kind == "bind":
                    weights[event.name] = stmt
                continue
        if event.kind == "bind":
            if _is_query_key(value) or (names & scores and not _has_matmul(value)):
                scores.add(event.name)
            elif names & set(weights) and not _has_matmul(value):
                weights[event.name] = weights[next(iter(names & set(weights)))]
        for name in set(weights) & names:
            if _has_matmul(value) and not _gives_out(function, set(weights)):
                yield _report_scores(weights[name])
                return


def _report_scores(stmt: ast.stmt) -> Report:
    return Report(
        "MF212",
        stmt,
        "Attention written out: the scores, their softmax and its dropout are saved for backward, each of them length x length "
        "for every head.",
        "Use torch.nn.functional.scaled_dot_product_attention where the weights themselves are not needed (equal to rounding).",
    )


def _last(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _is_number_first(call: ast.Call) -> bool:
    """`scores.softmax(-1)` or `scores.softmax(dim=-1)`, where the receiver is the input."""
    if not call.args:
        return True
    first = call.args[0]
    return isinstance(first, (ast.Constant, ast.UnaryOp))


def _is_matmul(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        return True
    return isinstance(node, ast.Call) and _last(node) in ("matmul", "bmm", "einsum", "baddbmm")


def _has_matmul(node: ast.AST) -> bool:
    return any(_is_matmul(part) for part in ast.walk(node))


def _is_query_key(node: ast.AST) -> bool:
    """A product with something transposed in it: q @ k.transpose(-2, -1), torch.bmm(q, k.mT), einsum('bqd,bkd->bqk')."""
    for part in ast.walk(node):
        if _is_matmul(part):
            turned = any(
                isinstance(inner, ast.Attribute) and inner.attr in ("transpose", "mT", "T", "permute", "swapaxes", "mH", "t")
                for inner in ast.walk(part)
            )
            if turned or (isinstance(part, ast.Call) and _last(part) == "einsum"):
                return True
    return False


def _multiplies(node: ast.AST, softmax: ast.Call) -> bool:
    return (
        _is_matmul(node)
        and any(inner is softmax for inner in ast.walk(node))
        and not any(inner is node for inner in ast.walk(softmax))
    )


def _gives_out(function: Function, names: set[str]) -> bool:
    """Whether the weights leave the function: returned as they are, stored on self or in a list."""
    for event in function.events:
        value = getattr(event.stmt, "value", None)
        if event.kind == "return" and isinstance(value, (ast.Name, ast.Tuple)):
            elements = value.elts if isinstance(value, ast.Tuple) else [value]
            if any(dotted(element) in names for element in elements):
                return True
        if event.kind in ("bind", "store") and "." in event.name and isinstance(value, ast.Name) and value.id in names:
            return True
        if event.kind == "store" and isinstance(event.node, ast.Call) and names & names_in(event.node.args[-1]):
            return True
    return False


__all__ = ["CUTS", "RULES", "quote"]
RULES = (
    find_dead_logits,
    find_dead_outputs,
    find_previous_graphs,
    find_unread_attention_weights,
    find_unread_extras,
    find_full_scores,
)
