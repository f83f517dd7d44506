"""Keys: how plans name cells, so that a plan found on one step can be carried out in the next, or in another run."""

from __future__ import annotations

from typing import NamedTuple

from memfit.core.errors import PlanError
from memfit.core.inplace import edit
from memfit.core.plan import Plan
from memfit.core.trace import Trace


def cell_key(trace: Trace, cell: int) -> str:
    """The cell's identity across steps as plans write it: '<call place>|<position>'. The cell must not be external."""
    found = trace.cells[cell]
    return f"{trace.calls[found.call].place}|{found.position}"


def edit_by_plan(trace: Trace, plan: Plan) -> Trace:
    """The step with the calls in place that the plan has in place: the step its keys are of. Raises PlanError as `cells_of_plan`."""
    wanted = dict.fromkeys(place for move in plan.moves if move.technique == "inplace" for place in move.calls)
    known = {call.place: index for index, call in enumerate(trace.calls) if call.in_place}
    for place in wanted:
        if place not in known:
            raise PlanError(
                f"The plan has {place!r} in place, which this trace does not have or not as a call that may be: the plan was made for another "
                "model, or the model has changed since. Make one with `memfit plan trace.json --budget SIZE`."
            )
    return edit(trace, [known[place] for place in wanted])


class Cells(NamedTuple):
    """What a plan evicts, pins and brings back for each reader anew, as `replay` takes it."""

    evict: frozenset[int] = frozenset()
    pin: frozenset[int] = frozenset()
    transient: frozenset[int] = frozenset()


def cells_of_plan(trace: Trace, plan: Plan) -> Cells:
    """The cells a plan moves in this trace (`edit_by_plan`'s, where it has calls in place). Raises PlanError if it names a cell the trace does not have."""
    known = {cell_key(trace, index): index for index, cell in enumerate(trace.cells) if cell.call >= 0}
    found: tuple[set[int], ...] = (set(), set(), set())
    for move in plan.moves:
        for keys, cells in zip((move.evict, move.pin, move.transient), found, strict=True):
            for key in keys:
                if key not in known:
                    raise PlanError(
                        f"The plan moves {key!r} at {move.place}, which this trace does not have: the plan was made "
                        "for another model, or the model has changed since. Make one with `memfit plan trace.json "
                        "--budget SIZE`."
                    )
                cells.add(known[key])
    return Cells(*map(frozenset, found))
