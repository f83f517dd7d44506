"""The half copies that mixed precision keeps beside float32 originals, read from a measured trace.

A trace knows no types. A copy is recognised by where it arises, saved inside a call and seen by nobody else, and by its size, half that of
a weight or an input of that call. Casts that only autocast's cache holds, and backward does not need, are not among them.
"""

from __future__ import annotations

from dataclasses import dataclass

from memfit.core.sizes import format_size
from memfit.core.trace import Trace


@dataclass(frozen=True)
class Copies:
    """Half copies that backward keeps beside float32 originals, in bytes.

    weight_bytes: of parameters. input_bytes: of other inputs. twice_bytes: of these, the originals that backward keeps as well.
    """

    weight_bytes: int
    input_bytes: int
    twice_bytes: int

    @property
    def sentence(self) -> str:
        """What autocast keeps, for the report of a run."""
        return (
            f"autocast keeps {format_size(self.weight_bytes)} of half copies of weights and {format_size(self.input_bytes)} of float32 inputs for "
            "backward; parameters, gradients and optimizer state stay float32 (memfit trace --precision compares with float32)."
        )


def find_copies(trace: Trace) -> Copies:
    """The half copies in a trace that was measured at O1."""
    saved = {trace.cells[handle.cell].storage for handle in trace.handles}
    weight_bytes = input_bytes = twice_bytes = 0
    for index, cell in enumerate(trace.cells):
        if cell.call < 0 or not cell.position.startswith("in") or cell.storage not in saved:
            continue
        nbytes = trace.storages[cell.storage].nbytes
        sources = [trace.cells[each].storage for each in trace.calls[cell.call].inputs if each != index]
        twice = [each for each in sources if trace.storages[each].nbytes == 2 * nbytes]
        if any(trace.storages[each].kind == "parameter" for each in twice):
            weight_bytes += nbytes
        elif twice:
            input_bytes += nbytes
            twice_bytes += 2 * nbytes if twice[0] in saved else 0
    return Copies(weight_bytes, input_bytes, twice_bytes)
