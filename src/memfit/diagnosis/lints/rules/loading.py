"""MF901-MF903: checkpoints that are in memory twice, and weights that are no longer tied after loading."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from memfit.diagnosis.lints.program import Class, Event, Function, Program, dotted
from memfit.diagnosis.lints.queries import events_of, is_reset, names_in, trains
from memfit.diagnosis.lints.report import Mend, Report


def find_kept_checkpoints(program: Program) -> Iterator[Report]:
    """The dictionary of torch.load lives on beside the model and the optimizer it was copied into."""
    for event in events_of(program, "bind"):
        call = _load_in(event.stmt, program)
        function = event.function
        if call is None or function is None or _is_on_cpu(call) or any(item.arg == "mmap" for item in call.keywords):
            continue
        uses = [
            other
            for other in function.events
            if other.kind == "read" and other.name == event.name and other.index > event.index
        ]
        if not any(_loads_state(other) for other in uses):
            continue
        last = uses[-1]
        if any(is_reset(other, event.name) and other.index > event.index for other in function.events):
            continue
        returned = any(other.kind == "return" and event.name in _bare_names(other.stmt) for other in function.events)
        loops = [loop for other in function.events for loop in other.context.loops if other.index > last.index]
        training = next((loop for loop in loops if trains(loop, function)), None)
        if returned or training is not None or event.name.startswith("self."):
            yield Report(
                "MF901",
                event.stmt,
                f"`{event.name}` lives on after it was loaded: load_state_dict copies, so one more set of the parameters stays on the "
                "device (the optimizer's moments are shared, not copied).",
                'Load with map_location="cpu" or mmap=True, and `del` it after the last load_state_dict.',
                None if returned or training is None else _delete(event, last, function),
            )


def _load_in(stmt: ast.stmt, program: Program) -> ast.Call | None:
    value = stmt.value if isinstance(stmt, ast.Assign) else None
    return value if isinstance(value, ast.Call) and program.resolve(value.func) == "torch.load" else None


def _is_on_cpu(call: ast.Call) -> bool:
    place = _map_location(call)
    return isinstance(place, ast.Constant) and place.value == "cpu"


def _map_location(call: ast.Call) -> ast.expr | None:
    if len(call.args) > 1:
        return call.args[1]
    return next((item.value for item in call.keywords if item.arg == "map_location"), None)


def _bare_names(stmt: ast.stmt) -> set[str]:
    value = getattr(stmt, "value", None)
    elements = value.elts if isinstance(value, ast.Tuple) else [value]
    return {dotted(element) for element in elements if element is not None}


def _loads_state(read: Event) -> bool:
    return any(
        isinstance(part, ast.Call)
        and isinstance(part.func, ast.Attribute)
        and part.func.attr == "load_state_dict"
        and any(read.node in ast.walk(arg) for arg in part.args)
        for part in ast.walk(read.stmt)
    )


def _delete(event: Event, last: Event, function: Function) -> Mend | None:
    if (
        event.context.loops
        or last.context.loops
        or last.context.arms != event.context.arms
        or isinstance(function.node, ast.Module)
    ):
        return None
    watched = {"locals", "globals", "vars", "eval", "exec"}
    for part in ast.walk(function.node):
        if isinstance(part, ast.Name) and part.id in watched:
            return None
        inner = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
        if part is not function.node and isinstance(part, inner) and event.name in names_in(part):
            return None
    return Mend("delete", last.stmt, event.name) if isinstance(last.stmt, (ast.Expr, ast.Assign)) else None


def find_loads_to_the_old_device(program: Program) -> Iterator[Report]:
    """`torch.load(path)` without map_location, for load_state_dict: the file's tensors come up on the device they were saved from."""
    for event in events_of(program, "call"):
        call = event.node
        if event.name != "torch.load" or not isinstance(call, ast.Call) or _map_location(call) is not None:
            continue
        if any(item.arg in ("mmap", None) for item in call.keywords) or event.function is None:
            continue
        consumers = _consumers(event, call)
        if consumers and not all(_is_small_state(consumer) for consumer in consumers):
            moved = any(any(item.arg == "assign" for item in consumer.keywords) for consumer in consumers)
            only = _is_only_loaded(event, call)
            yield Report(
                "MF902",
                call,
                "torch.load without map_location brings every tensor back on the device it was saved from (of all ranks the first "
                "rank's), and load_state_dict copies: twice the model while loading.",
                'map_location="cpu"; for one set only, build the model on meta and load with assign=True.',
                Mend("keyword", call, 'map_location="cpu"') if only and not moved else None,
            )


def _is_small_state(consumer: ast.Call) -> bool:
    """A schedule's or scaler's state is a handful of numbers."""
    owner = ast.unparse(consumer.func).lower()
    return any(word in owner for word in ("sched", "scaler", "sampler", "meter"))


def _consumers(event: Event, call: ast.Call) -> list[ast.Call]:
    """The load_state_dict calls that get what was loaded, directly or by name."""
    assert event.function is not None
    names = {dotted(target) for target in getattr(event.stmt, "targets", [])} - {""}
    found = []
    for other in event.function.events:
        node = other.node
        if (
            other.kind == "call"
            and isinstance(node, ast.Call)
            and other.name.rpartition(".")[2] == "load_state_dict"
            and node.args
        ):
            given = node.args[0]
            if any(part is call for part in ast.walk(given)) or (other.index > event.index and names & names_in(given)):
                found.append(node)
    return found


def _is_only_loaded(event: Event, call: ast.Call) -> bool:
    """Whether nothing else reads what was loaded, so that its device does not matter."""
    assert event.function is not None
    if not isinstance(event.stmt, ast.Assign):
        return True
    if event.stmt.value is not call or isinstance(event.function.node, ast.Module):
        return False
    name = dotted(event.stmt.targets[0])
    reads = [other for other in event.function.events if other.kind == "read" and other.name == name]
    return bool(name) and "." not in name and all(_loads_state(read) for read in reads)


def find_untied_weights(program: Program) -> Iterator[Report]:
    """to_empty() on a module with tied parameters: every name gets a storage of its own."""
    for event in events_of(program, "call"):
        target = event.base.target
        if not event.name.endswith(".to_empty") or not isinstance(target, Class) or event.function is None:
            continue
        ties = _ties(target)
        if not ties:
            continue
        later = [other for other in event.function.events if other.index > event.index]
        again = any(other.kind == "bind" and any(other.name.endswith(tie) for tie in ties) for other in later)
        again = again or any(other.kind == "call" and "tie" in other.name.rpartition(".")[2] for other in later)
        if not again:
            yield Report(
                "MF903",
                event.node,
                f"{target.name} ties `{min(ties)}` to another weight, and to_empty() gives every parameter storage of its own: the "
                "tie is lost, the largest matrix is there twice, with its gradient and its moments.",
                f"Tie again after this line: assign `{min(ties)}` anew.",
            )


def _ties(cls: Class) -> set[str]:
    """'head.weight' for `self.head.weight = self.embed.weight`, in the class or a parent."""
    found = set()
    for owner in (cls, *cls.parents):
        for method in owner.methods.values():
            for event in method.events:
                given = dotted(getattr(event.stmt, "value", event.stmt))
                if event.kind == "bind" and _is_deep(event.name) and _is_deep(given):
                    found.add(event.name[5:])
    return found


def _is_deep(name: str) -> bool:
    """`self.head.weight`: an attribute of a layer of the module."""
    return name.startswith("self.") and name.count(".") >= 2


RULES = (find_kept_checkpoints, find_loads_to_the_old_device, find_untied_weights)
