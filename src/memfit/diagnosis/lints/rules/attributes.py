"""MF105-MF107, MF117: what modules, steps and metrics keep on themselves or hand to whoever collects it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from memfit.diagnosis.lints.facts import words, words_of
from memfit.diagnosis.lints.program import Class, Event, Function, Program, dotted
from memfit.diagnosis.lints.queries import events_of, is_reset, names_in, says
from memfit.diagnosis.lints.report import Report
from memfit.diagnosis.lints.values import GRAPH, NO_GRAPH, Value

_METRIC_WORDS = words("accuracy auc auroc average curve f1 meter metric metrics precision recall roc score tracker")
_METRIC_CALLS = words("__call__ accumulate add add_batch forward process update")
_RESULTS = words("compute evaluate result results summary value")


def find_growing_attributes(program: Program) -> Iterator[Report]:
    """`self.running = 0.9 * self.running + 0.1 * x.mean()` in a forward: each value hangs on the graph of the one before."""
    for event in events_of(program, "bind", "augment"):
        function = event.function
        assert function is not None
        cls = function.cls
        if cls is None or not event.name.startswith("self.") or event.value.graph < GRAPH or event.name.count(".") != 1:
            continue
        if function.name.startswith(("__init__", "_init", "init", "reset", "resize", "tie", "_tie", "load")):
            continue
        if not cls.is_module and not function.trains:
            continue
        value = getattr(event.stmt, "value", None)
        if event.kind == "bind" and event.name not in names_in(value):
            continue
        if event.context.grad is False or _is_reset_elsewhere(event, cls, program):
            continue
        yield Report(
            "MF105",
            event.stmt,
            f"`{event.name}` is computed from its own last value with the graph on: it keeps the graph of every "
            f"{'forward' if cls.is_module else 'step'} so far.",
            "Update it under torch.no_grad() or from detached tensors, or start it anew in every forward.",
        )


def find_fed_sums(program: Program) -> Iterator[Report]:
    """`self.sum += value * n` in a meter that some training loop of this file feeds with a loss that has its graph."""
    for event in events_of(program, "augment"):
        function = event.function
        assert function is not None
        if (
            function.cls is None
            or function.cls.is_module
            or function.trains
            or event.context.loops
            or not event.name.startswith("self.")
        ):
            continue
        fed = any(value.graph == GRAPH and context.loops for given, context in function.sites for value in given.values())
        reset = any(is_reset(other, event.name) and other.index < event.index for other in function.events)
        if event.value.graph == GRAPH and fed and not reset:
            yield Report(
                "MF105",
                event.stmt,
                f"`{event.name}` adds up what {function.cls.name}.{function.name} is given, and a loop of this file gives it tensors with "
                "their graphs: it keeps the graph of every step.",
                "Give it numbers (`loss.item()`), or detach here.",
            )


def find_growing_entries(program: Program) -> Iterator[Report]:
    """`self.shadow[name] = 0.99 * self.shadow[name] + 0.01 * p`: an average of parameters that are not detached."""
    for event in events_of(program, "store"):
        value = getattr(event.stmt, "value", None)
        if event.value.graph < GRAPH or event.context.grad is False or not isinstance(event.node, ast.Subscript):
            continue
        if event.name.startswith("self.") and event.name in names_in(value) and isinstance(event.stmt, ast.Assign):
            yield Report(
                "MF105",
                event.stmt,
                f"Each entry of `{event.name}` is computed from its own last value with the graph on: it keeps the graph of every "
                "update so far.",
                "Update it under torch.no_grad() or from detached tensors.",
            )


def _is_reset_elsewhere(event: Event, cls: Class, program: Program) -> bool:
    """Whether the attribute starts anew each time: before this line in the method, in another method, or from outside."""
    attribute = event.name.partition(".")[2]
    assert event.function is not None
    outside: set[Function] = set()
    for function in program.functions:
        for other in function.events:
            cut = other.kind == "bind" and other.value.graph == NO_GRAPH and other.value.op == "cut"
            if other.name.rpartition(".")[2] != attribute or not (cut or is_reset(other, other.name)):
                continue
            if function is event.function:
                if other.index < event.index and other.stmt is not event.stmt:
                    return True
            elif function.cls is cls and function.name != "__init__":
                if other.value.graph == NO_GRAPH:
                    return True
            elif "." in other.name and not other.name.startswith("self."):
                outside.add(function)
    # Reset by the program: enough if every function with a backward pass does it, or a helper for all of them.
    runs = {function for function in program.functions if any(other.kind == "backward" for other in function.events)}
    return bool(outside) and (runs <= outside or not outside <= runs)


def find_create_graph(program: Program) -> Iterator[Report]:
    """`loss.backward(create_graph=True)`: the gradient gets a graph that leads back to the parameter that owns it."""
    for event in events_of(program, "backward"):
        call = event.node
        assert isinstance(call, ast.Call)
        assert event.function is not None
        if not any(item.arg == "create_graph" and says(item.value, True) for item in call.keywords):
            continue
        if any(_clears_gradients(other) and other.index > event.index for other in event.function.events):
            continue
        if any(
            _clears_gradients(other) and set(other.context.loops) & set(event.context.loops) for other in event.function.events
        ):
            continue
        yield Report(
            "MF106",
            call,
            "backward(create_graph=True) ties each parameter and its gradient into a cycle: the whole graph outlives the step.",
            "Use torch.autograd.grad(..., create_graph=True), or set the gradients to None when they have been used.",
        )


def _clears_gradients(event: Event) -> bool:
    if event.kind == "call" and event.name.endswith("zero_grad") and isinstance(event.node, ast.Call):
        return not any(item.arg == "set_to_none" and says(item.value, False) for item in event.node.keywords)
    return event.kind == "bind" and event.name.endswith(".grad") and event.value.kind == "none"


def find_step_outputs(program: Program) -> Iterator[Report]:
    """A `training_step` that returns more than its loss, in a class whose epoch-end hook makes the trainer keep all of it."""
    for cls in program.classes.values():
        for phase in ("training", "validation", "test"):
            step = cls.find(f"{phase}_step")
            hook = cls.find(f"{phase}_epoch_end") or cls.find(f"on_{phase.replace('training', 'train')}_epoch_end")
            if step is None or hook is None or step.cls is not cls or len(hook.parameters) < 2:
                continue
            read = {
                node.value for node in ast.walk(hook.node) if isinstance(node, ast.Constant) and isinstance(node.value, str)
            }
            for event in step.events:
                if event.kind == "return" and isinstance(event.stmt, ast.Return) and isinstance(event.stmt.value, ast.Dict):
                    extra = _unread_tensors(event, event.stmt.value, read, phase)
                    if extra:
                        yield Report(
                            "MF107",
                            event.stmt,
                            f"{hook.name} makes the trainer keep what every {step.name} returns until the epoch ends: "
                            f"{', '.join(f'`{name}`' for name in extra)} of all steps at once.",
                            "Return the loss alone, or detached numbers; if the hook does nothing, remove it.",
                        )


def _unread_tensors(event: Event, returned: ast.Dict, read: set[str], phase: str) -> list[str]:
    found = []
    items = event.value.items or ()
    for key, node, value in zip(returned.keys, returned.values, items, strict=False):
        name = key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else ""
        if not name or name == "loss" or value.kind in ("number", "text", "none") or _is_small(value):
            continue
        attached = phase == "training" and value.graph == GRAPH
        if attached or (name not in read and (value.graph or isinstance(node, (ast.Name, ast.Attribute)))):
            found.append(name)
    return found


def _is_small(value: Value) -> bool:
    return value.op in ("loss", "mean", "sum") and value.graph == NO_GRAPH


def find_metric_states(program: Program) -> Iterator[Report]:
    """A metric that appends every batch to a list of its own and has no method that empties it."""
    for cls in program.classes.values():
        lists = {
            name for name, value in cls.attributes.items() if (value.kind == "list" and value.items == ()) or _is_list(value)
        }
        if not lists or (cls.is_module and "Metric" not in " ".join(cls.bases)):
            continue
        named = bool(words_of(cls.name) & _METRIC_WORDS) or any("Metric" in base for base in cls.bases)
        if not named and not any(cls.find(name) for name in _RESULTS):
            continue
        emptied = set()
        for name, method in cls.methods.items():
            if name != "__init__" and (not _is_fed(cls, program) or _is_called(name, program)):
                emptied |= {event.name[5:] for event in method.events if is_reset(event, event.name)}
        for name in _METRIC_CALLS & set(cls.methods):
            first = next(
                (event for event in cls.methods[name].events if _stores_input(event, cls.methods[name], lists - emptied)), None
            )
            if first is not None:
                yield Report(
                    "MF117",
                    first.node,
                    f"`{first.name}` gets every batch and nothing empties it: it grows with each call of the {cls.name}.",
                    "Give it a reset() for each epoch, keep counts or bins in place of predictions, or keep them on the CPU.",
                )


def _is_fed(cls: Class, program: Program) -> bool:
    """Whether this file gives an object of the class its batches: `metric.update(x)`, `metric(x)`."""
    for event in events_of(program, "call"):
        feeds = event.name.rpartition(".")[2] in _METRIC_CALLS or "." not in event.name
        an_object = event.base.kind in ("object", "module") and event.base.target is cls
        if feeds and an_object and event.function not in cls.methods.values():
            return True
    return False


def _is_called(method: str, program: Program) -> bool:
    return method in _METRIC_CALLS or any(event.name.endswith(f".{method}") for event in events_of(program, "call"))


def _is_list(value: Value) -> bool:
    return value.kind == "list" and isinstance(value.made_by, ast.List) and not value.made_by.elts


def _stores_input(event: Event, method: Function, lists: set[str]) -> bool:
    if event.kind != "store" or not event.name.startswith("self.") or event.name[5:] not in lists:
        return False
    if event.value.kind in ("number", "text") or not isinstance(event.node, ast.Call):
        return False
    inputs = set(method.parameters[1:])
    stored = event.node.args[-1]
    while isinstance(stored, ast.Call) and isinstance(stored.func, ast.Attribute):  # preds.detach().clone(); .cpu() is the cure
        if stored.func.attr in ("cpu", "item", "tolist", "numpy"):
            return False
        stored = stored.func.value
    return dotted(stored) in inputs


RULES = (find_growing_attributes, find_fed_sums, find_growing_entries, find_create_graph, find_step_outputs, find_metric_states)
