"""Where names die: the analysis alone, on programs that are compiled with *every* dead name dropped and must not notice."""

from __future__ import annotations

import ast
import builtins
import inspect
import io
import random
import re
import reprlib
import subprocess
import sys
import textwrap
from contextlib import redirect_stdout
from pathlib import Path
from types import CodeType

import pytest

import memfit
from core.random_programs import random_program
from memfit.core.liveness import MODULE, find_deaths
from memfit.core.unseen import find_unseen_read


def deaths(source: str) -> set[tuple[str, str, int]]:
    """(function, name, line after which it is dead)."""
    source = textwrap.dedent(source)
    found = find_deaths(ast.parse(source), source, "x.py", with_module=True)
    return {(each.dead.function, each.dead.name, each.dead.line) for each in found}


def names(source: str) -> set[str]:
    return {name for _, name, _ in deaths(source)}


def without_dead(source: str) -> str:
    """The program with `x = drop(x)` where a name is dead."""
    tree = ast.parse(source)
    for each in sorted(find_deaths(tree, source, "x.py", with_module=True), key=lambda each: -each.index):
        dropped = ast.parse(f"{each.dead.name} = drop({each.dead.name})").body
        if not each.is_bound:
            dropped = ast.parse(f"try: {each.dead.name} = drop({each.dead.name})\nexcept NameError: pass").body
        each.block[each.index : each.index] = dropped
    return ast.unparse(tree)


def run_without_dead(source: str) -> tuple[str, int]:
    """What the program prints if each dead name is bound to a string at once, and how often that happened."""
    drops = []

    def drop(value: object) -> str:
        drops.append(value)
        return "DROPPED"

    return run(without_dead(textwrap.dedent(source)), drop=drop), len(drops)


def run(source: str, **given: object) -> str:
    out = io.StringIO()
    with redirect_stdout(out):
        exec(
            compile(textwrap.dedent(source), "x.py", "exec", dont_inherit=True),
            {"__name__": "program", "__builtins__": builtins, **given},
        )
    return out.getvalue()


def test_a_name_is_dead_after_the_line_that_reads_it_last() -> None:
    found = deaths("""
        def step(model, x, y):
            logits = model(x)
            loss = criterion(
                logits, y)
            loss.backward()
            return loss.item()
    """)
    assert found == {("step", "model", 3), ("step", "x", 3), ("step", "logits", 5), ("step", "y", 5)}


def test_a_training_loop_in_the_module_itself() -> None:
    found = deaths("""
        import torch
        class Net(torch.nn.Module):
            def forward(self, x):
                loss = x * 2
                return loss
        for i in range(3):
            x, y = batch(i)
            out = model(x)
            loss = criterion(out, y)
            loss.backward()
            print(loss.item())
    """)
    in_module = {(name, line) for function, name, line in found if function == MODULE}
    assert in_module == {("x", 9), ("out", 10), ("y", 10), ("loss", 12)}


def test_what_only_the_code_after_the_loop_reads_is_dead_while_the_loop_goes_on() -> None:
    found = find_deaths(
        tree := ast.parse("def f():\n  for _ in it:\n    loss = g()\n  return loss"),
        ast.unparse(tree),
        "x.py",
        with_module=True,
    )
    (dead,) = (each for each in found if each.dead.name == "loss")
    assert (dead.dead.at_start, dead.is_bound, dead.dead.line, dead.dead.bound_lines) == (True, False, 2, (3,))


def test_each_branch_lets_go_of_what_only_the_other_reads() -> None:
    found = deaths("""
        def f(a, b, c):
            if c:
                d = use(a)
            else:
                d = use(b)
            return d
    """)
    assert found == {("f", "a", 4), ("f", "b", 3), ("f", "b", 6), ("f", "a", 3), ("f", "c", 3)}


# Programs that read late. Every one prints what it read; with all dead names dropped it must print the same.
LATE = {
    "the next iteration": """
        def f():
            previous = None
            for i in range(4):
                current = [i]
                if previous is not None:
                    print(previous, current)
                previous = current
        f()
    """,
    "one path in many": """
        def f(n):
            a, b = [1], [2]
            for i in range(n):
                if i == 3:
                    return a
                b = b + [i]
            else:
                a = [9]
            return a + b
        print(f(2), f(5))
    """,
    "augmented assignment": """
        def f():
            total, kept = [0], [5]
            for i in range(3):
                total += [i]
            kept += total
            return kept
        print(f())
    """,
    "a comprehension": """
        def f(xs, scale):
            weights = [2, 3]
            return [x * scale + w for x in xs for w in weights if w != xs[0]]
        print(f([1, 2], 10))
    """,
    "a generator expression": """
        def f(xs):
            big = [1, 2]
            lazy = (x + big[0] for x in xs)
            more = [5]
            return list(lazy), more
        print(f([1, 2]))
    """,
    "a closure": """
        def f():
            big, other = [1], [2]
            def g():
                return big
            other = other + [3]
            return g, other
        g, other = f()
        print(g(), other)
    """,
    "a closure that binds": """
        def f():
            big = [1]
            def g():
                nonlocal big
                big = big + [2]
            g()
            g()
            return big
        print(f())
    """,
    "locals": """
        def f():
            big = [1]
            small = [2]
            print(len(small))
            return locals()
        print(sorted(f()))
    """,
    "a string that is evaluated": """
        def f():
            big = [1]
            print(len(big))
            return eval("big + [1]")
        print(f())
    """,
    "vars without an argument": """
        def f():
            big = [1]
            print(len(big))
            return vars()["big"]
        print(f())
    """,
    "globals": """
        big = [1]
        print(len(big))
        def f():
            return globals()["big"]
        print(f())
    """,
    "a global that a function reads": """
        big, other = [1], [2]
        print(big, other)
        def f():
            return [big for _ in range(2)]
        def g():
            global other
            other = other + [3]
        g()
        print(f(), other)
    """,
    "a generator": """
        def f(n):
            first = [0]
            yield first
            second = [1]
            for i in range(n):
                yield second
                second = second + [i]
            yield first
        print(list(f(2)))
    """,
    "a generator that is thrown into": """
        def f():
            big = [1]
            try:
                yield len(big)
                big = [2]
                yield len(big)
            except KeyError:
                yield big
        g = f(); next(g); next(g)
        print(g.throw(KeyError()))
    """,
    "a handler": """
        def f():
            big, other = [1], [2]
            try:
                print(big)
                other = other[5]
            except IndexError as error:
                return big, other, str(error)
        print(f())
    """,
    "finally": """
        def f(how):
            big = [1]
            for i in range(2):
                try:
                    print(len(big))
                    if how == "return":
                        return "r"
                    if how == "break":
                        break
                    if how == "continue":
                        continue
                    raise KeyError
                except KeyError:
                    pass
                finally:
                    print(big, i)
            return "end"
        print([f(how) for how in ("return", "break", "continue", "raise")])
    """,
    "a handler in a loop that goes on": """
        def f():
            big = [1]
            for i in range(3):
                try:
                    print(big)
                    raise KeyError
                except KeyError:
                    print(big)
                    seen = [i]
            last = seen
            return last
        f()
    """,
    "a nested handler": """
        def f():
            a, b = [1], [2]
            try:
                try:
                    print(len(a))
                    {}["x"]
                finally:
                    print(len(b))
            except KeyError:
                return a + b
        print(f())
    """,
    "a context that swallows": """
        from contextlib import suppress
        def f():
            big, other = [1], [2]
            with suppress(IndexError):
                print(len(big))
                other[7]
                big = [3]
            return big
        print(f())
    """,
    "a handler that is left": """
        def f():
            for size in (4, 2):
                big = [size]
                try:
                    if size == 4:
                        raise MemoryError
                except MemoryError:
                    continue
                return big
        print(f())
    """,
    "a class body": """
        def f():
            big = [1]
            print(len(big))
            class A:
                held = big
            return A.held
        print(f())
        early = [2]
        print(early)
        class B:
            held = early
        print(B.held)
    """,
    "a default argument and a decorator": """
        def f():
            big, deco = [1], lambda g: g
            @deco
            def g(x=big):
                return x
            return g()
        print(f())
    """,
    "a walrus": """
        def f(xs):
            while (x := xs.pop()) and (y := x):
                last = y
            return x, last, [z := i for i in (1, 2)], z
        print(f([0, 1, 2]))
    """,
    "a match": """
        def f(value):
            match value:
                case [first, *rest] if rest:
                    return first, rest
                case {"a": found, **rest}:
                    return found, rest
                case int() as number:
                    other = number
                case _:
                    return value
            return other, value
        print(f([1, 2]), f({"a": 1, "b": 2}), f(3), f("x"))
    """,
    "a turn after a continue": """
        def f():
            kept = None
            for i in range(4):
                value = [i]
                if i == 1:
                    kept = value
                    continue
                if kept:
                    print(kept)
        f()
    """,
    "super": """
        class Own(list):
            def __init__(this, values):
                this.first = values[0]
                super().__init__(values)
        print(Own([1, 2]))
    """,
    "a loop that is left from inside a try": """
        def f():
            while True:
                a = [1]
                try:
                    b = a + [2]
                    break
                finally:
                    a = a + [3]
            return a, b
        print(f())
    """,
    "an unbound name": """
        def f(n):
            for i in range(n):
                x = [i]
                if i == 1:
                    del x
            try:
                return x
            except UnboundLocalError as error:
                return type(error).__name__
        print(f(0), f(1), f(2), f(3))
    """,
    "a mangled name": """
        class A:
            def f(self):
                __big = [1]
                def g():
                    return __big
                return g() + [2]
        print(A().f())
    """,
    "a dataclass and wraps": """
        import functools
        from dataclasses import dataclass, field
        def f():
            start, wrapped = [1], [2]
            @dataclass
            class A:
                held: list = field(default_factory=lambda: start)
                other: tuple = (wrapped,)
            def deco(g):
                @functools.wraps(g)
                def inner(*args):
                    return g(*args) + wrapped
                return inner
            @deco
            def g(x):
                return x + start
            return A().held, A.other, g([3])
        print(f())
    """,
    "targets of with and for": """
        from contextlib import nullcontext
        def f():
            held = [[1, 2], [3]]
            with nullcontext(held) as (first, held[1]), nullcontext(first) as again:
                first = [0]
            for held[0] in (4, 5):
                pass
            return held, again, first
        print(f())
    """,
    "except*": "print(1)"
    if sys.version_info < (3, 11)
    else """
        def f(kinds):
            kept, other = [0], [1]
            try:
                other = other + [2]
                raise ExceptionGroup("", [kind(1) for kind in kinds])
            except* KeyError as group:
                kept = group.exceptions[0].args
            except* ValueError:
                print(kept, other)
            finally:
                print(other)
            return kept
        print(f([KeyError, ValueError]), f([ValueError]))
    """,
    "yield from and a finally that reads": """
        def inner(seen):
            mine = [1]
            try:
                got = yield mine
                yield got
            finally:
                seen.append(mine)
        def f(seen):
            big = [2]
            result = yield from inner(seen)
            yield result, big
        seen = []
        g = f(seen)
        print(next(g), g.send(5), list(g), seen)
        h = f(seen); next(h); h.close()
        print(seen)
    """,
    "a star import and names that come from it": """
        from os.path import *
        sep = [1]
        def f():
            return join("a", "b"), sep
        kept = [2]
        print(kept, f())
    """,
    "a coroutine": """
        import asyncio
        async def f():
            big, other = [1], [2]
            await asyncio.sleep(0)
            async with asyncio.Lock():
                other = other + big
            return [x async for x in g(other)]
        async def g(xs):
            for x in xs:
                yield x
        print(asyncio.run(f()))
    """,
}


@pytest.mark.parametrize("source", LATE.values(), ids=LATE.keys())
def test_a_program_that_reads_late_reads_what_it_would_have_read(source: str) -> None:
    plain = run(source)
    assert plain
    assert run_without_dead(source)[0] == plain


def behaviour(code: CodeType, seed: int, drops: list) -> list[str]:
    """What a random program reads, yields, returns or raises, its ways decided by the seed."""
    choose, seen, num_turns = random.Random(seed), [], 0

    def decide() -> bool:
        nonlocal num_turns
        num_turns += 1
        if num_turns > 60:
            raise SystemExit
        return choose.random() < 0.5

    def note(value: object) -> None:
        seen.append(re.sub(r"0?x[0-9a-f]{6,}", "", reprlib.repr(value)))  # without addresses

    def drop(value: object) -> str:
        drops.append(1)
        return "DROPPED"

    space = {"given": (decide, note), "drop": drop, "__name__": "x", "__builtins__": builtins}
    try:
        exec(code, space)
        result = space["f"](decide, note)
        if inspect.isgenerator(result):
            note(next(result))
            for turn in range(30):
                note(result.throw(KeyError("thrown")) if choose.random() < 0.2 else result.send([turn]))
        else:
            note(result)
    except BaseException as error:
        note((type(error).__name__, error.args, type(error.__cause__).__name__))
    return seen


@pytest.mark.filterwarnings("ignore")  # the compiler's, about asserts of tuples and the like
def test_random_programs_read_what_they_would_have_read() -> None:
    drops: list = []
    for seed in range(80):
        source = random_program(seed)
        plain = compile(source, "x.py", "exec", dont_inherit=True)
        dropped = compile(without_dead(source), "x.py", "exec", dont_inherit=True)
        for decisions in range(4):
            assert behaviour(plain, decisions, []) == behaviour(dropped, decisions, drops), (seed, decisions, source)
    assert len(drops) > 500


def test_in_the_programs_that_read_late_other_names_do_die() -> None:
    num_dropped = [run_without_dead(source)[1] for source in LATE.values()]
    assert sum(num_dropped) > 50
    assert sum(num > 0 for num in num_dropped) >= len(LATE) // 2


def test_where_names_can_be_read_by_name_none_is_dead() -> None:
    late = "def f():\n    big = [1]\n    print(big)\n    other = {}\n    print(other)\n"
    assert names(late) == {"big"} or names(late) == {"big", "other"}
    for reads in ("locals()", "vars()", "eval('big')", "exec('big')", "dir()"):
        assert not names(late + f"    return {reads}\n")
    assert names(late + "    return vars(other)\n") == {"big", "other"} - {"other"}


def test_the_modules_own_names_are_left_out_where_others_may_read_them() -> None:
    source = "big = make()\nprint(big)\nprint(1)\n"
    assert names(source) == {"big"}
    for reads in ("globals()", "import __main__", "import sys; sys.modules[__name__]", "exec('1')", "import fire"):
        assert not names(source + reads)
    assert not find_deaths(ast.parse(source), source, "x.py", with_module=False)


def test_numbers_and_texts_cost_nothing() -> None:
    assert not names("def f(xs):\n  n = len(xs)\n  for i in range(n):\n    for j, x in enumerate(xs):\n      pass\n") - {
        "xs",
        "x",
    }
    assert "total" in names("def f(loss):\n  total = 0\n  total += loss\n  print(total)\n  print(1)\n")


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import sys\nsys._getframe(1).f_locals", "line 2: f_locals"),
        ("import pdb", "line 1: pdb"),
        ("def f(x):\n    breakpoint()", "line 2: breakpoint"),
        ("p = x.data_ptr()", "line 1: data_ptr"),
        ("seen.add(id(x))", "line 1: id"),
        ("set(map(id, xs))", "line 1: id"),
        ("import inspect\ninspect.stack()", "line 2: inspect.stack"),
        ("with torch.cuda.stream(s): pass", "line 1: stream"),
        ("dist.all_reduce(x, async_op=True)", "line 1: async_op"),
        ("frame.query('a > @x')", "line 1: query"),
        ("frame.eval(text)", "line 1: eval"),
        ("from ctypes import c_void_p", "line 1: ctypes"),
        ("import __main__", "line 1: __main__"),
        ("import sys\nbig = sys.modules['__main__'].big", "line 2: __main__"),
        ("from numba import njit", "line 1: numba"),
    ],
)
def test_unseen_reads_are_seen(source: str, found: str) -> None:
    assert find_unseen_read(ast.parse(source)) == found


@pytest.mark.parametrize(
    "source",
    [
        "model.eval()",
        "torch.stack(xs)",
        "for id in ids: print(id)",
        "self.query(x)",
        "x.id",
        "vars(args)",
        "import inspect",
        "if __name__ == '__main__': f()",
    ],
)
def test_ordinary_words_are_no_unseen_reads(source: str) -> None:
    assert find_unseen_read(ast.parse(source)) == ""


PYTHONS_OWN = (
    "test_textwrap",
    "test_configparser",
    "test_generators",
    "test_named_expressions",
    "test_contextlib",
    "test_raise",
)


def test_pythons_own_tests_pass_with_every_dead_name_dropped() -> None:
    """The library modules and the test files themselves, whatever the names hold; 33,000 names in 80 such files when last tried."""
    script = Path(__file__).with_name("drop_everything.py")
    source = str(Path(memfit.__file__).parents[1])
    command = [sys.executable, str(script), source, *PYTHONS_OWN]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    lines = [line for line in done.stdout.splitlines() if line.startswith("memfit:")]
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[1] for line in lines[:-1]] == list(PYTHONS_OWN)
    assert all(int(line.split()[2]) > 0 and line.endswith("0 failed") for line in lines[:-1]), lines
    num_sites, num_drops = (int(word) for word in lines[-1].split()[1:3])
    assert num_sites > 3000
    assert num_drops > 50_000
