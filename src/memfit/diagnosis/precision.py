"""What lower precision did to a step's memory, from two measured traces of it: plain, and at an opt level.

Autocast adds half copies of float32 weights, and keeps them for backward; it saves half of what matrix products and convolutions keep of their inputs.
The first does not depend on the batch and the second does, so there is a batch below which O1 costs memory. Parameters, gradients and optimizer
state stay float32 under O1 and O2.

Copies that only autocast's cache holds, and backward does not need, are in the peaks and not in the sums (core.copies).
"""

from __future__ import annotations

from dataclasses import dataclass

from memfit.core.breakdown import bytes_by
from memfit.core.copies import Copies, find_copies
from memfit.core.replay import replay
from memfit.core.sizes import format_size
from memfit.core.trace import Trace


@dataclass(frozen=True)
class Comparison:
    """The same step plain and in lower precision. Bytes; `kinds`: kind -> bytes at the two peaks.

    saved_bytes: what autograd keeps for backward, parameters not counted, in (plain, lower) precision.
    """

    peak_bytes: tuple[int, int]
    saved_bytes: tuple[int, int]
    kinds: dict[str, tuple[int, int]]
    copies: Copies

    @property
    def shrunk_bytes(self) -> int:
        """By how much everything but the weights' copies shrank: what a larger batch multiplies."""
        return self.saved_bytes[0] - (self.saved_bytes[1] - self.copies.weight_bytes)

    @property
    def break_even(self) -> float | None:
        """The multiple of this batch at which what is added equals what is saved; None where nothing is saved."""
        return self.copies.weight_bytes / self.shrunk_bytes if self.shrunk_bytes > 0 else None


def compare(plain: Trace, lower: Trace) -> Comparison:
    """Two traces of the same step, the second in lower precision."""
    results = [(trace, replay(trace)) for trace in (plain, lower)]
    by_kind = [bytes_by(trace, result, "kind") for trace, result in results]
    names = dict.fromkeys((*by_kind[0], *by_kind[1]))
    return Comparison(
        peak_bytes=(results[0][1].peak_bytes, results[1][1].peak_bytes),
        saved_bytes=(saved_bytes(plain), saved_bytes(lower)),
        kinds={name: (by_kind[0].get(name, 0), by_kind[1].get(name, 0)) for name in names},
        copies=find_copies(lower),
    )


def saved_bytes(trace: Trace) -> int:
    """Distinct storages that autograd keeps for backward, without those that outlive the step."""
    storages = {trace.cells[handle.cell].storage for handle in trace.handles}
    return sum(trace.storages[each].nbytes for each in storages if not trace.storages[each].persistent)


def describe(found: Comparison, level: str) -> list[str]:
    """The comparison in sentences: the peak, what was added and what saved, and when it pays."""
    plain, lower = found.peak_bytes
    lines = [f"{level}: peak {format_size(lower)}, {lower / plain:.2f}x of float32's {format_size(plain)}."]
    kinds = [f"{name} {format_size(was)} -> {format_size(now)}" for name, (was, now) in found.kinds.items() if was or now]
    lines.append(f"At the two peaks, float32 -> {level}: {', '.join(kinds)}.")
    unchanged = sum(
        lower_ for name, (_, lower_) in found.kinds.items() if name in ("parameter", "gradient", "optimizer state", "buffer")
    )
    lines.append(
        f"Kept for backward: {format_size(found.saved_bytes[1])} instead of {format_size(found.saved_bytes[0])}. Of it "
        f"{format_size(found.copies.weight_bytes)} are half copies of weights and {format_size(found.copies.input_bytes)} half copies of float32 inputs, "
        f"whose originals are kept as well for {format_size(found.copies.twice_bytes)}."
    )
    lines.append(f"Parameters, gradients, optimizer state and buffers hold {format_size(unchanged)} at that peak.")
    if found.copies.weight_bytes and found.break_even is not None:
        verdict = "it costs memory at this batch" if found.break_even > 1 else "it pays at this batch"
        if found.break_even <= 1 and lower >= plain:
            verdict = "less is kept for backward; the peak, which is elsewhere, does not shrink"
        lines.append(
            f"The copies of weights equal what the activations shrink by at {found.break_even:.2g} times this batch, so {verdict}."
        )
    shrunk = found.shrunk_bytes / found.saved_bytes[0] if found.saved_bytes[0] else 0.0
    if shrunk < 0.1:
        change = f"shrink by {shrunk:.1%} only" if shrunk >= 0 else f"grow by {-shrunk:.1%}"
        lines.append(
            f"Activations {change}: most are made by operations that stay in float32 (norms, exp, softmax, losses). Recomputing "
            "them (`memfit run --budget`) saves more."
        )
    return lines
