"""The proof of a fix: the program again from a mended copy, watched. It must not grow, and must compute the same bit for bit.

A mend that may change results (`mending`) stays only if the copy computes what the program did. Where they differ, the program runs once
more as it is: if even that differs, nothing can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from memfit.core.growth import GrowthReport
from memfit.core.proof import Compared, Proof
from memfit.diagnosis.mending import mend_growth


@dataclass(frozen=True)
class Ran:
    """One run. report: None where it gave none, and `problem` says why. outputs, gradients: see values.ValueLog.

    exception: the name of the one that ended it, '' for none and for SystemExit.
    """

    report: GrowthReport | None
    outputs: tuple[int, ...] = ()
    gradients: tuple[int, ...] = ()
    exception: str = ""
    exit_code: int = 0
    problem: str = ""

    def computes_as(self, other: Ran) -> bool:
        """Whether both computed the same and got to the same end. Exit codes are the program's own words: it may have measured itself."""
        mine = (self.outputs, self.gradients, self.exception)
        return mine == (other.outputs, other.gradients, other.exception)


def prove(first: Ran, run: Callable[[Mapping[str, str]], Ran]) -> Proof:
    """first: the program as it is. run: the program again, with these texts by absolute path in place of its files'."""
    assert first.report is not None
    growths = [each for each in first.report.growths if each.is_material]
    rejected: list[str] = []
    for only_safe in (False, True):
        mended, unmended = mend_growth(growths, only_safe=only_safe)
        if not mended:
            break
        copy = run({each.path: each.text for each in mended})
        is_equal: bool | None = copy.computes_as(first)
        if not is_equal and not run({}).computes_as(first):
            is_equal = None
        if is_equal is False and any(each.num_tried for each in mended):
            rejected += [each.diff for each in mended if each.num_tried]
            continue
        compared = Compared(len(copy.outputs), len(copy.gradients), is_equal)
        return Proof(first.report, mended, unmended, tuple(rejected), copy.report, compared, copy.problem, copy.exit_code)
    return Proof(first.report, (), unmended, tuple(rejected))
