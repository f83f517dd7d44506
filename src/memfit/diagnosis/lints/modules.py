"""Modules: making one, its layers and its size, calling it, moving or freezing it."""

from __future__ import annotations

import ast
from dataclasses import replace

from memfit.diagnosis.lints import facts
from memfit.diagnosis.lints.program import Class, Function, dotted
from memfit.diagnosis.lints.values import GRAPH, MAY, NO_GRAPH, UNKNOWN, Value, with_graph
from memfit.diagnosis.lints.walk import Walk

_CASTS = {"half": "float16", "bfloat16": "bfloat16", "float": "float32", "double": "float64"}


_DTYPES = {"torch.float16": "float16", "torch.half": "float16", "torch.bfloat16": "bfloat16", "torch.float32": "float32"}


def is_constant(node: ast.AST | None, *values: object) -> bool:
    """Whether an argument is written as one of these constants."""
    return isinstance(node, ast.Constant) and any(node.value is value or node.value == value for value in values)


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    """The expression of a keyword argument."""
    return next((item.value for item in call.keywords if item.arg == name), None)


def read_dtype(call: ast.Call, last: str, before: str, walk: Walk) -> str:
    """What `.half()`, `.to(torch.float16)` or `dtype=` makes of a value that was `before`."""
    dtype = _CASTS.get(last, before)
    for asked in (*call.args, keyword(call, "dtype")):
        if asked is not None:
            dtype = _DTYPES.get(walk.program.resolve(asked), dtype)
    return dtype


def call_module(node: ast.AST, module: Value, inputs: list[Value], walk: Walk) -> Value:
    """The output of an nn.Module: a graph where grad mode is on and it has parameters that train, or its input has one."""
    op = module.op.rpartition(".")[2]
    found = with_graph(inputs)
    target = module.target
    passes_on = op.endswith("Loss") or op in facts.WITHOUT_PARAMETERS or module.frozen
    graph = found.graph if passes_on else GRAPH
    if walk.grad is False:
        return Value("tensor", origin=node, op="module", made_by=node)
    output = facts.MODULE_OPS.get(op, op)
    last = module
    while op == "Sequential" and last.items:
        last = last.items[-1]
        op = last.op.rpartition(".")[2]
        output = facts.MODULE_OPS.get(op, op)
    origin: ast.AST | None = node
    if isinstance(target, Class) and (forward := target.find("forward")) is not None and forward.result is not None:
        output = forward.result.op
        if forward.result.items is not None:
            items = tuple(replace(item, origin=node, graph=graph) for item in forward.result.items)
            return Value("list", graph, items=items, roots=found.roots | {node}, made_by=node)
    if module.inplace and inputs:
        walk.record("write", op, node, inputs[0])
        origin = inputs[0].origin or node
    return Value("tensor", graph, origin, output, found.roots | {node} if graph else frozenset(), found.carried, made_by=node)


def make_instance(node: ast.Call, cls: Class, args: tuple[Value, ...], keywords: dict[str, Value], walk: Walk) -> Value:
    """An object of a class of this file; of a module with all layers that its methods put there."""
    init = cls.find("__init__")
    if init is not None:
        remember_site(init, (UNKNOWN, *args), keywords, walk)
    parts = frozenset[str]().union(*(value.parts for value in cls.attributes.values()), *(arg.parts for arg in args))
    sizes = [value.num_parameters for value in cls.attributes.values() if value.kind == "module"]
    known = sizes and all(size is not None for size in sizes)
    return Value(
        "module" if cls.is_module else "object",
        op=cls.name,
        target=cls,
        parts=parts | {cls.name},
        made_by=node,
        num_parameters=sum(size or 0 for size in sizes) if known else None,
    )


def remember_site(function: Function, args: tuple[Value, ...], keywords: dict[str, Value], walk: Walk) -> None:
    """Notes what a call in this file passes, for the next pass over the function."""
    if walk.muted:
        return
    given = dict(zip(function.parameters, args, strict=False))
    given.update({name: value for name, value in keywords.items() if name in function.parameters})
    function.sites.append((given, walk.context))


def call_checkpointed(node: ast.Call, args: tuple[Value, ...], keywords: dict[str, Value], walk: Walk) -> Value:
    """What torch.utils.checkpoint gives back: the output of what it wraps."""
    function, inputs = (args[0], list(args[1:])) if args else (UNKNOWN, [])
    if function.kind == "module":
        found = call_module(node, function, [*inputs, *keywords.values()], walk)
        return replace(found, op="checkpoint", origin=node)
    if walk.grad is False:
        return Value("tensor", origin=node)
    return Value("tensor", GRAPH, node, "checkpoint", frozenset([node]), made_by=node)


def make_module(node: ast.Call, name: str, last: str, args: tuple[Value, ...], keywords: dict[str, Value]) -> Value:
    """A layer, container or loss of torch.nn (or of a library built on it)."""
    everything = [*args, *keywords.values()]
    items: tuple[Value, ...] | None = None
    element: Value | None = None
    if last in ("Sequential", "ModuleList", "ModuleDict"):
        if len(args) == 1 and args[0].kind == "list" and (last == "ModuleList" or isinstance(node.args[0], ast.Starred)):
            items, element = args[0].items, args[0].element
        elif last == "Sequential" and not any(isinstance(arg, ast.Starred) for arg in node.args):
            items = args
    inplace = is_constant(keyword(node, "inplace"), True) or (
        last in ("ReLU", "ReLU6", "SiLU") and bool(node.args) and is_constant(node.args[0], True)
    )
    parts = frozenset[str]().union(*(value.parts for value in everything)) | {last}
    if last == "DistributedDataParallel" and args:
        return replace(args[0], parts=parts, made_by=node)
    return Value(
        "module",
        op=f"torch.nn.{last}",
        parts=parts,
        items=items,
        element=element,
        inplace=inplace,
        made_by=node,
        dtype=_DTYPES.get(ast.unparse(asked), "") if (asked := keyword(node, "dtype")) is not None else "",
        num_parameters=_count_parameters(last, args, items, node),
    )


def _count_parameters(last: str, args: tuple[Value, ...], items: tuple[Value, ...] | None, node: ast.Call) -> int | None:
    if last in facts.WITHOUT_PARAMETERS or last.endswith("Loss"):
        return 0
    if items is not None:
        sizes = [item.num_parameters for item in items]
        return sum(size or 0 for size in sizes) if all(size is not None for size in sizes) else None
    given = [arg.number for arg in args if arg.number is not None]
    bias = 0 if is_constant(keyword(node, "bias"), False) else 1
    if last == "Linear" and len(given) >= 2:
        return given[1] * (given[0] + bias)
    if last == "Embedding" and len(given) >= 2:
        return given[0] * given[1]
    if last in facts.CONVOLUTIONS and len(given) >= 3:
        return given[1] * (given[0] * given[2] ** int(last[-2]) + bias)
    if last in facts.NORMS and given:
        return 2 * given[0]
    gates = {"RNN": 1, "GRU": 3, "LSTM": 4}.get(last)
    if gates and len(given) >= 2:
        return gates * given[1] * (given[0] + given[1] + 2)
    return None


def call_method_of_module(
    node: ast.Call, last: str, base: Value, args: tuple[Value, ...], keywords: dict[str, Value], walk: Walk
) -> Value:
    """`.to()`, `.parameters()`, `.requires_grad_()` and the like; a method that is not known may run the network."""
    owner = dotted(node.func.value) if isinstance(node.func, ast.Attribute) else ""
    if last in ("parameters", "named_parameters"):
        return Value("parameters", owners=frozenset([owner]))
    if last in facts.MOVES or last in ("to", "train", "eval", "requires_grad_", "apply", "type"):
        frozen = base.frozen or (last == "requires_grad_" and bool(node.args) and is_constant(node.args[0], False))
        dtype = read_dtype(node, last, base.dtype, walk)
        found = replace(base, frozen=frozen, dtype=dtype)
        if owner and owner in walk.env and (frozen or dtype):
            walk.env[owner] = found  # these change the module itself
        return found
    if base.kind == "object" or last in ("state_dict", "zero_grad", "load_state_dict", "register_buffer"):
        return UNKNOWN
    if last in ("forward", "__call__", "generate", "training_step", "encode", "decode", "forward_features"):
        return call_module(node, base, [*args, *keywords.values()], walk)
    found = with_graph([*args, *keywords.values()], origin=node)
    return Value(graph=MAY if walk.grad is not False and found.graph else NO_GRAPH, roots=found.roots, made_by=node)
