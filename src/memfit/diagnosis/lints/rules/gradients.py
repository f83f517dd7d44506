"""MF401-MF406: gradients that live too long, graphs that are in each other's way, optimizers that hold more than they need."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from memfit.diagnosis.lints.facts import words, words_of
from memfit.diagnosis.lints.program import Event, Function, LoopNode, Program, dotted
from memfit.diagnosis.lints.queries import events_of, line_of, names_in, quote, retains, says, trains
from memfit.diagnosis.lints.report import Mend, Report
from memfit.diagnosis.lints.values import GRAPH

_SMALL_BYTES = 64 * 1024  # gradients of a model that is visibly smaller are not worth a word
_CRITIC_WORDS = words("adversary critic d dis disc discriminator netd")


def find_late_zero_grad(program: Program) -> Iterator[Report]:
    """`zero_grad()` between the forward and its backward: last step's gradients are there at the peak of the activations."""
    for function in program.functions:
        for loop in {event.context.loops[-1] for event in function.events if event.context.loops}:
            found = _late_zero_grad(function, loop)
            if found is not None:
                forward, zero = found
                yield Report(
                    "MF401",
                    zero.node,
                    f"{quote(zero.node)} stands after the forward: the gradients of the step before are still held when the "
                    "activations of this one are at their peak.",
                    "Move it before the forward, or right after optimizer.step(). What it is worth depends on where the peak is.",
                    _move(forward, zero, loop, function),
                )


def _late_zero_grad(function: Function, loop: LoopNode) -> tuple[Event, Event] | None:
    events = [event for event in function.events if event.context.loops and event.context.loops[-1] is loop]
    backwards = [event for event in events if event.kind == "backward"]
    zeros = [event for event in events if event.kind == "call" and _is_zero_grad(event)]
    if len(backwards) != 1 or len(zeros) != 1 or not trains(loop, function):
        return None
    backward, zero = backwards[0], zeros[0]
    if backward.context.arms != zero.context.arms or zero.index > backward.index or _keeps_zeros(zero.node):
        return None
    forwards = [
        event
        for event in events
        if event.kind == "call" and event.node in backward.value.roots and event.context.arms == zero.context.arms
    ]
    if not forwards or forwards[0].index > zero.index or any(_is_small(event) for event in forwards):
        return None
    return forwards[0], zero


def _is_zero_grad(event: Event) -> bool:
    return event.name.rpartition(".")[2] == "zero_grad" and event.base.kind in ("optimizer", "module", "unknown")


def _is_small(event: Event) -> bool:
    size = event.base.num_parameters
    return size is not None and 4 * size < _SMALL_BYTES


def _keeps_zeros(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    given = [*node.args[:1], *(item.value for item in node.keywords if item.arg == "set_to_none")]
    return any(says(value, False) for value in given)


def _move(forward: Event, zero: Event, loop: LoopNode, function: Function) -> Mend | None:
    """Safe if both are statements of one block and nothing from the forward on could read the old gradients."""
    block = next((body for body in _blocks(loop) if forward.stmt in body and zero.stmt in body), None)
    if block is None or not isinstance(zero.stmt, ast.Expr):
        return None
    between = block[block.index(forward.stmt) : block.index(zero.stmt)]
    owner = (
        dotted(zero.node.func.value) if isinstance(zero.node, ast.Call) and isinstance(zero.node.func, ast.Attribute) else ""
    )
    models = {event.name for event in function.events if event.kind == "read" and event.value.kind == "module"}
    for statement in between:
        for part in ast.walk(statement):
            if isinstance(part, ast.Attribute) and part.attr in ("grad", "step", "param_groups"):
                return None
            if isinstance(part, (ast.Return, ast.Continue, ast.Break, ast.Yield)):
                return None
            if isinstance(part, ast.Call) and any(names_in(arg) & {owner, *models} for arg in part.args if dotted(arg)):
                return None
    return Mend("move", zero.stmt, target=forward.stmt)


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for part in ast.walk(node):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(part, name, None)
            if isinstance(block, list):
                yield block


def find_kept_zeros(program: Program) -> Iterator[Report]:
    """`zero_grad(set_to_none=False)`, `p.grad.zero_()`: a full set of zeros is held through the forward."""
    for event in events_of(program, "call"):
        assert event.function is not None
        if _is_zero_grad(event) and _keeps_zeros(event.node):
            if not _reads_gradients(event.function, event.node):
                yield _zeros(event.node)
        elif (
            event.name.endswith((".grad.zero_", ".grad.data.zero_"))
            and event.context.loops
            and event.function.name != "zero_grad"
        ):
            loop = event.context.loops[-1]
            if isinstance(loop, ast.For) and "parameters" in ast.unparse(loop.iter):
                yield _zeros(event.node)


def _zeros(node: ast.AST) -> Report:
    return Report(
        "MF402",
        node,
        "The gradients become zeros and stay allocated through the next forward: one set of the parameters' size.",
        "zero_grad() with its default set_to_none=True frees them. Not mended by itself: with zeros, weight decay and momentum also "
        "move parameters that got no gradient.",
    )


def _reads_gradients(function: Function, zero: ast.AST) -> bool:
    """Whether `.grad` is read as a tensor in the function, which would meet None."""
    return any(
        isinstance(part, ast.Attribute)
        and part.attr not in ("zero_", "data")
        and isinstance(part.value, ast.Attribute)
        and part.value.attr == "grad"
        for part in ast.walk(function.node)
    )


def find_summed_losses(program: Program) -> Iterator[Report]:
    """`total = part(a) + part(b) + part(c)` and one backward: all graphs at once, where each could have gone by itself."""
    for function in program.functions:
        sent = {name for event in function.events if event.kind == "backward" for name in names_in(event.node)}
        for event in function.events:
            if (
                event.kind == "bind"
                and event.name in sent
                and isinstance(event.stmt, ast.Assign)
                and event.context.grad is True
            ):
                terms = _terms(event.stmt.value)
                if len(terms) >= 2 and all(_is_own_forward(term, event) for term in terms):
                    yield Report(
                        "MF403",
                        event.stmt,
                        f"{len(terms)} separate forwards are added up before one backward: all their graphs are alive at once.",
                        "If they share no intermediate tensor, call backward on each by itself: the gradients add up to the same "
                        "sum (equal to rounding) with one graph at a time.",
                    )


def _terms(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
        return _terms(node.left) + _terms(node.right)
    return [node]


def _is_own_forward(term: ast.expr, event: Event) -> bool:
    """Whether the term runs a network on data of its own: nothing with a graph goes in."""
    assert event.function is not None
    inside_term = set(ast.walk(term))
    forwards = 0
    for other in event.function.events:
        if other.stmt is not event.stmt or other.node not in inside_term:
            continue
        if other.kind == "read" and other.value.kind in ("tensor", "unknown") and other.value.graph:
            return False
        if other.kind == "call" and other.node in other.value.roots:
            target = other.base.target
            if isinstance(target, Function) and not (target.result is not None and target.result.roots):
                continue
            forwards += 1
    return forwards > 0


def find_attached_fakes(program: Program) -> Iterator[Report]:
    """The critic's loss on fakes that still hang on the generator: its backward runs through the generator for nothing."""
    for function in program.functions:
        calls = [event for event in function.events if event.kind == "call" and event.base.kind == "module" and event.args]
        for fake in calls:
            generator = _maker(fake, calls)
            if generator is None or fake.context.grad is not True:
                continue
            real = [event for event in calls if event.name == fake.name and event.args[0].graph < GRAPH]
            if real and _trains_critic(fake, generator, function):
                yield Report(
                    "MF404",
                    fake.stmt,
                    f"{quote(fake.node)} in the critic's step runs backward through `{generator.name}` too: its graph is kept and "
                    "its gradients are computed, and then thrown away.",
                    "Give the critic `.detach()` of the fakes, or make them under torch.no_grad() for this step.",
                )


def _maker(fake: Event, calls: list[Event]) -> Event | None:
    """The call of another module that the input of this one comes from."""
    value = fake.args[0]
    if value.graph < GRAPH:
        return None
    return next((event for event in calls if event.node in value.roots and event.name != fake.name and event is not fake), None)


def _trains_critic(fake: Event, generator: Event, function: Function) -> bool:
    for backward in function.events:
        if backward.kind != "backward" or backward.index < fake.index or fake.node not in backward.value.roots:
            continue
        assert isinstance(backward.node, ast.Call)
        if retains(backward.node):
            return False
        step = next((event for event in function.events if event.kind == "step" and event.index > backward.index), None)
        if step is not None and step.value.owners:
            return fake.name in step.value.owners and generator.name not in step.value.owners
        named = step.name if step is not None else backward.name
        return bool((words_of(named.replace(".", "_")) | words_of(fake.name.replace(".", "_"))) & _CRITIC_WORDS)
    return False


def find_early_steps(program: Program) -> Iterator[Report]:
    """`optimizer.step()` between a forward and its second backward, which needs the weights as they were."""
    for function in program.functions:
        backwards = [event for event in function.events if event.kind == "backward"]
        calls = {event.node: event for event in function.events if event.kind == "call"}
        for step in function.events:
            if step.kind != "step" or step.value.kind == "scaler":
                continue
            before = [event for event in backwards if event.index < step.index and _together(event, step)]
            after = [event for event in backwards if event.index > step.index and _together(event, step)]
            if not before or not after:
                continue
            later = after[0]
            stale = [
                calls[root]
                for root in later.value.roots
                if root in calls and calls[root].index < step.index and not later.value.carried
            ]
            owned = [event for event in stale if event.name in step.value.owners]
            shared = [event for event in stale if any(event.node in other.value.roots for other in before)]
            keeps = any(isinstance(event.node, ast.Call) and retains(event.node) for event in before)
            if (owned and shared) or (not step.value.owners and shared and keeps):
                name = owned[0].name if owned else shared[0].name
                yield Report(
                    "MF405",
                    step.node,
                    f"This step writes the weights of `{name}` in place, and the backward on line {line_of(later)} still needs "
                    "them as they were in the forward.",
                    f"Run both backward passes before the steps, or call `{name}` again after this one; retain_graph=True is then "
                    "not needed.",
                )


def _together(event: Event, step: Event) -> bool:
    """Whether both can run in one pass: same loops, no arms that exclude each other."""
    arms = dict(step.context.arms)
    return event.context.loops == step.context.loops and all(arms.get(stmt, arm) == arm for stmt, arm in event.context.arms)


def find_foreach(program: Program) -> Iterator[Report]:
    """`AdamW(..., foreach=True)`: the step holds intermediates of all parameters at once."""
    for event in events_of(program, "call"):
        call = event.node
        if event.value.kind != "optimizer" or not isinstance(call, ast.Call):
            continue
        if any(item.arg == "foreach" and says(item.value, True) for item in call.keywords):
            yield Report(
                "MF406",
                call,
                "foreach=True computes the step for all parameters at once: its intermediates take another set of the parameters' "
                "size at the peak of the step.",
                "foreach=False goes one parameter at a time; fused=True, where there is a kernel, needs no intermediates.",
            )


RULES = (find_late_zero_grad, find_kept_zeros, find_summed_losses, find_attached_fakes, find_early_steps, find_foreach)
