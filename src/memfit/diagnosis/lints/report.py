"""What a rule hands back, and the mends it may offer. Positions are those of the ast: lines from 1, columns in bytes from 0."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from memfit.diagnosis.lints.program import Program


@dataclass(frozen=True)
class Mend:
    """A change of the source that cannot change results.

    kind: 'call' (append `.text()` to the expression at `node`), 'delete' (put `del text` after the statement `node`), 'wrap' (put
    the statement `node` under `with text:`), 'move' (move the statement `node` before the statement `target`), 'keyword' (give
    the call `node` the keyword argument `text`).
    """

    kind: str
    node: ast.AST
    text: str = ""
    target: ast.AST | None = None


@dataclass(frozen=True)
class Report:
    """One hit of a rule: the code, where, what and why in a sentence, what to do in a sentence, and a mend if there is a safe one."""

    code: str
    node: ast.AST
    message: str
    remedy: str
    mend: Mend | None = None


Rule = Callable[[Program], Iterator[Report]]
