"""MF111-MF116: references that hold tensors without any graph: exceptions, hooks, caches, cycles, views."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from memfit.diagnosis.lints.facts import FACTORIES, words
from memfit.diagnosis.lints.program import Class, Event, Function, Program, dotted
from memfit.diagnosis.lints.queries import events_of, inside, names_in, quote, survives
from memfit.diagnosis.lints.report import Mend, Report

_HOOKS = words(
    "register_forward_hook register_forward_pre_hook register_full_backward_hook register_full_backward_pre_hook "
    "register_backward_hook"
)
_CACHES = words("functools.lru_cache functools.cache functools.cached lru_cache cache")


def does_tensor_work(node: ast.AST, program: Program, function: Function, depth: int = 3) -> bool:
    """Whether running it makes tensors: torch calls, modules, a backward, or functions of this file that do."""
    for part in ast.walk(node):
        if not isinstance(part, ast.Call):
            continue
        name = program.resolve(part.func)
        last = name.rpartition(".")[2] or getattr(part.func, "attr", "")
        if (name.startswith("torch.") and (last in FACTORIES or name.startswith("torch.nn."))) or last == "backward":
            return True
        value = callee_of(part, function)
        if value is not None and value.node is not node and depth and does_tensor_work(value.node, program, value, depth - 1):
            return True
        if any(event.kind == "call" and event.node is part and event.base.kind == "module" for event in function.events):
            return True
    return False


def callee_of(call: ast.Call, function: Function) -> Function | None:
    """The function or method of this file that a call in `function` calls, if it is one."""
    for event in function.events:
        if event.kind == "call" and event.node is call:
            target = event.base.target
            if isinstance(target, Class):
                return target.find(event.name.rpartition(".")[2])
            return target if isinstance(target, Function) else None
    return None


def find_stored_exceptions(program: Program) -> Iterator[Report]:
    """`self.last_error = error` in an except clause: its traceback owns the frames, the frames own the step's tensors."""
    for event in events_of(program, "bind", "store"):
        handler = event.context.handler
        if handler is None or not any(value.kind == "error" for value in (event.value, *(event.value.items or ()))):
            continue
        assert event.function is not None
        lasting = "." in event.name or event.kind == "store" or _is_global(event) or _goes_on(event, handler)
        attempt = next((arm for arm, _ in reversed(event.context.arms) if isinstance(arm, ast.Try)), None)
        if not lasting or attempt is None:
            continue
        body = ast.Module(attempt.body, [])
        if does_tensor_work(body, program, event.function):
            yield Report(
                "MF111",
                event.stmt,
                f"`{event.name}` keeps the exception, and its traceback keeps the frames of the failed step with all their tensors.",
                "Keep `str(error)`, or `error.with_traceback(None)`. Emptying the cache does not help here.",
            )


def _goes_on(event: Event, handler: ast.ExceptHandler) -> bool:
    """Whether a local name carries the exception into the next turn of a loop, where it is tried again."""
    leaves = (ast.Raise, ast.Return, ast.Break)
    again = bool(event.context.loops) and handler.lineno > event.context.loops[-1].lineno
    return again and event.name != handler.name and not isinstance(handler.body[-1], leaves)


def _is_global(event: Event) -> bool:
    assert event.function is not None
    node = event.function.node
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and any(
        isinstance(part, (ast.Global, ast.Nonlocal)) and event.name in part.names for part in ast.walk(node)
    )


def find_filling_hooks(program: Program) -> Iterator[Report]:
    """A forward hook that appends to a list which only a backward, or nothing, takes from: evaluation fills it."""
    hooks = _hook_functions(program, "forward")
    if not hooks:
        return
    backward = _hook_functions(program, "backward")
    registering = {event.function for event in events_of(program, "call") if event.name.rpartition(".")[2] in _HOOKS}
    where: dict[str, set[Function]] = {}
    for event in events_of(program, "empty", "bind"):
        function = event.function
        assert function is not None
        first = function is program.main or function.name == "__init__" or function in registering  # where the list is made
        if function not in backward and (event.kind == "empty" or (event.value.kind == "list" and not first)):
            where.setdefault(event.name.rpartition(".")[2], set()).add(function)
    # Every function that runs a module must empty the list, or a helper or method for all of them.
    runs = {event.function for event in events_of(program, "call") if event.base.kind == "module" and _is_run(event)}
    emptied = {name for name, functions in where.items() if runs <= functions or not functions <= runs}
    for function in hooks:
        for event in function.events:
            if event.kind != "store" or not isinstance(event.node, ast.Call) or event.context.arms:
                continue
            method = event.node.func.attr if isinstance(event.node.func, ast.Attribute) else ""
            if method not in ("append", "extend", "appendleft") or event.name.rpartition(".")[2] in emptied:
                continue
            if event.value.kind in ("number", "text") or not (names_in(event.node.args[-1]) & set(function.parameters)):
                continue
            if ".shape" in ast.unparse(event.node) or ".item()" in ast.unparse(event.node):
                continue
            yield Report(
                "MF112",
                event.node,
                f"This forward hook puts a tensor into `{event.name}` at every call, and no forward takes it out: under "
                "torch.no_grad() no backward comes, and detach() does not help.",
                "Return early unless torch.is_grad_enabled(), overwrite instead of appending, or remove the handle for evaluation.",
            )


def _is_run(event: Event) -> bool:
    """Whether the call runs a network, and is not one module calling another."""
    inner = event.function is not None and event.function.cls is not None and event.function.cls.is_module
    return event.value.kind == "tensor" and not inner


def _hook_functions(program: Program, kind: str) -> set[Function]:
    found: set[Function] = set()
    for event in events_of(program, "call"):
        last = event.name.rpartition(".")[2]
        if last not in _HOOKS or kind not in last:
            continue
        for value in event.args[:1]:
            if isinstance(value.target, Function):
                found.add(value.target)
        assert isinstance(event.node, ast.Call)
        assert event.function is not None
        if event.node.args and isinstance(event.node.args[0], ast.Name) and event.args and event.args[0].target is None:
            # A parameter: every function of the file that some call passes for it.
            for given, _ in event.function.sites:
                passed = given.get(event.node.args[0].id)
                if passed is not None and isinstance(passed.target, Function):
                    found.add(passed.target)
        if event.node.args and isinstance(event.node.args[0], ast.Attribute):
            method = event.node.args[0].attr
            found |= {cls.methods[method] for cls in program.classes.values() if method in cls.methods}
        if event.node.args and isinstance(event.node.args[0], ast.Call):  # a factory: register(make_hook(name))
            target = callee_of(event.node.args[0], event.function)
            if target is not None:
                found |= {function for function in program.functions if function.parent is target}
    return found


def find_hook_cycles(program: Program) -> Iterator[Report]:
    """`self.register_forward_hook(f)` where f closes over self: the module waits for the collector when it is let go."""
    for event in events_of(program, "call"):
        call = event.node
        assert isinstance(call, ast.Call)
        if event.name.rpartition(".")[2] not in _HOOKS or not isinstance(call.func, ast.Attribute) or not call.args:
            continue
        function = event.function
        assert function is not None
        owner = dotted(call.func.value)
        if (
            function.cls is None
            or not function.cls.is_module
            or function.name != "__init__"
            or owner.partition(".")[0] != "self"
        ):
            continue
        if not isinstance(event.stmt, ast.Expr):  # a kept handle can be removed
            continue
        hook = call.args[0]
        target = event.args[0].target
        closes = isinstance(target, Function) and target.parent is function and _reads_self(target)
        bound = dotted(hook).startswith("self.") and function.cls.find(dotted(hook)[5:]) is not None
        if closes or bound:
            yield Report(
                "MF113",
                call,
                f"The hook {quote(hook)} holds self and self holds the hook: the module and its parameters are freed only when "
                "the cycle collector runs, and that does not look at bytes.",
                "Use the module that the hook is given in place of self, a weakref, or keep the handle and remove it.",
            )


def _reads_self(function: Function) -> bool:
    return "self" not in function.parameters and any(
        isinstance(part, ast.Name) and part.id == "self" for part in ast.walk(function.node)
    )


def find_cached_methods(program: Program) -> Iterator[Report]:
    """`@lru_cache` on a method of a module: the cache is on the class and its keys own every instance."""
    for cls in program.classes.values():
        if not cls.is_module:
            continue
        for method in cls.methods.values():
            node = method.node
            if not method.is_method or not isinstance(node, ast.FunctionDef):
                continue
            names = [program.resolve(item.func if isinstance(item, ast.Call) else item) for item in node.decorator_list]
            if any(name in ("classmethod", "staticmethod") for name in names):
                continue
            for decorator, name in zip(node.decorator_list, names, strict=True):
                if name in _CACHES:
                    yield Report(
                        "MF114",
                        decorator,
                        f"The cache of {cls.name}.{method.name} lives on the class with `self` in its keys: it owns every "
                        f"{cls.name} it was called on, with all parameters, after `del`.",
                        "Cache in a dictionary on the instance, in a buffer, or in a plain function of what the result depends on.",
                    )


def find_self_references(program: Program) -> Iterator[Report]:
    """`self.history = [self]`: an object with tensors that reference counting cannot free."""
    for event in events_of(program, "bind"):
        function = event.function
        assert function is not None
        if function.cls is None or not event.name.startswith("self.") or event.name.count(".") != 1:
            continue  # `self.child.parent = self` is how trees are built
        if not isinstance(event.stmt, ast.Assign):
            continue
        if not function.parameters or function.parameters[0] != "self" or not _contains_self(event.stmt.value):
            continue
        yield Report(
            "MF115",
            event.stmt,
            f"`{event.name}` refers back to its own object: what the object holds is freed only when the cycle collector runs, "
            "which counts objects and not bytes.",
            "Break the cycle: leave the reference out or make it a weakref. A gc.collect() in the loop only hides it.",
        )


def _contains_self(value: ast.expr) -> bool:
    if isinstance(value, ast.Name):
        return value.id == "self"
    if isinstance(value, (ast.List, ast.Tuple, ast.Set)):
        return any(_contains_self(item) for item in value.elts)
    if isinstance(value, ast.Dict):
        return any(_contains_self(item) for item in value.values)
    return False


def find_kept_views(program: Program) -> Iterator[Report]:
    """`features.append(tokens[:, 0])` over a loop: the view owns the whole storage of the batch."""
    for event in events_of(program, "store"):
        if not event.value.view or event.value.graph or not event.context.loops or event.value.kind != "tensor":
            continue
        loop = event.context.loops[-1]
        assert event.function is not None
        made_here = any(
            other.node is event.value.origin and inside(other, loop) for other in event.function.events if other.kind == "call"
        )
        if not made_here or not survives(event, event.name, loop) or not isinstance(event.node, (ast.Call, ast.Subscript)):
            continue
        stored = event.node.args[-1] if isinstance(event.node, ast.Call) else getattr(event.stmt, "value", event.node)
        if not _selects(stored, event):
            continue
        yield Report(
            "MF116",
            event.node,
            f"{quote(stored)} is a view: `{event.name}` keeps the whole tensor behind it for every turn of the loop.",
            "Store `.clone()` of the part (on a GPU `.cpu()` copies too); detach() does not help.",
            Mend("call", stored, "clone"),
        )


def _selects(stored: ast.expr, event: Event) -> bool:
    """Whether it is written as a small part of something larger: `x[:, 0]`, `x[:, :4].detach()`, or a name for that.

    Not `x[0]`, which is the whole of a batch of one or an element of a tuple, and not parts whose place is computed: they may add up.
    """
    while isinstance(stored, ast.Call) and isinstance(stored.func, ast.Attribute):
        stored = stored.func.value
    if isinstance(stored, ast.Name):
        assert event.function is not None
        binds = [other for other in event.function.events if other.kind == "bind" and other.name == stored.id]
        made = [other.stmt.value for other in binds if isinstance(other.stmt, ast.Assign)]
        return len(made) == 1 and not isinstance(made[0], ast.Name) and _selects(made[0], event)
    if not isinstance(stored, ast.Subscript) or not isinstance(stored.slice, ast.Tuple):
        return False
    return any(_is_fixed(part) for part in stored.slice.elts[1:])


def _is_fixed(part: ast.expr) -> bool:
    """`0`, `-1`, `:4`, `2:4`: the same small part every time."""
    if isinstance(part, ast.Slice):
        bounds = [bound for bound in (part.lower, part.upper) if bound is not None]
        return part.upper is not None and all(_is_fixed(bound) for bound in bounds)
    if isinstance(part, ast.UnaryOp):
        part = part.operand
    return isinstance(part, ast.Constant) and isinstance(part.value, int)


RULES = (
    find_stored_exceptions,
    find_filling_hooks,
    find_hook_cycles,
    find_cached_methods,
    find_self_references,
    find_kept_views,
)
