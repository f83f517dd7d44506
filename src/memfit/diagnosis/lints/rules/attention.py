"""MF211-MF213: attention's matrices and outputs of every layer that are built for nobody."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from memfit.diagnosis.lints.facts import words
from memfit.diagnosis.lints.program import Event, Function, Program, dotted
from memfit.diagnosis.lints.queries import events_of, names_in, says
from memfit.diagnosis.lints.report import Report

# A function with one of these has another path, or hands the weights out on demand.
_OTHER_PATHS = re.compile(r"scaled_dot_product_attention|flash|sdpa|need_weights|output_attentions|return_att")
_MATMULS = words("baddbmm bmm einsum matmul")
_TURNS = words("T mH mT permute swapaxes t transpose")
_EXTRAS = {"output_hidden_states": "hidden_states", "output_attentions": "attentions"}


def find_unread_attention_weights(program: Program) -> Iterator[Report]:
    """`out, _ = attention(q, k, v)`: need_weights is on by default and builds (batch, length, length) for nobody."""
    for event in events_of(program, "call"):
        call = event.node
        assert isinstance(call, ast.Call)
        if not event.base.op.endswith(".MultiheadAttention") or any(item.arg == "need_weights" for item in call.keywords):
            continue
        if len(call.args) < 5 and _drops_second(event, call):  # the fifth is need_weights
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
        targets = stmt.targets[0].elts
        name = dotted(targets[-1])
        if len(targets) != 2 or not name or "." in name:
            return False
        return not any(
            other.kind == "read" and other.name == name and other.index > event.index for other in event.function.events
        )
    return any(
        isinstance(part, ast.Subscript) and part.value is call and getattr(part.slice, "value", None) == 0
        for part in ast.walk(stmt)
    )


def find_full_scores(program: Program) -> Iterator[Report]:
    """softmax(q @ k.T) @ v written out: the scores, their softmax and its dropout are saved, each length x length."""
    for function in program.functions:
        if "eager" in function.name or isinstance(function.node, ast.Module):
            continue
        softmaxes = {
            event.node
            for event in function.events
            if event.kind == "call" and isinstance(event.node, ast.Call) and _last(event.node).endswith("softmax")
        }
        if len(softmaxes) == 1 and not _OTHER_PATHS.search(ast.unparse(function.node)):
            (softmax,) = softmaxes
            assert isinstance(softmax, ast.Call)
            stmt = _written_out(function, softmax)
            if stmt is not None:
                yield Report(
                    "MF212",
                    stmt,
                    "Attention written out: the scores, their softmax and its dropout are saved for backward, each of them length "
                    "x length for every head.",
                    "Use torch.nn.functional.scaled_dot_product_attention where the weights are not needed (equal to rounding).",
                )


def _written_out(function: Function, softmax: ast.Call) -> ast.stmt | None:
    """The statement of the softmax, if scores go into it and its result is multiplied with values and not handed out."""
    scores: set[str] = set()
    weights: set[str] = set()
    found: ast.stmt | None = None
    for event in function.events:
        value = getattr(event.stmt, "value", None)
        if event.kind not in ("bind", "return") or not isinstance(value, ast.expr):
            continue
        inside = set(ast.walk(value))
        names = names_in(value)
        if softmax in inside:
            source = _input_of(softmax)
            if not _is_query_key(source) and not names_in(source) & scores:
                return None
            found = event.stmt
            if any(_is_matmul(part) and softmax in ast.walk(part) and part not in ast.walk(softmax) for part in inside):
                return found
            weights.add(event.name)
        elif names & weights and _has_matmul(value):
            return None if _are_handed_out(function, weights) else found
        elif event.kind == "bind" and (_is_query_key(value) or (names & scores and not _has_matmul(value))):
            scores.add(event.name)
        elif event.kind == "bind" and names & weights:
            weights.add(event.name)
    return None


def _input_of(softmax: ast.Call) -> ast.expr:
    """The scores of `scores.softmax(-1)`, `scores.softmax(dim=-1)`, `F.softmax(scores, -1)`."""
    by_method = not softmax.args or isinstance(softmax.args[0], (ast.Constant, ast.UnaryOp))
    return softmax.func.value if by_method and isinstance(softmax.func, ast.Attribute) else softmax.args[0]


def _last(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _is_matmul(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        return True
    return isinstance(node, ast.Call) and _last(node) in _MATMULS


def _has_matmul(node: ast.AST) -> bool:
    return any(_is_matmul(part) for part in ast.walk(node))


def _is_query_key(node: ast.AST) -> bool:
    """A product with something transposed in it: q @ k.transpose(-2, -1), torch.bmm(q, k.mT), einsum('bqd,bkd->bqk')."""
    for part in ast.walk(node):
        if _is_matmul(part):
            turned = any(isinstance(inner, ast.Attribute) and inner.attr in _TURNS for inner in ast.walk(part))
            if turned or (isinstance(part, ast.Call) and _last(part) == "einsum"):
                return True
    return False


def _are_handed_out(function: Function, weights: set[str]) -> bool:
    """Whether the weights leave the function: returned as they are, stored on self or in a list."""
    for event in function.events:
        value = getattr(event.stmt, "value", None)
        if event.kind == "return":
            given = value.elts if isinstance(value, ast.Tuple) else [value]
            if any(isinstance(part, ast.Name) and part.id in weights for part in given):
                return True
        elif (
            event.kind in ("bind", "store") and "." in event.name and isinstance(value, ast.Name) and value.id in weights
        ) or (event.kind == "store" and isinstance(event.node, ast.Call) and weights & names_in(event.node.args[-1])):
            return True
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
            wanted = any(item.arg == asked and says(item.value, True) for item in call.keywords)
            if wanted and _reads_only_other_fields(name, field, function):
                yield Report(
                    "MF213",
                    call,
                    f"{asked}=True makes the model keep every layer's, and nobody reads `{name}.{field}`.",
                    f"Leave {asked} out.",
                )


def _reads_only_other_fields(name: str, field: str, function: Function) -> bool:
    """Whether the whole is read only through `.loss`, `.logits` and other fields than this one, and there is such a reader."""
    parts = list(ast.walk(function.node))
    fields = [part.attr for part in parts if isinstance(part, ast.Attribute) and dotted(part.value) == name]
    whole = [part for part in parts if isinstance(part, ast.Name) and part.id == name and isinstance(part.ctx, ast.Load)]
    return bool(fields) and field not in fields and len(whole) == len(fields)


RULES = (find_unread_attention_weights, find_full_scores, find_unread_extras)
