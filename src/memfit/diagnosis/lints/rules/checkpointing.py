"""MF501-MF503, MF511-MF516: checkpoints that save nothing, and checkpoints that change what is trained."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from memfit.diagnosis.lints.facts import BATCH_NORMS, DROPOUTS, words
from memfit.diagnosis.lints.program import Class, Event, Function, Program, dotted
from memfit.diagnosis.lints.queries import events_of, quote, says
from memfit.diagnosis.lints.report import Report
from memfit.diagnosis.lints.values import Value

_OWN_KEYWORDS = words("use_reentrant preserve_rng_state context_fn determinism_check debug early_stop")


def checkpoints(program: Program, name: str = "checkpoint") -> Iterator[tuple[Event, ast.Call]]:
    """The calls of torch.utils.checkpoint's function of this name where gradients are on."""
    for event in events_of(program, "call"):
        owner, _, last = event.name.rpartition(".")
        if last == name and "checkpoint" in owner and isinstance(event.node, ast.Call) and event.context.grad is not False:
            yield event, event.node


def is_reentrant(call: ast.Call) -> bool:
    """use_reentrant=True, or not given: that is still the default of torch 2.13."""
    given = next((item.value for item in call.keywords if item.arg == "use_reentrant"), None)
    return (given is None and not any(item.arg is None for item in call.keywords)) or says(given, True)


def find_bad_segments(program: Program) -> Iterator[Report]:
    """checkpoint_sequential never checkpoints its last segment, and that one gets the remainder."""
    for event, call in checkpoints(program, "checkpoint_sequential"):
        segments = event.args[1] if len(event.args) > 1 else event.keywords.get("segments")
        count = segments.number if segments is not None else None
        layers = event.args[0].items if event.args else None
        if count == 1:
            yield Report(
                "MF501",
                call,
                "One segment checkpoints nothing: checkpoint_sequential leaves its last segment as it is, and this is the last.",
                "Choose about the square root of the number of layers.",
            )
        elif count and layers and len(layers) >= count:
            size = len(layers) // count
            last = len(layers) - size * (count - 1)
            if last >= 2 * size:
                yield Report(
                    "MF503",
                    call,
                    f"{len(layers)} layers in {count} segments are {count - 1} of {size} and a last one of {last}, and the last one "
                    "is not checkpointed.",
                    "Choose a number that divides the layers evenly, or wrap blocks with checkpoint() yourself.",
                )


def find_single_linears(program: Program) -> Iterator[Report]:
    """checkpoint() around each Linear of a stack: a Linear saves its input, and so does the checkpoint."""
    found: dict[Function, list[tuple[Event, ast.Call]]] = {}
    for event, call in checkpoints(program):
        if event.args and event.args[0].op == "torch.nn.Linear" and event.function is not None:
            found.setdefault(event.function, []).append((event, call))
    for calls in found.values():
        several = len({ast.unparse(call.args[0]) for _, call in calls}) > 1
        for event, call in calls:
            looped = bool(event.context.loops) and isinstance(call.args[0], ast.Name)
            if several or looped:
                yield Report(
                    "MF502",
                    call,
                    f"A checkpoint around the single Linear {quote(call.args[0])} saves nothing: the layer keeps its input for "
                    "backward, and so does the checkpoint. It is only computed twice.",
                    "Wrap several layers together, or leave it off.",
                )


def find_inputs_without_grad(program: Program) -> Iterator[Report]:
    """Reentrant checkpoints look at their tensor arguments only: with plain data going in, the block is never trained."""
    for event, call in checkpoints(program):
        inputs = event.args[1:]
        if not is_reentrant(call) or not inputs or event.context.grad is not True:
            continue
        tensors = [value for value in inputs if value.kind not in ("number", "text", "none")]
        if tensors and all(value.plain and not value.graph for value in tensors):
            yield Report(
                "MF511",
                call,
                f"No input of this reentrant checkpoint requires a gradient, so {quote(call.args[0])} gets none: its parameters "
                "are not trained.",
                "Pass use_reentrant=False. Do not filter the warning away.",
            )


def find_batch_norms(program: Program) -> Iterator[Report]:
    """Batch norm inside a checkpoint: the recomputation is a second forward in training mode."""
    for event, call in checkpoints(program):
        norms = sorted(_parts(event.args[:1]) & BATCH_NORMS)
        if norms:
            yield Report(
                "MF512",
                call,
                f"{norms[0]} inside this checkpoint updates its running statistics twice a step, in forward and in the "
                "recomputation: loss and gradients agree, evaluation does not.",
                "Leave the norm outside, set momentum to 1 - sqrt(1 - m), or let memfit recompute: it writes no buffer twice.",
            )


def find_lost_masks(program: Program) -> Iterator[Report]:
    """preserve_rng_state=False with dropout inside: gradients of another sample than the loss."""
    for name in ("checkpoint", "checkpoint_sequential"):
        for event, call in checkpoints(program, name):
            off = any(item.arg == "preserve_rng_state" and says(item.value, False) for item in call.keywords)
            if off and _parts(event.args[:1]) & DROPOUTS:
                yield Report(
                    "MF513",
                    call,
                    "With preserve_rng_state=False the recomputation draws new dropout masks: the gradients belong to another "
                    "sample than the loss, and nothing says so.",
                    "Leave preserve_rng_state at its default True.",
                )


def find_keywords(program: Program) -> Iterator[Report]:
    """A keyword argument for the block cannot pass a reentrant checkpoint."""
    for event, call in checkpoints(program):
        names = [item.arg for item in call.keywords if item.arg and item.arg not in _OWN_KEYWORDS]
        if is_reentrant(call) and names and event.args:
            yield Report(
                "MF514",
                call,
                f"A reentrant checkpoint takes positional arguments only: `{names[0]}=` raises ValueError.",
                "Pass use_reentrant=False, which hands keywords on. Never drop the argument.",
            )


def find_unrepeatable(program: Program) -> Iterator[Report]:
    """A block whose forward changes what it decides by: the recomputation takes another path."""
    for event, call in checkpoints(program):
        for cls in _classes(event.args[:1]):
            forward = cls.find("forward")
            name = _switch(forward) if forward is not None else ""
            if name:
                yield Report(
                    "MF515",
                    call,
                    f"{cls.name}.forward decides by `{name}` and changes it: the recomputation takes another path and saves other "
                    "tensors.",
                    f"Leave {cls.name} out of the checkpoint, or make its forward depend on its inputs alone.",
                )
            elif forward is not None and (kept := _side_effect(forward)):
                yield Report(
                    "MF515",
                    call,
                    f"{cls.name}.forward changes `{kept}`, and inside a checkpoint forward runs twice a step: it is changed twice.",
                    f"Leave {cls.name} out of the checkpoint, or keep `{kept}` outside of forward.",
                )


def _switch(forward: Function) -> str:
    changed = {event.name for event in forward.events if event.kind in ("bind", "augment") and event.name.startswith("self.")}
    for part in ast.walk(forward.node):
        if isinstance(part, (ast.If, ast.IfExp, ast.While)):
            read = {dotted(inner) for inner in ast.walk(part.test) if isinstance(inner, ast.Attribute)} & changed
            if read:
                return min(read)
    return ""


def _side_effect(forward: Function) -> str:
    """An attribute that every forward adds to, a counter. (A list of notes about each run is meant to see both.)"""
    return next((event.name for event in forward.events if event.name.startswith("self.") and event.kind == "augment"), "")


def find_reentrant_under_ddp(program: Program) -> Iterator[Report]:
    """DistributedDataParallel(find_unused_parameters=True) and reentrant checkpoints mark parameters ready twice."""
    searching = any(
        event.name.endswith("DistributedDataParallel")
        and isinstance(event.node, ast.Call)
        and any(item.arg == "find_unused_parameters" and says(item.value, True) for item in event.node.keywords)
        for event in events_of(program, "call")
    )
    if not searching:
        return
    for _, call in checkpoints(program):
        if is_reentrant(call):
            yield Report(
                "MF516",
                call,
                "DistributedDataParallel with find_unused_parameters=True takes the parameters inside a reentrant checkpoint for "
                "unused, and its inner backward then marks them ready a second time.",
                "Pass use_reentrant=False, or drop find_unused_parameters, or use static_graph=True.",
            )


def _parts(values: tuple[Value, ...]) -> set[str]:
    """Names of all layers inside what is checkpointed; of a function or lambda, of the modules it calls."""
    found: set[str] = set()
    for value in values:
        found |= value.parts
        if isinstance(value.target, Class):
            forward = value.target.find("forward")
            if forward is not None:
                found |= {event.name.rpartition(".")[2] for event in forward.events if event.kind == "call"}
        elif isinstance(value.target, Function):
            for event in value.target.events:
                if event.kind == "call":
                    found |= event.base.parts | {event.name.rpartition(".")[2]}
    return found


def _classes(values: tuple[Value, ...]) -> list[Class]:
    found = [value.target for value in values if isinstance(value.target, Class)]
    for value in values:
        if isinstance(value.target, Function):
            found += [event.base.target for event in value.target.events if isinstance(event.base.target, Class)]
        found += [item.target for item in value.items or () if isinstance(item.target, Class)]
    return found


RULES = (
    find_bad_segments,
    find_single_linears,
    find_inputs_without_grad,
    find_batch_norms,
    find_lost_masks,
    find_keywords,
    find_unrepeatable,
    find_reentrant_under_ddp,
)
