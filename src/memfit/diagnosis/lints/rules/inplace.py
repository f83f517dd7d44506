"""MF701-MF704: in-place calls that break backward or change values silently, and one that would save memory."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import pairwise

from memfit.diagnosis.lints.facts import CONVOLUTIONS, CUTS, INPLACE_FLAG, INPLACE_SAVES_LESS, NORMS, SAVE_OUTPUT
from memfit.diagnosis.lints.program import Event, Function, Program
from memfit.diagnosis.lints.queries import events_of, line_of, quote, says
from memfit.diagnosis.lints.report import Report
from memfit.diagnosis.lints.values import GRAPH, Value


def find_spoiled_outputs(program: Program) -> Iterator[Report]:
    """`out = relu(x); out += residual`: relu's backward reads its output, which is overwritten."""
    for event in events_of(program, "write"):
        value = event.value
        if value.op in SAVE_OUTPUT and value.graph == GRAPH and value.kind == "tensor" and event.context.grad is True:
            yield Report(
                "MF701",
                event.stmt,
                f"This writes into the output of {value.op}, which its backward reads: backward raises 'modified by an inplace "
                "operation'. The inplace flag of the layer before has nothing to do with it.",
                "Write a new tensor (`out = out + x`), or add first and apply the activation after.",
            )


def find_spoiled_inputs(program: Program) -> Iterator[Report]:
    """`h = self.conv(x); x += 1`: a convolution, a Linear or a norm saves its input for backward."""
    for function in program.functions:
        writes = [event for event in function.events if event.kind == "write" and event.value.origin is not None]
        for event in writes:
            if event.context.grad is not True or event.value.leaf:
                continue
            for other in function.events:
                if (
                    other.kind == "call"
                    and other.index < event.index
                    and _saves_input(other, event.value)
                    and _meets(other, event)
                ):
                    yield Report(
                        "MF701",
                        event.stmt,
                        f"This writes into what {quote(other.node)} took as its input on line {line_of(other)} and saved for "
                        "backward: backward raises 'modified by an inplace operation'.",
                        "Write a new tensor instead.",
                    )
                    break


def _saves_input(call: Event, value: Value) -> bool:
    """Whether the call is of a layer that is known to save its input, with exactly this tensor going in."""
    layer = call.base.op.rpartition(".")[2]
    saves = call.base.kind == "module" and layer in NORMS | CONVOLUTIONS | {"Linear"} and not call.base.frozen
    return saves and call.value.graph == GRAPH and any(arg.origin is value.origin and arg == value for arg in call.args)


def _meets(call: Event, write: Event) -> bool:
    """Whether both happen in one pass, and neither in another turn of a loop only."""
    arms = dict(write.context.arms)
    apart = any(arms.get(stmt, arm) != arm for stmt, arm in call.context.arms)
    return not apart and call.context.loops == write.context.loops and call.stmt is not write.stmt


def find_changed_skips(program: Program) -> Iterator[Report]:
    """A branch that begins with an in-place activation overwrites its input, and the input is read again after it."""
    for function in program.functions:
        for event in function.events:
            if event.kind != "call" or not isinstance(event.node, ast.Call):
                continue
            culprit, written = _activation_in_place(event, function)
            if culprit is None or written is None or written.origin is None or isinstance(event.stmt, ast.Expr):
                continue
            if _is_read_again(event, written, function):
                name = quote(event.node.args[0]) if event.node.args else "the input"
                yield Report(
                    "MF702",
                    culprit,
                    f"The first thing done to {name} overwrites it in place, and line {_reader(event, written, function)} reads it "
                    "again: the skip path gets the activated values. No error is raised.",
                    "Leave inplace off for this first activation; later ones in the branch are safe.",
                )


def _activation_in_place(event: Event, function: Function) -> tuple[ast.AST | None, Value | None]:
    """(where to point, the tensor that is overwritten) of `F.relu(x, inplace=True)`, `self.relu(x)`, `self.branch(x)`."""
    call = event.node
    assert isinstance(call, ast.Call)
    if not event.args:
        return None, None
    flagged = any(item.arg == "inplace" and says(item.value, True) for item in call.keywords)
    if flagged and event.name.rpartition(".")[2] in INPLACE_FLAG and event.value.kind == "tensor":
        return event.stmt, event.args[0]
    if event.name.rpartition(".")[2] == "relu_" and event.name.startswith("torch."):
        return event.stmt, event.args[0]
    options = [event.base]
    if function.cls is not None and event.name.startswith("self."):
        options += function.cls.options.get(event.name[5:], [])
    for module in options:
        if module.kind == "module" and module.inplace:
            return event.stmt, event.args[0]
        first = _first_layer(module)
        if first is not None and first.inplace:
            return first.made_by, event.args[0]
    return None, None


def _first_layer(module: Value) -> Value | None:
    while module.op.endswith("Sequential") and module.items:
        module = module.items[0]
        if not module.op.endswith("Sequential"):
            return module
    return None


def _is_read_again(event: Event, written: Value, function: Function) -> bool:
    return _reader(event, written, function) > 0


def _reader(event: Event, written: Value, function: Function) -> int:
    """The line that reads the old tensor under a name that was not given the result, or 0."""
    arms = dict(event.context.arms)
    for other in function.events:
        same = other.stmt is event.stmt
        if other.kind != "read" or (other.index < event.index and not same) or (same and not _is_outside(other, event)):
            continue
        if (other.value is not written and other.value != written) or other.value.origin is not written.origin:
            continue
        if any(arms.get(stmt, arm) != arm for stmt, arm in other.context.arms) or _is_only_looked_at(other):
            continue
        return other.node.lineno  # type: ignore[attr-defined]
    return 0


def _is_outside(read: Event, event: Event) -> bool:
    """`self.branch(x) + x`, `x + self.branch(x)`: in the same statement, but not an argument of the call."""
    if any(part is read.node for part in ast.walk(event.node)):
        return False
    # Python reads the name before the call, but adds after it.
    return read.index > event.index or any(
        isinstance(part, ast.BinOp) and read.node in (part.left, part.right) for part in ast.walk(event.stmt)
    )


def _is_only_looked_at(read: Event) -> bool:
    """`x.shape`, `x.size(0)`: the values do not matter."""
    for part in ast.walk(read.stmt):
        if isinstance(part, ast.Attribute) and part.value is read.node and part.attr in CUTS - {"data", "detach"}:
            return True
    return isinstance(read.node, ast.Attribute) and read.node.attr in CUTS


def find_written_leaves(program: Program) -> Iterator[Report]:
    """In-place on a tensor that requires a gradient and has no history."""
    for event in events_of(program, "write"):
        if event.value.leaf and event.value.graph == GRAPH and event.context.grad is True and event.name != "requires_grad_":
            yield Report(
                "MF703",
                event.stmt,
                "This overwrites a leaf that requires a gradient: its gradient belongs to the value it has now, and PyTorch refuses.",
                "Leave the first operation of the chain out of place; update parameters under torch.no_grad().",
            )


def find_missed_inplace(program: Program) -> Iterator[Report]:
    """LeakyReLU and ELU after a norm or convolution save their input out of place and their output in place: one map less."""
    for node in program.displays:
        if not isinstance(node, ast.Call):
            sequence = node.elts
        elif program.resolve(node.func) == "torch.nn.Sequential":
            sequence = node.args
        else:
            continue
        for before, after in pairwise(sequence):
            if _layer(before, program) in NORMS | CONVOLUTIONS and _layer(after, program) in INPLACE_SAVES_LESS:
                assert isinstance(after, ast.Call)
                if _is_out_of_place(after):
                    yield Report(
                        "MF704",
                        after,
                        f"{_layer(after, program)} out of place saves its input, next to the output that the following layer saves: "
                        "one map more for each of these layers.",
                        "inplace=True is safe here, as nothing else reads what it overwrites (of ReLU it would save nothing).",
                    )


def _layer(node: ast.expr, program: Program) -> str:
    if not isinstance(node, ast.Call):
        return ""
    name = program.resolve(node.func)
    return name.rpartition(".")[2] if name.startswith("torch.nn.") else ""


def _is_out_of_place(call: ast.Call) -> bool:
    given = next((item.value for item in call.keywords if item.arg == "inplace"), None)
    slope = call.args[0] if call.args else next((item.value for item in call.keywords if item.arg == "negative_slope"), None)
    if slope is not None and not (
        isinstance(slope, ast.Constant) and isinstance(slope.value, (int, float)) and slope.value >= 0
    ):
        return False
    return (given is None or says(given, False)) and len(call.args) < 2


RULES = (find_spoiled_outputs, find_spoiled_inputs, find_changed_skips, find_written_leaves, find_missed_inplace)
