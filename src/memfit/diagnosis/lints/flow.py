"""Walking the statements of every function of a file, in the order in which they would run.

A loop is walked twice, first muted, so that the second turn knows what the first left behind (a graph carried over). The file is
walked three times, so that parameters know what callers pass and callers what functions return. Costs about a millisecond for
a hundred lines.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace

from memfit.diagnosis.lints.calls import joined_sites
from memfit.diagnosis.lints.containers import concatenate
from memfit.diagnosis.lints.expressions import bind_target, evaluate
from memfit.diagnosis.lints.facts import NO_GRAD, is_module_word
from memfit.diagnosis.lints.modules import is_constant
from memfit.diagnosis.lints.program import Context, Function, LoopNode, Program, dotted, turns_gradients_off
from memfit.diagnosis.lints.values import GRAPH, NO_GRAPH, UNKNOWN, Value, element_of, join, with_graph
from memfit.diagnosis.lints.walk import Walk

_PASSES = 3
_LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)


def analyse(program: Program) -> Program:
    """Fills in the events of every function, and what they pass to each other."""
    if "backward" in program.text:
        backward_names = {function: _find_backward_names(function) for function in program.functions}
    else:
        backward_names = dict.fromkeys(program.functions, frozenset[str]())
    known: list[object] = []
    for number in range(_PASSES):
        sites = {function: function.sites for function in program.functions}
        for function in program.functions:
            function.sites = []
        for cls in program.classes.values():
            cls.options = {}
        for function in program.functions:
            function.events = []
            _walk_function(function, program, sites[function], backward_names[function])
        found: list[object] = [(function.result, [given for given, _ in function.sites]) for function in program.functions]
        if program.is_last_pass:
            break
        program.is_last_pass = found == known or number == _PASSES - 2  # the last one keeps the events
        known = found
    return program


def _walk_function(
    function: Function, program: Program, sites: list[tuple[dict[str, Value], Context]], backward_names: frozenset[str]
) -> None:
    new_sites, function.sites = function.sites, sites
    walk = Walk(program, function, {}, backward_names=backward_names)
    grad = function.grad
    if grad is True and sites and all(context.grad is False for _, context in function.sites):
        grad = False  # only ever called where gradients are off
    walk.context = replace(walk.context, grad=grad)
    for position, name in enumerate(function.parameters):
        walk.env[name] = _parameter(function, position, name, program)
    function.sites = new_sites
    run(function.body, walk)
    function.names = walk.env
    function.result = walk.returned


def _parameter(function: Function, position: int, name: str, program: Program) -> Value:
    if position == 0 and function.is_method and function.cls is not None:
        return Value("module" if function.cls.is_module else "object", op=function.cls.name, target=function.cls)
    passed = joined_sites(function, name)
    forward = function.name == "forward" and function.cls is not None and function.cls.is_module
    if forward and (passed is None or passed.kind in ("tensor", "unknown")):
        return Value("tensor", GRAPH, origin=function.argument(name), op="argument")
    if passed is not None and passed.kind not in ("unknown", "none"):
        return passed
    if name in program.modules or is_module_word(name):
        return Value("module")
    return passed or Value(origin=function.argument(name))


def _find_backward_names(function: Function) -> frozenset[str]:
    """Names that a backward pass is run on, in this function: `loss` of `(loss / 4).backward()`."""
    found = set()
    for statement in function.body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.endswith("backward"):
                for part in (node.func.value, *node.args):
                    # Of `out["loss"]` the entry has a graph; what `out` is as a whole remains open.
                    if not any(isinstance(inner, ast.Subscript) for inner in ast.walk(part)):
                        found |= {dotted(name) for name in ast.walk(part) if isinstance(name, (ast.Name, ast.Attribute))}
    return frozenset(found - {"", "self"})


def run(statements: list[ast.stmt], walk: Walk) -> bool:
    """Walks a block; answers whether it always leaves (return, raise, continue, break)."""
    for statement in statements:
        walk.stmt = statement
        handler = _HANDLERS.get(type(statement))
        if handler is not None:
            if handler(statement, walk):
                return True
        else:
            for child in ast.iter_child_nodes(statement):
                if isinstance(child, ast.expr):
                    evaluate(child, walk)
        if isinstance(statement, _LEAVES):
            return True
    return False


def _assign(node: ast.Assign, walk: Walk) -> None:
    value = evaluate(node.value, walk)
    for target in node.targets:
        if isinstance(target, (ast.Tuple, ast.List)) and isinstance(node.value, ast.Tuple) and value.items:
            for part, item in zip(target.elts, value.items, strict=False):
                bind_target(part, item, walk)
        else:
            bind_target(target, value, walk)
    _freeze(node, walk)


def _freeze(node: ast.Assign, walk: Walk) -> None:
    """`p.requires_grad = False` for the parameters of a module freezes the module."""
    target = node.targets[0]
    if isinstance(target, ast.Attribute) and target.attr == "requires_grad" and is_constant(node.value, False):
        _freeze_owners(evaluate(target.value, walk), walk)


def _freeze_owners(value: Value, walk: Walk) -> None:
    for owner in value.owners:
        if (module := walk.look_up(owner)) is not None:
            walk.env[owner] = replace(module, frozen=True)


def _annotated(node: ast.AnnAssign, walk: Walk) -> None:
    if node.value is not None:
        bind_target(node.target, evaluate(node.value, walk), walk)


def _augment(node: ast.AugAssign, walk: Walk) -> None:
    old = evaluate(node.target, walk)
    value = evaluate(node.value, walk)
    name = dotted(node.target)
    walk.record("augment", name, node, value, base=old)
    if old.kind == "list" or value.kind == "list":
        new = concatenate(old, value)
        walk.record("store", name, node, value, base=old)
    else:
        new = with_graph([old, value], origin=node, made_by=node)
        if walk.grad is False:
            new = replace(new, graph=NO_GRAPH, roots=frozenset())
        if old.kind == "tensor":
            walk.record("write", type(node.op).__name__, node, old)
            # Without grad mode a parameter that is updated in place stays the leaf it was.
            new = old if walk.grad is False else replace(new, origin=old.origin)
        elif "tensor" not in (old.kind, value.kind) and new.graph == NO_GRAPH:
            new = UNKNOWN
    if name:
        walk.env[name] = new


def _expression(node: ast.Expr, walk: Walk) -> None:
    call = node.value
    value = evaluate(call, walk)
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and dotted(call.func.value):
        name, method = dotted(call.func.value), call.func.attr
        if method == "requires_grad_" and call.args and is_constant(call.args[0], False):
            _freeze_owners(walk.look_up(name) or UNKNOWN, walk)
        elif method in ("detach_", "requires_grad_") and name in walk.env and value.kind == "tensor":
            walk.env[name] = value
    if isinstance(call, ast.Call) and walk.program.resolve(call.func) == "torch.set_grad_enabled":
        off = bool(call.args) and is_constant(call.args[0], False)
        walk.context = replace(walk.context, grad=not off)


def _return(node: ast.Return, walk: Walk) -> None:
    value = evaluate(node.value, walk)
    walk.record("return", "", node, value)
    walk.returned = value if walk.returned is None else join(walk.returned, value)


def _delete(node: ast.Delete, walk: Walk) -> None:
    for target in node.targets:
        for part in target.elts if isinstance(target, ast.Tuple) else [target]:
            name = dotted(part.value if isinstance(part, ast.Subscript) else part)
            if not name:
                continue
            walk.record("delete" if not isinstance(part, ast.Subscript) else "empty", name, part, walk.look_up(name) or UNKNOWN)
            if not isinstance(part, ast.Subscript):
                walk.env.pop(name, None)


def _loop(node: LoopNode, walk: Walk) -> None:
    outer, env = walk.context, dict(walk.env)
    item: Value | None = None
    if not isinstance(node, ast.While):
        item = _iterated(node, evaluate(node.iter, walk), walk)
    walk.context = replace(outer, loops=(*outer.loops, node))
    muted, walk.muted = walk.muted, True
    if not muted:  # loops inside a muted turn need no second one
        _turn(node, item, walk)
        carried = {
            name: replace(value, carried=True) if value.graph and value != env.get(name) else value
            for name, value in walk.env.items()
        }
        walk.env = _join_environments(env, carried)
        walk.context = replace(outer, loops=(*outer.loops, node))
    walk.muted = muted
    before = dict(walk.env)
    _turn(node, item, walk)
    walk.env = _join_environments(before, walk.env)
    walk.context = outer
    run(node.orelse, walk)


def _turn(node: LoopNode, item: Value | None, walk: Walk) -> None:
    walk.stmt = node
    if isinstance(node, ast.While):
        evaluate(node.test, walk)
    elif item is not None:
        bind_target(node.target, item, walk)
    run(node.body, walk)


def _iterated(node: ast.For | ast.AsyncFor, source: Value, walk: Walk) -> Value:
    if source.kind == "parameters":
        frozen = any((owner := walk.look_up(name)) is not None and owner.frozen for name in source.owners)
        item = Value("tensor", NO_GRAPH if frozen else GRAPH, leaf=not frozen, owners=source.owners, op="parameter")
        return Value("list", items=(UNKNOWN, item)) if isinstance(node.target, ast.Tuple) else item
    found = element_of(source)
    # What a program iterates over without computing it is data: a loader, a list of batches.
    return replace(found, plain=True) if found.kind == "unknown" and not found.graph else found


def _if(node: ast.If, walk: Walk) -> bool:
    evaluate(node.test, walk)
    outer, before = walk.context, dict(walk.env)
    walk.context = replace(outer, arms=(*outer.arms, (node, "if")))
    left = run(node.body, walk)
    after_body, walk.env = walk.env, before
    grad_after = walk.context.grad
    walk.context = replace(outer, arms=(*outer.arms, (node, "else")))
    right = run(node.orelse, walk)
    walk.context = outer
    if left and right:
        return True
    if right or (not left):
        walk.env = after_body if right else _join_environments(after_body, walk.env)
    if grad_after != outer.grad:
        walk.context = replace(outer, grad=None)
    return False


def _join_environments(left: dict[str, Value], right: dict[str, Value]) -> dict[str, Value]:
    joined = dict(left)
    for name, value in right.items():
        mine = joined.get(name)
        joined[name] = value if mine is None or mine is value else join(mine, value)
    return joined


def _with(node: ast.With | ast.AsyncWith, walk: Walk) -> bool:
    outer = walk.context
    grad = outer.grad
    for item in node.items:
        value = evaluate(item.context_expr, walk)
        if item.optional_vars is not None:
            bind_target(item.optional_vars, UNKNOWN if value.kind == "object" else value, walk)
        grad = _grad_inside(item.context_expr, grad, walk)
    walk.context = replace(outer, grad=grad)
    left = run(node.body, walk)
    walk.context = outer
    return left


def _grad_inside(manager: ast.expr, grad: bool | None, walk: Walk) -> bool | None:
    call = manager if isinstance(manager, ast.Call) else None
    name = walk.program.resolve(call.func if call else manager)
    if name in NO_GRAD:
        return None if call and call.args and not is_constant(call.args[0], True) else False
    if name in ("torch.enable_grad", "torch.autograd.enable_grad"):
        return True
    if name in ("torch.set_grad_enabled", "torch.autograd.set_grad_enabled") and call and call.args:
        return True if is_constant(call.args[0], True) else False if is_constant(call.args[0], False) else None
    if turns_gradients_off(name):
        return False
    if isinstance(manager, ast.IfExp) and "no_grad" in ast.dump(manager):
        return None
    return grad


def _try(node: ast.Try, walk: Walk) -> bool:
    outer, before = walk.context, dict(walk.env)
    walk.context = replace(outer, arms=(*outer.arms, (node, "try")))
    left = run([*node.body, *node.orelse], walk)
    ends = [] if left else [walk.env]
    for handler in node.handlers:
        walk.env = _join_environments(before, walk.env)
        walk.context = replace(outer, arms=(*outer.arms, (node, f"except {handler.lineno}")), handler=handler)
        if handler.name:
            walk.env[handler.name] = Value("error", made_by=handler)
        if not run(handler.body, walk):
            ends.append(walk.env)
    walk.context = outer
    for env in ends:
        walk.env = env if env is ends[0] else _join_environments(walk.env, env)
    return run(node.finalbody, walk) or not ends


def _match(node: ast.Match, walk: Walk) -> None:
    evaluate(node.subject, walk)
    before, ends = walk.env, []
    outer = walk.context
    for case in node.cases:
        walk.env = dict(before)
        walk.context = replace(outer, arms=(*outer.arms, (node, f"case {case.pattern.lineno}")))
        run(case.body, walk)
        ends.append(walk.env)
    walk.context, walk.env = outer, before
    for env in ends:
        walk.env = _join_environments(walk.env, env)


def _define(node: ast.FunctionDef | ast.AsyncFunctionDef, walk: Walk) -> None:
    for decorator in node.decorator_list:
        evaluate(decorator, walk)
    walk.env[node.name] = Value("function", target=walk.program.by_node.get(node), made_by=node)


def _define_class(node: ast.ClassDef, walk: Walk) -> None:
    found = walk.program.classes.get(node.name)
    walk.env[node.name] = Value("class", target=found, made_by=node)
    inside = Walk(walk.program, walk.function, dict(walk.env), walk.context, muted=True)
    run(node.body, inside)
    if found is not None:
        for name, value in inside.env.items():
            if name not in walk.env and value.kind != "function":
                found.attributes.setdefault(name, value)


def _raise(node: ast.Raise, walk: Walk) -> None:
    evaluate(node.exc, walk)
    evaluate(node.cause, walk)


_HANDLERS: dict[type[ast.AST], Callable[..., bool | None]] = {
    ast.Assign: _assign,
    ast.AnnAssign: _annotated,
    ast.AugAssign: _augment,
    ast.Expr: _expression,
    ast.Return: _return,
    ast.Delete: _delete,
    ast.For: _loop,
    ast.AsyncFor: _loop,
    ast.While: _loop,
    ast.If: _if,
    ast.With: _with,
    ast.AsyncWith: _with,
    ast.Try: _try,
    ast.Match: _match,
    ast.FunctionDef: _define,
    ast.AsyncFunctionDef: _define,
    ast.ClassDef: _define_class,
    ast.Raise: _raise,
}
if hasattr(ast, "TryStar"):
    _HANDLERS[ast.TryStar] = _try
