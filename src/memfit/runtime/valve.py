"""The valve: where a measured step under a plan would exceed the budget all the same, more is let go of than was planned.

A plan foresees the step it was made from. The next may hold more (an optimizer's history, a graph of the step before, another way
through the program), and before it is planned again it has to fit. What autograd saved goes, the earliest first since it is read last, as
long as it can be brought back from what is there; a step for which that is not enough goes over, as it would without.
"""

from __future__ import annotations

from memfit.engine.tape import Tape
from memfit.measurement.recorder import Recorder


class Valve:
    """Asked for room by the recorder, before each operation that comes near the budget."""

    def __init__(self, tape: Tape, recorder: Recorder, budget_bytes: int) -> None:
        self.num_evictions = 0
        self._tape = tape
        self._recorder = recorder
        self._budget_bytes = budget_bytes
        recorder.make_room = self.make_room
        recorder.limit_bytes = budget_bytes

    def make_room(self, nbytes: int) -> None:
        """Let go of saved tensors until `nbytes` more fit into the budget, or nothing is left that would help."""
        if self._tape.is_packing:  # in the middle of an eviction
            return
        for cell in list(self._tape.cells.values()):
            if self._recorder.ledger.live_bytes + nbytes <= self._budget_bytes:
                return
            if cell.handles and not cell.pinned and not self._recorder.rows.is_held_by_program(cell):
                self.num_evictions += self._tape.evict_cell(cell)
                self._tape.let_go_again(cell)
