"""Random programs that read their variables in every way Python has, for tests of liveness. Same seed, same program.

A program defines `f(go, log)`, a function or a generator: `go()` decides which way to go (and ends a program that calls it too
often: every turn of a loop does), `log(x)` reads. Names may be unbound; whatever is
raised is part of what the program does.
"""

from __future__ import annotations

import random
import sys
import textwrap

NAMES = "abcde"


class Writer:
    """Writes one program. Blocks grow smaller with depth."""

    def __init__(self, seed: int) -> None:
        self.choose = random.Random(seed)
        self.is_generator = seed % 3 == 0
        self.number = 0

    def program(self) -> str:
        body = textwrap.indent(self.block(0, in_loop=False), "    ")
        lines = ["from contextlib import contextmanager, suppress", "@contextmanager", "def held(value):", "    yield value"]
        if self.choose.random() < 0.3:  # in the module itself
            return "\n".join(
                [
                    *lines,
                    "go, log = given\nb, c, d = [10], [11], [12]",
                    self.block(0, in_loop=False, is_module=True),
                    "def f(go, log):",
                    "    return 0",
                ]
            )
        last = "    yield 0" if self.is_generator else "    return 0"
        return "\n".join([*lines, "def f(go, log, a=(1,), *b, e=(2,)):", "    b, c, d = [10], [11], [12]", body, last])

    def name(self) -> str:
        return self.choose.choice(NAMES)

    def value(self) -> str:
        self.number += 1
        one, other = self.name(), self.name()
        return self.choose.choice(
            [
                f"[{self.number}]", f"[{self.number}]", f"[{self.number}]", f"[{one}, {self.number}]", f"[*{one}, {self.number}]",
                f"[q for q in {one} if {other}]", f"{{{self.number}: {one}}}", f"({one} if go() else {other})", f"(lambda q={one}: q)()",
                f"({one} := [{self.number}])", f"[{one}, ({one} := [{self.number}])]", f"[{other} := q for q in {one}]",
                f"list(q for q in {one} if {other} or go())", f"({one} or {other})", f"[f'{{len({one})}}']", f"(lambda: {one})()",
                f"sorted([{self.number}], key=lambda q: len({one}))",
            ]
        )  # fmt: skip

    def block(self, depth: int, *, in_loop: bool, is_module: bool = False, may_leave: bool = True) -> str:
        again = {"is_module": is_module, "may_leave": may_leave}
        return "\n".join(
            self.statement(depth, in_loop=in_loop, **again) for _ in range(self.choose.randint(1, 4 if depth else 7))
        )

    def statement(self, depth: int, *, in_loop: bool, is_module: bool, may_leave: bool) -> str:
        one, other, third = self.name(), self.name(), self.name()
        simple = [
            f"{one} = {self.value()}", f"{one} = {self.value()}", f"{one} = {self.value()}", f"log({one})", f"log({one})",
            f"{one} += [{self.number}]", f"del {one}", f"{one}, {other} = {other}, {one}", f"{one}, *{other} = {third}",
            f"{one} = {other} = {self.value()}", f"{one}[0:] = {other}", f"assert {one} or go(), {other}", f"{one}: list = {other}",
            f"import math as {one}", f"class K:\n    held = {one}\n    log(held)", f"def g(q={one}):\n    log(q)\ng()",
            f"def g():\n    return {one}\nlog(g())", f"log([{one}, {other}, {third}])",
        ]  # fmt: skip
        if not is_module:
            simple.append(f"def g():\n    nonlocal {one}\n    {one} = [{self.number}, 0]\n    return {other}\nlog(g())")
            if self.is_generator:
                simple += [f"yield {one}", f"{one} = yield {other}", f"yield from {one}"]
            elif may_leave:
                simple.append(f"if go(): return {one}")
        else:
            simple.append(f"def g():\n    global {one}\n    {one} = [{self.number}, 0]\n    return {other}\nlog(g())")
        simple += [
            f"if go(): raise KeyError({one})",
            f"if go(): raise KeyError({one})",
            "if go(): raise NameError from KeyError(1)",
        ]
        if in_loop and may_leave:
            simple += ["if go(): break", "if go(): continue"]
        if depth > 2 or self.choose.random() < 0.55:
            return self.choose.choice(simple)

        def inner(*, loop: bool = in_loop, leave: bool = may_leave) -> str:
            return textwrap.indent(self.block(depth + 1, in_loop=loop, is_module=is_module, may_leave=leave), "    ")

        alternative = f"\nelse:\n{inner()}" if self.choose.random() < 0.4 else ""
        final = f"\nfinally:\n{inner(leave=False)}" if self.choose.random() < 0.4 else ""
        errors = self.choose.choice(["KeyError", "(KeyError, NameError)", f"Exception as {one}", "Exception"])
        kind = self.choose.randrange(10)
        if kind == 0:
            return f"if {self.choose.choice(['go()', one, f'({one} := {self.value()})'])}:\n{inner()}{alternative}"
        if kind == 1:
            each = self.choose.choice([other, "[[1], [2], [3]]", f"[{other}, {third}]"])
            return f"for {one} in {each}:\n    go()\n{inner(loop=True)}{alternative}"
        if kind == 2:
            test = self.choose.choice(["go()", f"go() and ({one} := [{self.number}])"])
            return f"while {test}:\n    go()\n{inner(loop=True)}{alternative}"
        if kind == 3:
            return f"try:\n{inner()}\nexcept {errors}:\n{inner()}{alternative}{final}"
        if kind == 4:
            return f"try:\n{inner()}\nexcept KeyError:\n{inner()}\nexcept NameError as {one}:\n{inner()}{final}"
        if kind == 5:
            return f"try:\n{inner()}\nfinally:\n{inner(leave=False)}"
        if kind == 6 and sys.version_info >= (3, 11):
            return f"try:\n{inner(leave=False)}\nexcept* KeyError:\n{inner(loop=False, leave=False)}{final}"
        if kind == 7:
            return f"with suppress(KeyError, NameError):\n{inner()}"
        if kind == 8:
            return f"with held({one}) as {other}, held([{other}, 1]) as ({third}, *{one}):\n{inner()}"
        other, third = self.choose.sample(NAMES, 2)
        cases = (f"[{other}, *{third}] if go()", f"{{1: {other}, **{third}}}", other)
        return f"match {one}:\n" + "\n".join(f"    case {case}:\n{textwrap.indent(inner(), '    ')}" for case in cases)


def random_program(seed: int) -> str:
    """The program; not every one compiles (a name both global and local, say)."""
    return Writer(seed).program()
