"""Changing the nodes of a source with libcst, so that formatting and comments stay."""

from __future__ import annotations

import ast
from collections.abc import Sequence

import libcst as cst
from libcst.metadata import CodeRange, MetadataWrapper, PositionProvider

from memfit.diagnosis.lints.report import Mend
from memfit.diagnosis.lints.source import Source


def edit_text(text: str, mends: Sequence[Mend], source: Source, first_line: int = 1) -> tuple[str, list[Mend]]:
    """The text with the mends, and those that could be made. The text is the source's, from its line `first_line` on."""
    wrapper = MetadataWrapper(cst.parse_module(text), unsafe_skip_copy=True)
    editor = _Editor(mends, source, first_line)
    return wrapper.visit(editor).code, editor.made


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

    def __init__(self, mends: Sequence[Mend], source: Source, first_line: int) -> None:
        super().__init__()
        self.made: list[Mend] = []
        self._source = source
        self._first_line = first_line
        self._calls = {self._key(smallest_with_graph(mend.node)): mend for mend in mends if mend.kind == "call"}  # type: ignore[arg-type]
        self._keywords = {self._key(mend.node): mend for mend in mends if mend.kind == "keyword"}
        self._deletes: dict[tuple[int, int], list[Mend]] = {}
        self._wraps: dict[tuple[int, int], Mend] = {}
        self._moves: dict[tuple[int, int], Mend] = {}
        for mend in mends:
            start = self._key(mend.node)[:2]
            if mend.kind == "delete":
                self._deletes.setdefault(start, []).append(mend)
            elif mend.kind == "wrap":
                self._wraps[start] = mend
            elif mend.kind == "move":
                self._moves[start] = mend

    def _key(self, node: ast.AST) -> tuple[int, int, int, int]:
        """Start and end as libcst counts them: lines from 1, columns in characters from 0."""
        line, end = node.lineno, node.end_lineno  # type: ignore[attr-defined]
        column = self._source.column(line, node.col_offset) - 1  # type: ignore[attr-defined]
        end_column = self._source.column(end, node.end_col_offset) - 1  # type: ignore[attr-defined]
        return line - self._first_line + 1, column, end - self._first_line + 1, end_column

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
                self.made.append(mend)
                return cst.Call(cst.Attribute(_as_primary(updated), cst.Name(mend.text)))
            if key in self._keywords and isinstance(updated, cst.Call):
                mend = self._keywords.pop(key)
                self.made.append(mend)
                return _with_keyword(updated, mend.text)
        return updated

    def leave_For(self, original_node: cst.For, updated_node: cst.For) -> cst.BaseStatement:  # noqa: N802
        return self._wrapped(original_node, updated_node)

    def leave_While(self, original_node: cst.While, updated_node: cst.While) -> cst.BaseStatement:  # noqa: N802
        return self._wrapped(original_node, updated_node)

    def _wrapped(self, original: cst.For | cst.While, updated: cst.For | cst.While) -> cst.BaseStatement:
        mend = self._wraps.pop(self._range(original)[:2], None)
        if mend is None:
            return updated
        self.made.append(mend)
        return cst.With(
            items=[cst.WithItem(cst.parse_expression(mend.text))],
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
            mend = self._moves.get(start)
            if mend is None or mend.target is None or not _is_alone(node):
                continue
            target = self._key(mend.target)[:2]
            if target in starts:
                moved[target] = node
                self.made.append(self._moves.pop(start))
        leaving = list(moved.values())
        result: list[cst.CSTNode] = []
        for start, node in zip(starts, updated, strict=True):
            if any(node is gone for gone in leaving):
                continue
            if start in moved:
                result.append(moved[start])
            result.append(node)
            if start in self._deletes and _is_alone(node):
                mends = self._deletes.pop(start)
                self.made += mends
                result.append(cst.parse_statement(f"del {', '.join(mend.text for mend in mends)}"))
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
