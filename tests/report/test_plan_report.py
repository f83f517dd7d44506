"""The drawn report of a plan, at 80 columns without colour."""

from dataclasses import replace

from memfit.report import draw_plan, draw_text
from report.examples import GIB, MIB, PLAN


def test_the_whole_report_of_a_plan():
    assert (
        draw_text(draw_plan(PLAN))
        == """\
memfit plan: 3 moves to fit into 3.00 GiB, 1.20x the time

  before   ████████████████████████████  3.91 GiB  1.25 s a step
  planned  █████████████████████         2.92 GiB  1.50 s a step
  budget   ██████████████████████        3.00 GiB
  floor    ███████                       1.00 GiB  smallest feasible budget

Peak         in backward, as the program is
Prediction   2.92 GiB, 97.2 % of the budget
Cost         250 ms a step, 20.0 % of the step; no plan of this kind costs less
             than 200 ms
Note         The peak is now in the optimizer step: less memory for activations
             would save nothing more.
Made by      solver sweep, cpu

3 moves, in forward order
  technique  place                                               bytes  seconds
  recompute  bert.encoder.layer.0                            96.00 MiB  1.30 ms
             Dropout masks come back from the random state.
  recompute  bert.encoder.layer.1                            64.00 MiB   900 us
  recompute  (top level)                                      1.00 MiB  1.30 us
             What layer_norm made comes back in backward.
  all        together (peaks are replayed, not summed)       161.0 MiB  2.20 ms
"""
    )


def test_a_plan_with_nothing_to_do_says_so():
    plan = replace(
        PLAN, moves=(), eager_peak_bytes=2 * GIB, predicted_peak_bytes=2 * GIB, extra_seconds=0.0, notes=(), solver=""
    )
    assert (
        draw_text(draw_plan(plan))
        == """\
memfit plan: the step fits into 3.00 GiB as it is; nothing to do

  before  ███████████████████           2.00 GiB  1.25 s a step
  budget  ████████████████████████████  3.00 GiB
  floor   █████████                     1.00 GiB  smallest feasible budget

Peak         in backward, as the program is
Made by      cpu
"""
    )


def test_a_plan_over_its_budget_says_by_how_much():
    text = draw_text(draw_plan(replace(PLAN, predicted_peak_bytes=3 * GIB + MIB)))
    assert text.startswith("memfit plan: 1.00 MiB over the budget of 3.00 GiB\n")


def test_a_step_of_unknown_time_has_no_ratio():
    text = draw_text(draw_plan(replace(PLAN, eager_seconds=0.0)))
    assert text.startswith("memfit plan: 3 moves to fit into 3.00 GiB\n")
    assert "Cost         250 ms a step; no plan of this kind costs less than 200 ms\n" in text
