"""Mends for what was seen to grow, made in a copy of the text. No file is written.

Two kinds. Safe ones are those of the static rules (`lints.fix`), if their finding is of growth or evaluation (MF1, MF3) and stands at the
growth's line, or they change a statement around it (`torch.no_grad()` around a loop). Where the rules do not dare, since the source
does not show that nobody goes backward through the value, the remedy of the growth is tried at its line: `.detach()` or `.clone()` of
what is stored, `torch.no_grad()` around a loop without a backward. Whether such a mend leaves results as they are is for a run to show.
Files of installed packages are not mended: they are not the user's.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable
from pathlib import Path

from memfit.core.growth import CONTAINER, GRAPH, Growth, show_path
from memfit.core.proof import Mended
from memfit.diagnosis.lints.check import EVERYTHING, Chosen, find_in
from memfit.diagnosis.lints.edit import edit_text
from memfit.diagnosis.lints.fix import diff, fix_text, read_exactly
from memfit.diagnosis.lints.report import Mend
from memfit.diagnosis.lints.source import Source, may_train, parse_text

_OF_GROWTH = ("MF1", "MF3")
_INSTALLED = ("site-packages", "dist-packages")
_STORES = {"append": 0, "appendleft": 0, "add": 0, "insert": 1}  # which argument is stored
_MADE_HERE = (ast.Dict, ast.List, ast.Tuple, ast.Set, ast.Constant, ast.ListComp, ast.DictComp)


def mend_growth(growths: Iterable[Growth], *, only_safe: bool) -> tuple[tuple[Mended, ...], tuple[Growth, ...]]:
    """The files with their mends, and the growths for which there is none. A file that cannot be read or parsed has none."""
    by_path: dict[str, list[Growth]] = {}
    for each in growths:
        by_path.setdefault(each.path, []).append(each)
    mended: list[Mended] = []
    unmended: list[Growth] = []
    for path, here in by_path.items():
        source = _read(path)
        if source is None:
            unmended += here
            continue
        codes: set[str] = set()
        tried: dict[tuple[str, ast.AST], Mend] = {}
        for growth in here:
            safe = _codes_at(source, growth.line) if may_train(source.text) else set()
            mend = None if safe or only_safe else _try(growth, source.tree)
            if mend is not None:
                tried[mend.kind, mend.node] = mend
            elif not safe:
                unmended.append(growth)
            codes |= safe
        text, _ = edit_text(source.text, list(tried.values()), source)
        fixed = fix_text(text, path, Chosen(select=tuple(sorted(codes)))) if codes else None
        text = text if fixed is None else fixed.text
        if text != source.text:
            num_safe = 0 if fixed is None else fixed.num_mends
            change = diff(source.text, text, show_path(path))
            mended.append(Mended(path, text, tuple(sorted(codes)), num_safe, len(tried), change))
    return tuple(mended), tuple(unmended)


def _read(path: str) -> Source | None:
    if any(part in _INSTALLED for part in Path(path).parts) or not os.path.isfile(path):
        return None
    try:
        text = read_exactly(Path(path))[0]
        return parse_text(text, path) or Source(path, text, ast.parse(text))  # a helper need not speak of torch
    except (OSError, SyntaxError, UnicodeDecodeError, ValueError):
        return None


def _codes_at(source: Source, line: int) -> set[str]:
    """The codes of the safe mends that belong to a growth at this line."""
    found = set()
    for finding, mend in find_in(source, EVERYTHING):
        if mend is not None and finding.code.startswith(_OF_GROWTH) and (finding.line == line or _covers(mend.node, line)):
            found.add(finding.code)
    return found


def _covers(node: ast.AST, line: int) -> bool:
    first: int = getattr(node, "lineno", 0)
    return first <= line <= (getattr(node, "end_lineno", None) or first)


def _try(growth: Growth, tree: ast.Module) -> Mend | None:
    """The remedy of the growth as a change of its line."""
    if growth.kind == GRAPH and not growth.is_backwarded and _imports_torch(tree):
        head = int(growth.loop.rpartition(":")[2] or 0)
        loops = [node for node in ast.walk(tree) if isinstance(node, (ast.For, ast.While)) and node.lineno == head]
        if len(loops) == 1 and _covers(loops[0], growth.line):
            return Mend("wrap", loops[0], "torch.no_grad()")
    stored = _stored_at(tree, growth.line)
    if stored is None or growth.kind not in (CONTAINER, GRAPH):
        return None
    if growth.used_bytes is not None:
        return Mend("call", stored, "clone")
    return Mend("call", stored, "detach") if growth.kind == GRAPH or growth.is_attached else None


def _imports_torch(tree: ast.Module) -> bool:
    return any(isinstance(node, ast.Import) and any(each.name == "torch" and not each.asname for each in node.names) for node in tree.body)  # fmt: skip


def _stored_at(tree: ast.Module, line: int) -> ast.expr | None:
    """What the statement at this line stores or adds, as an expression whose value is one thing."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.stmt) or not _covers(node, line):
            continue
        stored: ast.expr | None = None
        if (
            isinstance(node, ast.AugAssign)
            or (isinstance(node, ast.AnnAssign) and node.value is not None)
            or (isinstance(node, ast.Assign) and not any(isinstance(each, (ast.Tuple, ast.List)) for each in node.targets))
        ):
            stored = node.value
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute):
            index = _STORES.get(node.value.func.attr)
            stored = node.value.args[index] if index is not None and len(node.value.args) > index else None
        if stored is not None and not isinstance(stored, _MADE_HERE):
            return stored
    return None
