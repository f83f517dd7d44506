"""What a call answers: a module, a tensor with or without a graph, an optimizer; and which storage it writes on the way."""

from __future__ import annotations

import ast
from dataclasses import replace

from memfit.diagnosis.lints import facts
from memfit.diagnosis.lints.modules import (
    call_checkpointed,
    call_method_of_module,
    call_module,
    is_constant,
    keyword,
    make_instance,
    make_module,
    read_dtype,
    remember_site,
)
from memfit.diagnosis.lints.program import Class, Function
from memfit.diagnosis.lints.values import (
    DATA,
    GRAPH,
    MAY,
    NO_GRAPH,
    NUMBER,
    TEXT,
    UNKNOWN,
    Value,
    element_of,
    join,
    with_graph,
)
from memfit.diagnosis.lints.walk import Walk

_LIBRARIES = ("torch.", "torchvision.", "transformers.", "timm.", "lightning.", "pytorch_lightning.", "apex.", "torchmetrics.")


def answer(
    node: ast.Call,
    name: str,
    callee: Value,
    receiver: Value,
    args: tuple[Value, ...],
    keywords: dict[str, Value],
    walk: Walk,
) -> Value:
    """The value of a call. name: what is called, resolved. callee: the value called, where known; receiver: that of a method."""
    last = name.rpartition(".")[2]
    everything = [*args, *keywords.values()]
    if name == "sys.exc_info":
        return Value("error", made_by=node)
    if isinstance(callee.target, Class) and callee.kind == "class":
        return make_instance(node, callee.target, args, keywords, walk)
    if isinstance(callee.target, Function):
        return _local_call(node, callee.target, args, keywords, walk)
    if callee.kind == "module":
        return call_module(node, callee, everything, walk)
    if name.startswith(_LIBRARIES):
        return _library_call(node, name, last, args, keywords, walk)
    if name.startswith("copy.") and args:
        return replace(args[0], made_by=node)
    if isinstance(node.func, ast.Name):
        found = _builtin(node, name, args)
        if found is not None:
            return found
    if receiver.kind not in ("unknown", "none") or last in facts.CUTS | facts.MOVES:
        return _method(node, last, receiver, args, keywords, walk)
    if last in ("get_model", "create_model", "from_pretrained", "from_config", "build_model", "make_model"):
        return Value("module", made_by=node)
    if facts.is_loss_word(name) and everything:
        return with_graph(everything, origin=node, op="loss", made_by=node)
    if isinstance(node.func, ast.Attribute):
        return _method(node, last, receiver, args, keywords, walk)
    found = with_graph(everything)
    owners = frozenset[str]().union(*(value.owners for value in everything))  # itertools.chain(a.parameters(), ...)
    if walk.grad is False or found.graph == NO_GRAPH:
        return Value(made_by=node, owners=owners)
    return Value(graph=MAY, roots=found.roots, carried=found.carried, origin=node, made_by=node)


def _local_call(node: ast.Call, function: Function, args: tuple[Value, ...], keywords: dict[str, Value], walk: Walk) -> Value:
    bound = function.is_method and isinstance(node.func, ast.Attribute)
    remember_site(function, (UNKNOWN, *args) if bound else args, keywords, walk)
    if function.trains and not walk.muted:
        walk.function.trains = True
    result = function.result
    if result is None:
        return Value(made_by=node)
    if walk.grad is False or function.grad is False:
        items = tuple(replace(item, graph=NO_GRAPH) for item in result.items) if result.items is not None else None
        return replace(result, graph=NO_GRAPH, roots=frozenset(), origin=node, items=items)
    roots = frozenset([node]) if result.graph else frozenset[ast.AST]()
    if result.kind in ("module", "list", "optimizer", "number"):
        return replace(result, roots=roots)
    passed = with_graph([*args, *keywords.values()])
    return replace(result, origin=node, made_by=node, roots=roots | passed.roots, carried=passed.carried)


def _library_call(
    node: ast.Call, name: str, last: str, args: tuple[Value, ...], keywords: dict[str, Value], walk: Walk
) -> Value:
    if name.startswith("torch.optim.") and last[:1].isupper() and ".lr_scheduler." not in name:
        owners = frozenset[str]().union(*(arg.owners for arg in args), *(arg.owners for arg in keywords.values()))
        return Value("optimizer", op=last, owners=owners, made_by=node)
    if last == "GradScaler":
        return Value("scaler", made_by=node)
    if last == "DataLoader":
        return Value("loader", made_by=node)
    if name in ("torch.compile", "torch.jit.script", "torch.jit.trace") and args:
        return replace(args[0], made_by=node)
    if name == "torch.load":
        return Value("checkpoint", origin=node, made_by=node)
    if last in ("checkpoint", "checkpoint_sequential") and "checkpoint" in name.rpartition(".")[0]:
        return call_checkpointed(node, args, keywords, walk)
    if last in ("device", "Generator", "autocast", "manual_seed", "is_available", "is_grad_enabled"):
        return Value("object", op=last)
    if name == "torch.nn.Parameter":
        return Value("tensor", GRAPH, node, leaf=True, made_by=node)
    if last[:1].isupper() and (name.startswith("torch.nn.") or not name.startswith("torch.")):
        return make_module(node, name, last, args, keywords)
    if last in ("from_pretrained", "from_config", "create_model") or name.startswith("torchvision.models."):
        return Value("module", op=last, made_by=node)
    if not name.startswith("torch."):
        return Value(made_by=node)
    if last in facts.FACTORIES:
        wants = keyword(node, "requires_grad")
        dtype = read_dtype(node, last, "", walk)
        if wants is None or is_constant(wants, False):
            return replace(DATA, origin=node, made_by=node, dtype=dtype)
        certain = is_constant(wants, True)
        return Value("tensor", GRAPH if certain else MAY, node, leaf=certain, made_by=node, dtype=dtype)
    if name.startswith("torch.nn.init."):  # these write under no_grad
        return args[0] if args else UNKNOWN
    if last in facts.CUTS:
        return Value("tensor", origin=node, op="cut", made_by=node)
    if name == "torch.autograd.grad":
        kept = not is_constant(keyword(node, "create_graph"), True)
        return Value("list", NO_GRAPH if kept else GRAPH, made_by=node)
    return _tensor_op(node, last, list(args), [*args, *keywords.values()], walk)


def _tensor_op(node: ast.Call, last: str, args: list[Value], everything: list[Value], walk: Walk) -> Value:
    """A differentiable function or method of tensors, out of place or (a trailing _, inplace=True) in place."""
    inplace = (last.endswith("_") and not last.endswith("__")) or is_constant(keyword(node, "inplace"), True)
    op = last.rstrip("_")
    flat = [item for value in everything for item in (value, *([value.element] if value.element else []))]
    found = with_graph(flat, origin=node, op=op, made_by=node)
    if walk.grad is False:
        found = replace(found, graph=NO_GRAPH, roots=frozenset(), carried=False)
    if inplace and args:
        walk.record("write", last, node, args[0])
        return replace(found, origin=args[0].origin or node)
    if op in facts.VIEWS and args:
        found = replace(found, origin=args[0].origin, op=args[0].op, view=args[0].view or op in ("select", "narrow"))
        if op in ("chunk", "split", "unbind"):
            return Value("list", found.graph, element=found, roots=found.roots)
    return found


def _builtin(node: ast.Call, name: str, args: tuple[Value, ...]) -> Value | None:
    first = args[0] if args else UNKNOWN
    if name in facts.PLAIN:
        return TEXT if name in ("str", "repr", "format", "input", "type") else NUMBER
    if name == "range":
        ends = [arg.number for arg in args]
        if len(ends) <= 2 and all(end is not None for end in ends) and ends:
            count = max(0, (ends[-1] or 0) - ((ends[0] or 0) if len(ends) == 2 else 0))
            return Value("list", element=NUMBER, number=count)
        return Value("list", element=NUMBER)
    if name in ("list", "tuple", "set", "sorted", "reversed", "iter", "tqdm", "next", "deque"):
        if name == "next":
            return element_of(first)
        return (
            first
            if first.kind in ("list", "loader", "dict")
            else replace(first, kind="list")
            if args
            else Value("list", items=())
        )
    if name == "enumerate":
        return replace(
            Value("list", first.graph),
            element=Value("list", first.graph, items=(NUMBER, element_of(first))),
            number=first.number,
        )
    if name == "zip":
        return Value("list", element=Value("list", items=tuple(element_of(arg) for arg in args)))
    if name in ("sum", "max", "min"):
        found = with_graph([value for arg in args for value in (arg, element_of(arg))], origin=node, made_by=node)
        return found if found.graph else UNKNOWN
    if name == "filter" and len(args) == 2:
        return args[1]
    if name == "map" and len(args) == 2:
        return Value("list", number=args[1].number)
    if name == "dict":
        return Value("dict")
    return None


def _method(node: ast.Call, last: str, base: Value, args: tuple[Value, ...], keywords: dict[str, Value], walk: Walk) -> Value:
    if isinstance(base.target, Class) and (method := base.target.find(last)) is not None:
        return _local_call(node, method, args, keywords, walk)
    if base.kind in ("module", "object", "parameters"):
        return call_method_of_module(node, last, base, args, keywords, walk)
    if base.kind == "list" and last in ("pop", "popleft"):
        return element_of(base)
    if base.kind == "dict" and last in ("items", "values", "keys", "get"):
        return Value("list", base.graph, element=element_of(base)) if last != "keys" else Value("list", element=TEXT)
    if base.kind == "scaler":
        return with_graph(list(args), origin=args[0].origin if args else node) if last == "scale" else UNKNOWN
    if base.kind in ("optimizer", "text", "number", "list", "dict", "loader", "error"):
        return UNKNOWN
    if last in facts.CUTS:
        if last in ("detach", "data"):
            return replace(base, kind="tensor", graph=NO_GRAPH, roots=frozenset(), carried=False, leaf=False, op="cut")
        return Value(
            "number" if last in ("item", "size", "dim", "numel") else "tensor", op="cut", plain=base.plain, made_by=node
        )
    if last in ("requires_grad_", "retain_grad"):
        if last == "requires_grad_" and not (node.args and not is_constant(node.args[0], True)):
            return replace(base, kind="tensor", graph=GRAPH, leaf=base.graph == NO_GRAPH, plain=False)
        return base
    if last in facts.MOVES or last == "to":
        dtype = read_dtype(node, last, base.dtype, walk)
        found = replace(base, dtype=dtype, view=base.view and last not in ("clone", "contiguous", "cpu"), leaf=False)
        return replace(found, origin=node, op=last) if base.kind == "tensor" else found
    if base.kind == "tensor":
        return _tensor_op(node, last, [base, *args], [base, *args, *keywords.values()], walk)
    found = with_graph([base, *args, *keywords.values()], origin=node)
    return replace(found, kind="unknown", graph=base.graph if base.graph else min(found.graph, MAY), made_by=node)


def joined_sites(function: Function, name: str) -> Value | None:
    """What is passed for a parameter, over all calls in this file; None where no call is seen."""
    found: Value | None = None
    for given, _ in function.sites:
        if name in given:
            found = given[name] if found is None else join(found, given[name])
    return found
