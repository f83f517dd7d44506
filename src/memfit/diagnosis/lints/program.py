"""One source file as the rules see it: its imports, functions, classes, and what happens in them, in order.

`Event` is what a walk over a function leaves behind (flow.py); rules are questions to these lists.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from memfit.diagnosis.lints.facts import MODULE_METHODS, NO_GRAD, words
from memfit.diagnosis.lints.values import UNKNOWN, Value

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
LoopNode = ast.For | ast.AsyncFor | ast.While


@dataclass(frozen=True, slots=True)
class Context:
    """Where an event stands: the loops around it (outermost first), whether grad mode is on (None: depends), the arms of `if` and
    `try` around it as (statement, arm), and the `except` clause it is in."""

    loops: tuple[LoopNode, ...] = ()
    grad: bool | None = True
    arms: tuple[tuple[ast.stmt, str], ...] = ()
    handler: ast.ExceptHandler | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """kind: 'call', 'bind' (a name or attribute gets a value), 'augment' (`+=`), 'store' (into a container: append, d[k] = v),
    'read', 'write' (the tensor's storage is written), 'return', 'delete', 'backward', 'raise'.

    name: dotted; of a call what is called, with imports resolved. value: what is bound, stored, read, returned or results.
    base: of a call the receiver, of an augment or write the old value. args, keywords: of a call. index: position in the scope.
    """

    kind: str
    name: str
    node: ast.AST
    stmt: ast.stmt
    value: Value
    context: Context
    index: int
    base: Value = UNKNOWN
    args: tuple[Value, ...] = ()
    keywords: dict[str, Value] = field(default_factory=dict)
    function: Function | None = None


@dataclass(eq=False)
class Function:
    """A function, method, lambda or the module's own body (`node` is the ast.Module).

    sites: the calls in this file, as (arguments by parameter, grad mode, event). result: what it returns. trains: whether
    a backward pass runs in it. captured: names that functions inside it read.
    """

    node: ast.Module | FunctionNode
    name: str
    parent: Function | None = None
    cls: Class | None = None
    grad: bool | None = True
    sites: list[tuple[dict[str, Value], Context]] = field(default_factory=list)
    result: Value | None = None
    trains: bool = False
    events: list[Event] = field(default_factory=list)
    names: dict[str, Value] = field(default_factory=dict)

    @property
    def is_method(self) -> bool:
        """Whether the first parameter is the instance."""
        if self.cls is None or not isinstance(self.node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return False
        return not any(isinstance(item, ast.Name) and item.id == "staticmethod" for item in self.node.decorator_list)

    @property
    def parameters(self) -> list[str]:
        """Names of the parameters, the instance included."""
        if isinstance(self.node, ast.Module):
            return []
        args = self.node.args
        return [arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs)]

    def argument(self, name: str) -> ast.arg | None:
        """The node of a parameter."""
        if isinstance(self.node, ast.Module):
            return None
        args = self.node.args
        return next((arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs) if arg.arg == name), None)

    @property
    def body(self) -> list[ast.stmt]:
        """Its statements; of a lambda its expression as one."""
        if isinstance(self.node, ast.Lambda):
            return [ast.copy_location(ast.Return(self.node.body), self.node.body)]
        return self.node.body


@dataclass(eq=False)
class Class:
    """A class of the file. attributes: what `self.x` is, over all methods; options: every module that `__init__` may put
    there. bases: resolved dotted names."""

    node: ast.ClassDef
    name: str
    bases: tuple[str, ...]
    methods: dict[str, Function] = field(default_factory=dict)
    attributes: dict[str, Value] = field(default_factory=dict)
    options: dict[str, list[Value]] = field(default_factory=dict)
    parents: list[Class] = field(default_factory=list)

    @property
    def is_module(self) -> bool:
        """Whether it is an nn.Module: by its bases here, or by names they have elsewhere."""
        foreign = self.foreign_bases()
        if any(base.startswith("torch.nn.") for base in foreign):
            return True
        named = any(base.endswith(("Module", "Model", "Net", "Network", "Layer", "Block")) for base in foreign)
        return named and (self.find("forward") is not None or self.find("training_step") is not None)

    def foreign_bases(self) -> set[str]:
        """Bases that are not in this file, of it and of its parents."""
        found = {base for base in self.bases if base not in _names(self.parents)}
        return found.union(*(parent.foreign_bases() for parent in self.parents))

    def has_only_layers(self, name: str) -> bool:
        """Whether `self.name` can only be a layer when it is called: a plain nn.Module, and no method or known attribute."""
        if name.startswith("_") or name in MODULE_METHODS:
            return False
        plain = bool(self.bases) and all(base.startswith("torch.nn.") or base in _names(self.parents) for base in self.bases)
        return plain and all(parent.has_only_layers(name) for parent in self.parents) and self.find(name) is None

    def find(self, name: str) -> Function | None:
        """A method of it or of a parent in this file."""
        if name in self.methods:
            return self.methods[name]
        return next((found for parent in self.parents if (found := parent.find(name))), None)

    def attribute(self, name: str) -> Value | None:
        """What `self.name` is, where the file tells."""
        if name in self.attributes:
            return self.attributes[name]
        return next((found for parent in self.parents if (found := parent.attribute(name)) is not None), None)


def _names(classes: list[Class]) -> set[str]:
    return {cls.name for cls in classes}


@dataclass(eq=False)
class Program:
    """A parsed file: `functions` in source order, the module's body first; `modules`: dotted names used as nn.Module in it;
    `displays`: its lists, tuples and calls with several positional arguments."""

    tree: ast.Module
    text: str
    imports: dict[str, str] = field(default_factory=dict)
    functions: list[Function] = field(default_factory=list)
    classes: dict[str, Class] = field(default_factory=dict)
    by_node: dict[ast.AST, Function] = field(default_factory=dict)
    modules: set[str] = field(default_factory=set)
    displays: list[ast.List | ast.Tuple | ast.Call] = field(default_factory=list)
    is_last_pass: bool = False

    @property
    def main(self) -> Function:
        return self.functions[0]

    def resolve(self, node: ast.AST) -> str:
        """'torch.nn.functional.relu' of `F.relu`; 'self.net.fc' of itself; '' where there is no dotted name."""
        name = dotted(node)
        root, dot, rest = name.partition(".")
        return self.imports[root] + dot + rest if root in self.imports else name


def dotted(node: ast.AST) -> str:
    """'a.b.c' of a chain of names and attributes, else ''."""
    if isinstance(node, ast.Name):
        return node.id
    if not isinstance(node, ast.Attribute):
        return ""
    known: str | None = node.__dict__.get("dotted")  # asked again in every pass
    if known is None:
        owner = dotted(node.value)
        known = node.__dict__["dotted"] = f"{owner}.{node.attr}" if owner else ""
    return known


_CANONICAL = {"torch.functional": "torch", "torch.nn.modules": "torch.nn", "torch.cuda.amp": "torch.amp"}
_SIGNS_OF_A_MODULE = words("parameters named_parameters train eval modules named_modules children")


def read_program(tree: ast.Module, text: str) -> Program:
    """Collects imports, functions and classes; nothing is walked for events yet."""
    program = Program(tree, text)
    program.functions.append(Function(tree, ""))
    _collect(tree, program, program.main, None)
    for found in program.classes.values():
        found.parents = [program.classes[base] for base in found.bases if base in program.classes and base != found.name]
    return program


def _collect(node: ast.AST, program: Program, scope: Function, cls: Class | None) -> None:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                name = alias.name if alias.asname else alias.name.partition(".")[0]
                program.imports[alias.asname or name] = name
        elif isinstance(child, ast.ImportFrom):
            for alias in child.names:
                module = _CANONICAL.get(child.module or "", child.module or "")
                program.imports[alias.asname or alias.name] = f"{module}.{alias.name}" if module else alias.name
        elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            name = "<lambda>" if isinstance(child, ast.Lambda) else child.name
            found = Function(child, name, scope, cls if not isinstance(child, ast.Lambda) else None)
            program.functions.append(found)
            program.by_node[child] = found
            if not isinstance(child, ast.Lambda):
                found.grad = _grad_of(child, program)
                if cls is not None and any(base.endswith("autograd.Function") for base in cls.bases):
                    found.grad = False  # what runs inside a custom Function is not recorded
                if cls is not None:
                    cls.methods.setdefault(name, found)
            _collect(child, program, found, None)
        elif isinstance(child, ast.ClassDef):
            bases = tuple(program.resolve(base) for base in child.bases)
            inner = Class(child, child.name, tuple(base for base in bases if base))
            program.classes.setdefault(child.name, inner)
            _collect(child, program, scope, inner)
        else:
            if isinstance(child, ast.Call):
                function = child.func
                if (
                    isinstance(function, ast.Attribute)
                    and function.attr in _SIGNS_OF_A_MODULE
                    and (name := dotted(function.value))
                ):
                    program.modules.add(name)
                if len(child.args) > 1:
                    program.displays.append(child)
            elif isinstance(child, (ast.List, ast.Tuple)):
                program.displays.append(child)
            elif isinstance(child, (ast.Name, ast.Constant, ast.expr_context, ast.operator)):
                continue
            _collect(child, program, scope, cls)


def turns_gradients_off(name: str) -> bool:
    """Whether a helper of the program's own is named like torch.no_grad: `smart_inference_mode`, `maybe_no_grad`."""
    last = name.rpartition(".")[2]
    return "no_grad" in last or "inference_mode" in last


def _grad_of(node: ast.FunctionDef | ast.AsyncFunctionDef, program: Program) -> bool | None:
    for decorator in node.decorator_list:
        name = program.resolve(decorator.func if isinstance(decorator, ast.Call) else decorator)
        if name in NO_GRAD or turns_gradients_off(name):
            return False
        if name == "torch.set_grad_enabled":
            return None
    return True
