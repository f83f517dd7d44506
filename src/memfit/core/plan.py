"""Plan: the moves chosen for a budget, with what they are predicted to do, and why. A readable file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from memfit.core.errors import PlanError, PrecisionError
from memfit.core.fields import make_row
from memfit.core.precision import LEVELS, Choice
from memfit.core.trace import PLACE, load_json

FORMAT = "memfit-plan"
VERSION = 1

BITWISE, REORDERED, APPROXIMATE = EXACTNESS = ("bitwise", "reordered", "approximate")


@dataclass(frozen=True)
class Move:
    """One technique at one place.

    technique: its name, e.g. 'recompute'. place: for people, e.g. 'bert.encoder.layer.3'.
    evict: keys of the cells that leave after they were saved and come back in backward.
    pin: keys of cells kept although autograd did not save them, because what is evicted is computed from them.
        A key is '<call place>|<position>' (see trace.Call and trace.Cell).
    saved_bytes: bytes of the evicted storages less the pinned ones. seconds: what bringing them back costs.
    reason: one sentence for the reader.
    calls: places of the calls that are replayed to bring the evicted cells back; only these are recorded under the plan.
    keep: keys of cells those calls make that stay because autograd saved them and the plan does not evict them.
    transient: keys of cells that come back for one reader at a time: a replay that passes one keeps it for nobody else.
    """

    technique: str
    place: str
    evict: tuple[str, ...]
    pin: tuple[str, ...] = ()
    saved_bytes: int = 0
    seconds: float = 0.0
    reason: str = ""
    calls: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    transient: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """The moves for a budget. All peaks are of the whole step, in bytes.

    eager_peak_bytes: peak of the step as the program has it. predicted_peak_bytes: with the moves.
    floor_bytes: the smallest budget the planner can serve. extra_seconds: predicted cost a step;
    lower_bound_seconds: no plan in the planner's search space costs less. eager_seconds: the step as the program has it.
    untouched: invocations ('section|module path#invocation') of modules with planned calls in which nothing is planned.
    precision: what the step is to train in, like 'O1 bfloat16'; '' for the program's own precision.
    peak_phase: phase of the eager peak. signature: which program this is for (see Trace.meta['signature']).
    """

    budget_bytes: int
    eager_peak_bytes: int
    predicted_peak_bytes: int
    floor_bytes: int
    moves: tuple[Move, ...] = ()
    extra_seconds: float = 0.0
    lower_bound_seconds: float = 0.0
    eager_seconds: float = 0.0
    peak_phase: str = ""
    device: str = "cpu"
    solver: str = ""
    signature: str = ""
    notes: tuple[str, ...] = ()
    untouched: tuple[str, ...] = ()
    precision: str = ""
    meta: dict[str, Any] = field(default_factory=dict)

    def save(self, path: str | Path) -> None:
        """Write the plan as indented JSON that a person can read."""
        data = {"format": FORMAT, "version": VERSION, **asdict(self)}
        Path(path).write_text(json.dumps(data, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan written by `save`. Raises PlanError for a missing, broken, foreign or newer file."""
        remedy = "Make one with `memfit plan trace.json --budget SIZE -o plan.json`."
        data = load_json(path, FORMAT, VERSION, PlanError, remedy)
        del data["format"], data["version"]
        try:
            moves = tuple(make_row(Move, row) for row in data.pop("moves"))
            plan = make_row(cls, {"notes": data.pop("notes"), "moves": [], **data})
            for place in (
                place
                for move in moves
                for place in (*move.calls, *map(_place_of, move.evict + move.pin + move.keep + move.transient))
            ):
                if not PLACE.fullmatch(place):
                    raise ValueError(f"{place!r:.80} is no place of a call")
            for name in plan.untouched:
                if not PLACE.fullmatch(f"{name}/0:"):
                    raise ValueError(f"{name!r:.80} is no invocation of a module")
            if plan.precision:
                Choice.of_label(plan.precision)
            return replace(plan, moves=moves)
        except (KeyError, TypeError, AttributeError, ValueError, PrecisionError) as error:
            raise PlanError(f"{path} is a damaged plan: {error} while reading it. {remedy}") from error


def _place_of(key: str) -> str:
    return key.rpartition("|")[0]


def precision_for(plan: Plan | None, asked: Choice | None, allow: str) -> Choice | None:
    """What to train in: what was asked for, or what the plan was made for. Raises PlanError where they differ, or nobody allowed it."""
    if plan is None or (not plan.precision and asked is None):
        return asked
    made_for = Choice.of_label(plan.precision) if plan.precision else None
    if asked is None and allow == APPROXIMATE:
        return made_for
    if asked is not None and asked.level == (made_for.level if made_for is not None else LEVELS["O0"]):
        return asked
    own = "the program's own precision"
    wanted = asked.level.name if asked is not None else own
    remedy = "Give --allow approximate to train in it" if asked is None else f"Make one from a trace in {wanted}"
    raise PlanError(
        f"The plan was made for a step in {plan.precision or own} and this run is to train in {wanted}, so every size in it would be wrong. {remedy}, or "
        "leave the plan out."
    )
