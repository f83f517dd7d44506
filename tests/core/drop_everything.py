"""Run tests of Python's own with every dead name dropped, in them and in the library: drop_everything.py SOURCE test_x test_y …

Not a test itself: test_liveness.py runs it in a process of its own. SOURCE is the folder that holds memfit; torch is not needed.
Prints a line a test file, and last the number of places and of values dropped.
"""

from __future__ import annotations

import ast
import builtins
import collections
import contextlib
import importlib
import inspect
import io
import linecache
import sys
import tokenize
import traceback
import types
import unittest
import warnings
from importlib.machinery import PathFinder, SourceFileLoader

source, *names = sys.argv[1:]
memfit = types.ModuleType("memfit")  # not the package itself: what it imports is to be loaded with its names dropped
memfit.__path__ = [f"{source}/memfit"]
sys.modules["memfit"] = memfit
liveness = importlib.import_module("memfit.core.liveness")
unseen = importlib.import_module("memfit.core.unseen")

# What loading itself needs cannot be loaded anew.
_NEEDED = (collections, contextlib, importlib, inspect, io, linecache, tokenize, traceback, types, unittest, warnings)
_KEPT = {
    "memfit",
    "os",
    "test",
    "sys",
    "__main__",
    "re",
    "enum",
    "functools",
    "operator",
    "keyword",
    "abc",
    "site",
    "encodings",
}
_KEPT |= {each.__name__.partition(".")[0] for each in _NEEDED}
_KEPT |= {
    "codecs",
    "dis",
    "opcode",
    "ast",
    "symtable",
    "weakref",
    "_weakrefset",
    "threading",
    "signal",
    "logging",
    "string",
    "copyreg",
}
_KEPT |= {
    "stat",
    "posixpath",
    "ntpath",
    "genericpath",
    "token",
    "reprlib",
    "time",
    "typing",
    "selectors",
    "concurrent",
    "zipimport",
}
counts = {"sites": 0, "drops": 0}


def drop(value: object) -> None:
    counts["drops"] += 1


class Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> types.CodeType:
        path = self.get_filename(fullname)
        text = self.get_data(path)
        tree = ast.parse(text)
        if unseen.find_unseen_read(tree):
            return compile(text, path, "exec", dont_inherit=True)
        for each in sorted(liveness.find_deaths(tree, text, path, with_module=False), key=lambda each: -each.index):
            counts["sites"] += 1
            line = f"{each.dead.name} = __drop__({each.dead.name})"
            statements = ast.parse(line if each.is_bound else f"try: {line}\nexcept NameError: pass").body
            for node in (node for statement in statements for node in ast.walk(statement)):
                if hasattr(node, "lineno"):
                    node.lineno = node.end_lineno = each.dead.line
                    node.col_offset = node.end_col_offset = 0
            each.block[each.index : each.index] = statements
        return compile(tree, path, "exec", dont_inherit=True)


class Finder:
    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> object:
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or type(spec.loader) is not SourceFileLoader:
            return None
        spec.loader = Loader(spec.loader.name, spec.loader.path)
        return spec


builtins.__drop__ = drop
warnings.simplefilter("ignore")
for name in [name for name in sys.modules if name.partition(".")[0] not in _KEPT]:
    if getattr(sys.modules[name], "__file__", None):
        del sys.modules[name]
sys.meta_path.insert(sys.meta_path.index(PathFinder), Finder)
num_failed = 0
for name in names:
    suite = unittest.defaultTestLoader.loadTestsFromModule(importlib.import_module(f"test.{name}"))
    result = unittest.TextTestRunner(stream=io.StringIO(), verbosity=0).run(suite)
    failed = [*result.failures, *result.errors]
    num_failed += len(failed)
    print(*(text for _, text in failed), f"memfit: {name} {result.testsRun} run, {len(failed)} failed", sep="\n")
print("memfit:", counts["sites"], counts["drops"], "places and values dropped")
sys.exit(bool(num_failed))
