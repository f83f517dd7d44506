"""The fix of what grows, tried on a copy: what was changed in it, and how much it grows still. Pure, no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from memfit.core.growth import Growth, GrowthReport, to_finding


@dataclass(frozen=True)
class Mended:
    """One file of the copy. text: the whole of it. diff: unified, against the file.

    codes: of the static findings mended, whose mends cannot change results, num_safe of them. num_tried: other changes, which may.
    """

    path: str
    text: str
    codes: tuple[str, ...]
    num_safe: int
    num_tried: int
    diff: str


@dataclass(frozen=True)
class Compared:
    """What the program and its copy computed, by fingerprints. A number each of outputs of modules and of backward passes' gradients.

    is_equal: all of them, bit for bit; None where the program itself does not compute the same twice.
    """

    num_outputs: int
    num_gradients: int
    is_equal: bool | None


@dataclass(frozen=True)
class Proof:
    """before, after: the report of the program and of its mended copy; `after` is None where the copy was not run to a report.

    mended: the files of the copy that differ. unmended: growths for whose line no change is known.
    rejected: changes that were tried and taken back, as diffs, since results changed. compared: of the copy that was kept.
    problem: why there is no `after`, as a sentence. exit_code: of the copy.
    """

    before: GrowthReport
    mended: tuple[Mended, ...] = ()
    unmended: tuple[Growth, ...] = ()
    rejected: tuple[str, ...] = ()
    after: GrowthReport | None = None
    compared: Compared | None = None
    problem: str = ""
    exit_code: int = 0

    @property
    def is_flat(self) -> bool:
        """Whether the copy was run, and nothing in it grows."""
        return self.after is not None and not any(each.per_step for each in self.after.growths if each.is_material)


def growth_per_step(report: GrowthReport) -> tuple[int, int]:
    """(tensor bytes, graph nodes) that all findings of a report grow by in a step."""
    growing = [each for each in report.growths if each.is_material and each.per_step]
    return sum(each.num_bytes for each in growing), sum(each.nodes_per_step for each in growing)


def to_document(proof: Proof) -> dict[str, Any]:
    """For JSON: the verdict, (bytes, nodes) a step before and after, the changes as diffs, and the findings without one."""
    return {
        "is_flat": proof.is_flat,
        "compared": None if proof.compared is None else asdict(proof.compared),
        "before": growth_per_step(proof.before),
        "after": None if proof.after is None else growth_per_step(proof.after),
        "mended": [
            {"path": each.path, "codes": each.codes, "num_tried": each.num_tried, "diff": each.diff} for each in proof.mended
        ],
        "rejected": list(proof.rejected),
        "unmended": [asdict(to_finding(each)) for each in proof.unmended],
        "problem": proof.problem,
        "exit_code": proof.exit_code,
    }
