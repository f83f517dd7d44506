"""The drawn report of calls in place, at 80 columns without colour: what they save, zeros included, and why not."""

from __future__ import annotations

from dataclasses import replace

from core.test_inplace import allow, leaky_chain
from memfit.core.trace import Trace
from memfit.report import draw_in_place, draw_sites, draw_text
from synthetic import Step


def mixed() -> Trace:
    """A LeakyReLU that saves a map, a sum in place that saves a temporary only, an ELU, and an own call in place for nothing."""
    step = Step()
    normed = step.call("batch_norm", [step.external(1, "input")], 2048, module="norm")
    active = step.call("leaky_relu", [normed], 2048, (normed,), module="act")
    step.release(normed)
    made = step.call("linear", [active], 1024, (active,), module="fc")
    step.release(active)
    total = step.call("add", [made], 1024, module="")
    step.release(made)
    bent = step.call("elu", [total], 1024, (total,), module="act")
    step.release(total)
    last = step.call("relu", [bent], 1024, saves_result=True, in_place=True, module="last")
    wide = step.call("conv2d", [last], 4096, (last,), module="wide")
    step.release(bent, last, wide)
    step.backward(gradients=False)
    trace = allow(step.trace(), "leaky_relu", "add")
    rounded = "in place its gradient is equal to rounding only, not bit for bit"
    return replace(
        trace, calls=tuple(replace(each, in_place=rounded) if each.function == "elu" else each for each in trace.calls)
    )


def test_the_section_of_a_traces_report_shows_zeros_too() -> None:
    section = draw_in_place(mixed())
    assert section is not None
    assert (
        draw_text(section)
        == """\
In place: 2 calls may write over their input; 2.00 KiB less at the peak, 2.00
KiB less until backward
  function    place          result  at the peak  until backward
  leaky_relu  act          2.00 KiB     2.00 KiB        2.00 KiB
  add         (not known)  1.00 KiB          0 B             0 B
Not so       1 call, see `memfit explain inplace --trace`
Own          1 call that the program runs in place (relu) saves nothing; the
             first, last, saves nothing: its result is saved anyway, by relu of
             last, and out of place its input would be gone when the call is
             over
"""
    )


def test_every_place_is_told_with_its_reason_and_can_be_asked_for() -> None:
    assert (
        draw_text(draw_sites(mixed(), "act"))
        == """\
In place: 1 call may write over its input; 2.00 KiB less at the peak, 2.00 KiB
less until backward
  function    place    result  at the peak  until backward
  leaky_relu  act    2.00 KiB     2.00 KiB        2.00 KiB

May not be in place
  function  place
  elu       act
            in place its gradient is equal to rounding only, not bit for bit
"""
    )


def test_a_trace_without_such_calls_has_no_section() -> None:
    assert draw_in_place(allow(leaky_chain())) is None
    assert draw_text(draw_sites(allow(leaky_chain()))) == (
        "In place: no call may write over its input\nNo call of this trace has an in-place form.\n"
    )
