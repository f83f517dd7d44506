"""Who may import whom, read with `ast`: the design's table, and that core, planner, report and lints need no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "memfit"
EVERYTHING = "*"


@dataclass(frozen=True)
class Layer:
    """What one folder may import beside itself and the standard library.

    ours: other folders of memfit. foreign: packages. foreign_in_functions: any package, where it is used.
    """

    ours: frozenset[str] = frozenset()
    foreign: frozenset[str] = frozenset()
    foreign_in_functions: bool = False


def layer(ours: str = "", foreign: str = "", *, foreign_in_functions: bool = False) -> Layer:
    return Layer(frozenset(ours.split()), frozenset(foreign.split()), foreign_in_functions)


LAYERS = {
    "core": layer(),
    "measurement": layer("core engine", "torch"),  # the recorder watches the tape
    "engine": layer("core", "torch"),
    "techniques": layer("core engine", "torch"),
    "planner": layer("core", "numpy scipy"),
    "diagnosis": layer("core engine measurement", "libcst torch"),  # the growth watch runs with the program
    "report": layer("core", "rich jinja2"),
    "runtime": layer("core measurement engine techniques", "torch"),
    "integrations": layer("api core runtime techniques", "torch", foreign_in_functions=True),
    "api": layer(EVERYTHING, EVERYTHING),
    "cli": layer(EVERYTHING, EVERYTHING),
    "__main__": layer("cli"),
    "__init__": layer("api core"),  # the public names and nothing else
}
# Nobody imports these, except who names them in the table and `import memfit` itself.
TOP = {"api", "cli"}
WITHOUT_TORCH = ("core", "planner", "report", "diagnosis/lints")


@dataclass(frozen=True)
class Import:
    """One imported module, absolute: `from ..core import plan` in memfit/planner/x.py is memfit.core.plan."""

    module: str
    line: int
    in_function: bool


def read_imports(path: Path, package: str) -> list[Import]:
    """All imports of a file that lies in `package`, those inside functions and under TYPE_CHECKING included."""
    found: list[Import] = []

    def visit(node: ast.AST, in_function: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, node.lineno, in_function) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found.extend(Import(f"{module}.{alias.name}", node.lineno, in_function) for alias in node.names)
        inside = in_function or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(ast.parse(path.read_text(encoding="utf-8"), str(path)), False)
    return found


def find_violations(source: Path) -> list[str]:
    """Every import under `source` (the folder of memfit) that the table does not allow, as a sentence."""
    violations = []
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        folder = parts[0]
        if folder not in LAYERS:
            violations.append(f"{path.relative_to(source)}: {folder!r} is not in the table of layers.")
            continue
        for found in read_imports(path, ".".join(["memfit", *parts[:-1]])):
            if not _is_allowed(LAYERS[folder], folder, found):
                violations.append(f"{path.relative_to(source)}:{found.line}: {folder} may not import {found.module}.")
    return violations


def _is_allowed(layer: Layer, folder: str, found: Import) -> bool:
    root, *rest = found.module.split(".")
    if root != "memfit":
        if root in sys.stdlib_module_names or (layer.foreign_in_functions and found.in_function):
            return True
        return root in layer.foreign or EVERYTHING in layer.foreign
    target = rest[0] if rest else "__init__"
    if target not in LAYERS:  # a public name through `from memfit import fit`: that is api
        target = "api"
    if target == folder or target in layer.ours:
        return True
    return EVERYTHING in layer.ours and (target not in TOP or folder == "cli")


def test_every_folder_imports_only_what_the_table_allows() -> None:
    violations = find_violations(SOURCE)
    assert not violations, "\n" + "\n".join(violations)


@pytest.mark.parametrize(
    ("file", "text", "violation"),
    [
        ("core/x.py", "import torch", "core/x.py:1: core may not import torch."),
        ("core/x.py", "def f():\n    import numpy.linalg", "core/x.py:2: core may not import numpy.linalg."),
        ("planner/x.py", "from torch import nn", "planner/x.py:1: planner may not import torch.nn."),
        ("planner/x.py", "from ..engine import tape", "planner/x.py:1: planner may not import memfit.engine.tape."),
        ("engine/x.py", "from memfit import techniques", "engine/x.py:1: engine may not import memfit.techniques."),
        ("runtime/x.py", "from memfit import fit", "runtime/x.py:1: runtime may not import memfit.fit."),
        (
            "runtime/x.py",
            "from memfit.cli.app import main",
            "runtime/x.py:1: runtime may not import memfit.cli.app.main.",
        ),
        ("report/a/x.py", "from ...planner import y", "report/a/x.py:1: report may not import memfit.planner.y."),
        ("integrations/x.py", "import lightning", "integrations/x.py:1: integrations may not import lightning."),
        ("api.py", "import memfit.cli", "api.py:1: api may not import memfit.cli."),
        ("helpers/x.py", "", "helpers/x.py: 'helpers' is not in the table of layers."),
    ],
)
def test_the_checker_catches(tmp_path: Path, file: str, text: str, violation: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    assert find_violations(tmp_path) == [violation]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("core/x.py", "import json\nfrom memfit.core.sizes import parse_size\nfrom . import plan"),
        ("planner/x.py", "import numpy as np\nfrom scipy import optimize\nfrom memfit.core import plan"),
        ("runtime/x.py", "from memfit.engine import tape\nimport torch.nn"),
        ("integrations/x.py", "from memfit import fit\ndef f():\n    import lightning"),
        ("api.py", "from memfit.runtime import session\nimport torch"),
        ("cli/x.py", "from memfit import api\nimport typer"),
    ],
)
def test_the_checker_lets_pass(tmp_path: Path, file: str, text: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    assert find_violations(tmp_path) == []


@pytest.mark.parametrize("folder", WITHOUT_TORCH)
def test_folder_imports_without_torch(folder: str) -> None:
    modules = [
        ".".join(("memfit", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")
        for path in sorted((SOURCE / folder).rglob("*.py"))
    ]
    # None in sys.modules makes `import torch` raise ModuleNotFoundError.
    code = f"import sys, importlib; sys.modules['torch'] = None\nfor name in {modules}: importlib.import_module(name)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_importing_memfit_loads_no_torch_and_so_touches_no_device() -> None:
    code = "import sys, memfit; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
