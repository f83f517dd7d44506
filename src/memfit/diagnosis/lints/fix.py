"""Mending a source with libcst: formatting and comments stay, and a second run changes nothing.

Only mends that cannot change results are offered (see `report.Mend`); they are applied until none is left.
"""

from __future__ import annotations

import ast
import difflib
import io
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import libcst as cst
from libcst.metadata import CodeRange, MetadataWrapper, PositionProvider

from memfit.diagnosis.lints.check import EVERYTHING, Chosen, find_in
from memfit.diagnosis.lints.report import Mend
from memfit.diagnosis.lints.source import Source, parse_text

_ROUNDS = 5  # a mend may uncover another: each round applies all that can be seen


@dataclass(frozen=True)
class Fixed:
    """The text after mending, and how many mends were made in it."""

    text: str
    num_mends: int


def fix_text(text: str, name: str = "<text>", chosen: Chosen = EVERYTHING) -> Fixed:
    """Applies every safe mend. Raises SyntaxError for a text that is not Python; notebooks are not mended."""
    done = 0
    for _ in range(_ROUNDS):
        source = parse_text(text, name)
        mends = [] if source is None else _compatible([mend for _, mend in find_in(source, chosen) if mend is not None])
        if source is None or not mends:
            break
        mended, count = edit_text(text, mends, source)
        if not count:
            break
        ast.parse(mended)  # a mend that breaks the program is a bug of ours: let it be seen
        text, done = mended, done + count
    return Fixed(text, done)


def read_exactly(path: Path) -> tuple[str, str]:
    """(text with its own line ends, encoding) of a Python file. Raises OSError, UnicodeDecodeError, SyntaxError (coding line)."""
    raw = path.read_bytes()
    encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
    return raw.decode(encoding), encoding


def write_exactly(path: Path, text: str, encoding: str) -> None:
    """Writes what `read_exactly` read, at once or not at all. Raises OSError."""
    beside = path.with_name(f".{path.name}.memfit")
    beside.write_bytes(text.encode(encoding))
    beside.chmod(path.stat().st_mode)
    beside.replace(path)


def diff(before: str, after: str, name: str) -> str:
    """A unified diff that `patch` and `git apply` take."""
    lines = difflib.unified_diff(before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/{name}", f"b/{name}")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _compatible(mends: Sequence[Mend]) -> list[Mend]:
    """Without the mends that another one makes needless: inside a no_grad block nothing has a graph to detach."""
    wrapped = [mend.node for mend in mends if mend.kind == "wrap"]
    inside = {node for loop in wrapped for node in ast.walk(loop) if node is not loop}
    kept: list[Mend] = []
    for mend in mends:
        if mend.node in inside and mend.kind in ("call", "wrap") and mend.text != "clone":
            continue
        if not any(other.kind == mend.kind and other.node is mend.node and other.text == mend.text for other in kept):
            kept.append(mend)
    return kept


def edit_text(text: str, mends: Sequence[Mend], source: Source) -> tuple[str, int]:
    """The text of the source with the mends, and how many of them could be made."""
    wrapper = MetadataWrapper(cst.parse_module(text), unsafe_skip_copy=True)
    editor = _Editor(mends, source)
    return wrapper.visit(editor).code, editor.num_mends


def smallest_with_graph(node: ast.expr) -> ast.expr:
    """`loss` of `loss / 8`: where one operand is a number, `.detach()` reads better on the other."""
    while isinstance(node, ast.BinOp):
        plain = [_is_number(node.left), _is_number(node.right)]
        if plain == [False, True]:
            node = node.left
        elif plain == [True, False]:
            node = node.right
        else:
            break
    return node


def _is_number(node: ast.expr) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "len":
        return True
    return isinstance(node, ast.Constant) and isinstance(node.value, (int, float))


class _Editor(cst.CSTTransformer):
    """Finds the nodes of the mends by their places and changes them."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, mends: Sequence[Mend], source: Source) -> None:
        super().__init__()
        self.num_mends = 0
        self._source = source
        self._calls = {self._key(smallest_with_graph(mend.node)): mend for mend in mends if mend.kind == "call"}  # type: ignore[arg-type]
        self._keywords = {self._key(mend.node): mend for mend in mends if mend.kind == "keyword"}
        self._deletes: dict[tuple[int, int], list[str]] = {}
        self._wraps: dict[tuple[int, int], str] = {}
        self._moves: dict[tuple[int, int], tuple[int, int]] = {}
        for mend in mends:
            start = self._key(mend.node)[:2]
            if mend.kind == "delete":
                self._deletes.setdefault(start, []).append(mend.text)
            elif mend.kind == "wrap":
                self._wraps[start] = mend.text
            elif mend.kind == "move" and mend.target is not None:
                self._moves[start] = self._key(mend.target)[:2]

    def _key(self, node: ast.AST) -> tuple[int, int, int, int]:
        """Start and end as libcst counts them: lines from 1, columns in characters from 0."""
        line, end = node.lineno, node.end_lineno  # type: ignore[attr-defined]
        column = self._source.column(line, node.col_offset) - 1  # type: ignore[attr-defined]
        return line, column, end, self._source.column(end, node.end_col_offset) - 1  # type: ignore[attr-defined]

    def _range(self, node: cst.CSTNode) -> tuple[int, int, int, int]:
        place = self.get_metadata(PositionProvider, node)
        assert isinstance(place, CodeRange)
        return place.start.line, place.start.column, place.end.line, place.end.column

    def on_leave(self, original_node: cst.CSTNode, updated_node: cst.CSTNode) -> cst.CSTNode:  # type: ignore[override]
        """Expressions: a call appended, a keyword given."""
        updated = super().on_leave(original_node, updated_node)
        if not isinstance(updated, cst.BaseExpression):
            return updated  # type: ignore[return-value]
        if (self._calls or self._keywords) and isinstance(original_node, cst.BaseExpression):
            key = self._range(original_node)
            if (mend := self._calls.pop(key, None)) is not None:
                self.num_mends += 1
                return cst.Call(cst.Attribute(_as_primary(updated), cst.Name(mend.text)))
            if key in self._keywords and isinstance(updated, cst.Call):
                mend = self._keywords.pop(key)
                self.num_mends += 1
                return _with_keyword(updated, mend.text)
        return updated

    def leave_For(self, original_node: cst.For, updated_node: cst.For) -> cst.BaseStatement:  # noqa: N802
        return self._wrapped(original_node, updated_node)

    def leave_While(self, original_node: cst.While, updated_node: cst.While) -> cst.BaseStatement:  # noqa: N802
        return self._wrapped(original_node, updated_node)

    def _wrapped(self, original: cst.For | cst.While, updated: cst.For | cst.While) -> cst.BaseStatement:
        manager = self._wraps.pop(self._range(original)[:2], None)
        if manager is None:
            return updated
        self.num_mends += 1
        return cst.With(
            items=[cst.WithItem(cst.parse_expression(manager))],
            body=cst.IndentedBlock([updated.with_changes(leading_lines=())]),
            leading_lines=updated.leading_lines,
        )

    def leave_Module(self, original_node: cst.Module, updated_node: cst.Module) -> cst.Module:  # noqa: N802
        return updated_node.with_changes(body=self._block(original_node.body, updated_node.body))

    def leave_IndentedBlock(  # noqa: N802
        self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock
    ) -> cst.IndentedBlock:
        return updated_node.with_changes(body=self._block(original_node.body, updated_node.body))

    def _block(self, originals: Sequence[cst.CSTNode], updated: Sequence[cst.CSTNode]) -> list[cst.CSTNode]:
        """Statements: moved before another one of the block, or followed by a `del`."""
        if len(originals) != len(updated) or not (self._deletes or self._moves):
            return list(updated)
        starts = [self._range(node)[:2] for node in originals]
        moved: dict[tuple[int, int], cst.CSTNode] = {}
        for start, node in zip(starts, updated, strict=True):
            target = self._moves.get(start)
            if target in starts and _is_alone(node):
                moved[target] = node
                del self._moves[start]
                self.num_mends += 1
        leaving = list(moved.values())
        result: list[cst.CSTNode] = []
        for start, node in zip(starts, updated, strict=True):
            if any(node is gone for gone in leaving):
                continue
            if start in moved:
                result.append(moved[start])
            result.append(node)
            if start in self._deletes and _is_alone(node):
                names = self._deletes.pop(start)
                self.num_mends += len(names)
                result.append(cst.parse_statement(f"del {', '.join(names)}"))
        return result


def _is_alone(node: cst.CSTNode) -> bool:
    """Whether the line holds one statement, and not several with `;`."""
    return isinstance(node, cst.SimpleStatementLine) and len(node.body) == 1


def _as_primary(node: cst.BaseExpression) -> cst.BaseExpression:
    """The expression as something one can put `.detach()` behind."""
    plain = (cst.Name, cst.Attribute, cst.Call, cst.Subscript)
    if isinstance(node, plain) or node.lpar:
        return node
    return node.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])


def _with_keyword(call: cst.Call, text: str) -> cst.Call:
    name, _, value = text.partition("=")
    argument = cst.Arg(
        cst.parse_expression(value),
        keyword=cst.Name(name),
        equal=cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace("")),
    )
    args = list(call.args)
    if not args:
        return call.with_changes(args=[argument])
    trailing = args[-1].comma
    between: cst.BaseParenthesizableWhitespace = cst.SimpleWhitespace(" ")
    if not isinstance(trailing, cst.MaybeSentinel):  # one argument a line, with a comma after the last
        argument = argument.with_changes(comma=trailing)
        comma = args[-2].comma if len(args) > 1 else None
        between = comma.whitespace_after if isinstance(comma, cst.Comma) else call.whitespace_before_args
    args[-1] = args[-1].with_changes(comma=cst.Comma(whitespace_after=between))
    return call.with_changes(args=[*args, argument])
