"""The state of a walk over one function: what names hold at this point, and the events so far."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field, replace
from typing import Any

from memfit.diagnosis.lints.facts import is_module_word
from memfit.diagnosis.lints.program import Context, Event, Function, Program
from memfit.diagnosis.lints.values import GRAPH, NO_GRAPH, UNKNOWN, Value

_MODULE = Value("module")


@dataclass
class Walk:
    """env: name or dotted attribute -> value, here. muted: a first turn of a loop, whose events are not kept.

    backward_names: names on which a backward pass is run somewhere in the function, so that they carry a graph for certain.
    """

    program: Program
    function: Function
    env: dict[str, Value]
    context: Context = field(default_factory=Context)
    stmt: ast.stmt = field(default_factory=ast.Pass)
    muted: bool = False
    backward_names: frozenset[str] = frozenset()
    returned: Value | None = None

    def record(self, kind: str, name: str, node: ast.AST, value: Value, **more: Any) -> None:
        """Keeps an event, unless this is a turn that only finds out what the loop carries, or a pass before the last."""
        if not self.muted and self.program.is_last_pass:
            events = self.function.events
            events.append(Event(kind, name, node, self.stmt, value, self.context, len(events), function=self.function, **more))

    def look_up(self, name: str) -> Value | None:
        """The value of a name or dotted attribute: here, in the functions around, in the module, in the instance's class."""
        if name in self.env:
            found = self.env[name]
            return _MODULE if found.kind == "unknown" and name in self.program.modules else found
        root, dot, _ = name.partition(".")
        scope: Function | None = self.function
        while scope is not None and root not in self.env:
            if name in scope.names:
                return scope.names[name]
            if root in scope.names:
                break
            scope = scope.parent
        if not dot:
            return _MODULE if name in self.program.modules or is_module_word(name) else None
        owner, _, attribute = name.rpartition(".")
        holder = self.look_up(owner)
        if holder is not None and holder.target is not None and holder.kind in ("module", "object"):
            known = holder.target.attribute(attribute)  # type: ignore[union-attr]
            if known is not None:
                return known
            if owner == "self" and holder.target.has_only_layers(attribute):  # type: ignore[union-attr]
                return _MODULE
        return _MODULE if name in self.program.modules or (owner == "self" and is_module_word(attribute)) else None

    def bind(self, name: str, value: Value, node: ast.AST) -> None:
        """Gives a name or dotted attribute its value; a new root forgets the attributes of the old one."""
        if name in self.backward_names and self.context.grad is not False and value.kind in ("unknown", "tensor"):
            if value.graph < GRAPH and not value.plain and value.op != "cut":
                value = replace(value, kind="tensor", graph=GRAPH)
        elif value.kind == "unknown" and name in self.program.modules:
            value = replace(value, kind="module")
        prefix = name + "."
        for old in [key for key in self.env if key.startswith(prefix)]:
            del self.env[old]
        self.env[name] = value
        cls = self.function.cls
        if cls is not None and name.startswith("self.") and name.count(".") == 1:
            attribute = name[5:]
            known = cls.attributes.get(attribute)
            if value.kind == "module" and not self.muted:
                cls.options.setdefault(attribute, []).append(value)
            # What __init__ says first is what it is; graphs that land there later do not matter to its kind.
            if known is None or known.kind in ("unknown", "none") or self.function.name == "__init__":
                cls.attributes[attribute] = replace(value, graph=NO_GRAPH, roots=frozenset(), carried=False)
        self.record("bind", name, node, value)

    @property
    def grad(self) -> bool | None:
        return self.context.grad

    def read(self, name: str, node: ast.AST) -> Value:
        """The value of a name that is read here."""
        value = self.look_up(name)
        if value is None:
            value = UNKNOWN
        self.record("read", name, node, value)
        return value
