"""MF601-MF603: mixed precision that clips scaled gradients, loses updates, or copies all logits to float32."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from memfit.diagnosis.lints.facts import CROSS_ENTROPIES
from memfit.diagnosis.lints.program import Event, Program, dotted
from memfit.diagnosis.lints.queries import events_of
from memfit.diagnosis.lints.report import Report
from memfit.diagnosis.lints.values import GRAPH

_HALF_SIGNS = re.compile(r"autocast|bfloat16|float16|\.half\(|GradScaler|bf16|fp16")


def find_scaled_clips(program: Program) -> Iterator[Report]:
    """clip_grad_norm_ after scaler.scale(loss).backward() without scaler.unscale_: the threshold is off by the scale."""
    for function in program.functions:
        scaled: Event | None = None
        unscaled: list[Event] = []
        for event in function.events:
            if event.kind == "backward":
                scaled, unscaled = (event, []) if _is_scaled(event) else (None, [])
            elif event.kind == "call" and event.name.endswith(".unscale_"):
                unscaled.append(event)
            elif event.kind == "call" and event.name.rpartition(".")[2].startswith("clip_grad") and scaled is not None:
                if any(set(other.context.arms) <= set(event.context.arms) for other in unscaled):
                    continue
                yield Report(
                    "MF601",
                    event.node,
                    "The gradients are still multiplied by the loss scale here (65536 at the start): the clip shrinks every step, "
                    "and step() divides by the scale once more.",
                    "Call scaler.unscale_(optimizer) before clipping.",
                )


def _is_scaled(event: Event) -> bool:
    call = event.node
    assert isinstance(call, ast.Call)
    inner = call.func.value if isinstance(call.func, ast.Attribute) else None
    if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute):
        return inner.func.attr == "scale"
    assert event.function is not None
    name = dotted(inner) if inner is not None else ""
    for other in event.function.events:  # scaled = scaler.scale(loss); scaled.backward()
        if other.kind == "bind" and other.name == name and isinstance(other.stmt, ast.Assign):
            value = other.stmt.value
            if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "scale":
                return True
    return False


def find_half_weights(program: Program) -> Iterator[Report]:
    """Weights in float16 that are updated in place, without a float32 copy: small updates round to nothing."""
    for function in program.functions:
        for bind in function.events:
            if bind.kind == "bind" and bind.value.kind == "tensor" and bind.value.dtype == "float16":
                updates = (event for event in function.events if event.kind in ("augment", "call") and event.index > bind.index)
                if any(_is_update(event, bind) for event in updates):
                    yield _lost(bind.stmt, f"`{bind.name}`")
        optimized = {owner for event in function.events if event.value.kind == "optimizer" for owner in event.value.owners}
        for bind in function.events:
            made = bind.value.made_by  # built in half: nn.Linear(4, 4, dtype=torch.float16)
            half = bind.kind == "bind" and bind.value.kind == "module" and bind.value.dtype == "float16"
            if half and bind.name in optimized and function.trains and made is getattr(bind.stmt, "value", None):
                yield _lost(bind.stmt, f"`{bind.name}`")
    for event in events_of(program, "call"):
        call = event.node
        assert isinstance(call, ast.Call)
        assert event.function is not None
        if event.base.kind != "module" or event.value.kind != "module" or event.value.dtype != "float16" or event.base.dtype:
            continue
        name = dotted(call.func.value) if isinstance(call.func, ast.Attribute) else ""
        target = {dotted(part) for part in getattr(event.stmt, "targets", [])}
        near = [event.function] if not name.startswith("self.") else program.functions
        owners = {
            owner
            for function in near
            for other in function.events
            for owner in other.value.owners
            if other.value.kind == "optimizer"
        }
        if ({name} | target) & owners - {""} and any(function.trains for function in program.functions):
            yield _lost(call, f"`{name or min(target)}`")


def _is_update(event: Event, bind: Event) -> bool:
    if not event.context.loops or event.context.loops == bind.context.loops:
        return False
    if event.kind == "augment":
        return (
            event.name == bind.name and isinstance(event.stmt, ast.AugAssign) and isinstance(event.stmt.op, (ast.Add, ast.Sub))
        )
    return event.name in (f"{bind.name}.{method}" for method in ("add_", "sub_", "addcdiv_", "addcmul_"))


def _lost(node: ast.AST, what: str) -> Report:
    return Report(
        "MF602",
        node,
        f"{what} is in float16 and is updated there: an update below 2^-11 of the weight rounds to nothing, and training stalls.",
        "Keep the weights in float32 and use autocast with a GradScaler, or keep a float32 master copy for the optimizer.",
    )


def find_upcast_logits(program: Program) -> Iterator[Report]:
    """`cross_entropy(logits.float(), y)` with logits in half precision: 2 + 4 + 4 + 4 + 2 bytes for each logit at the worst moment."""
    if not _HALF_SIGNS.search(program.text):
        return
    for event in events_of(program, "call"):
        call = event.node
        assert isinstance(call, ast.Call)
        assert event.function is not None
        last = event.name.rpartition(".")[2]
        if last != "cross_entropy" and event.base.op.rpartition(".")[2] not in CROSS_ENTROPIES:
            continue
        if not call.args or event.args[0].graph < GRAPH:
            continue
        upcast = _upcast_in(call.args[0])
        if upcast is None and (name := dotted(call.args[0])):
            for other in event.function.events:
                if (
                    other.kind == "bind"
                    and other.name == name
                    and other.index < event.index
                    and isinstance(other.stmt, ast.Assign)
                ):
                    upcast = _upcast_in(other.stmt.value) or upcast
        if upcast is not None:
            yield Report(
                "MF603",
                event.stmt,
                "The half-precision logits are copied to float32, cross entropy saves a float32 log-softmax besides, and backward "
                "makes both gradients: 14 bytes for each logit at the peak of the loss, not 4.",
                "Compute head and loss in chunks of tokens, or with a fused linear cross entropy.",
            )


def _upcast_in(node: ast.expr) -> ast.Call | None:
    for part in ast.walk(node):
        if isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute):
            if part.func.attr == "float" and not part.args:
                return part
            if part.func.attr == "to" and any(
                "float32" in ast.unparse(arg) for arg in (*part.args, *(k.value for k in part.keywords))
            ):
                return part
    return None


RULES = (find_scaled_clips, find_half_weights, find_upcast_logits)
