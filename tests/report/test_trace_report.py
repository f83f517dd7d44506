"""The drawn report of a trace, derived by replay, at 80 columns without colour."""

from dataclasses import replace

from memfit.core.finding import Finding
from memfit.core.trace import Storage, Trace
from memfit.report import draw_dead, draw_text, draw_trace
from report.examples import TRACE
from synthetic import transformer


def test_the_whole_report_of_a_trace():
    assert (
        draw_text(draw_trace(TRACE))
        == """\
memfit trace: train.py peaks at 4.48 KiB in forward

Peak         in forward, inside linear of fc, project/nets/mlp.py:9; 4.00 KiB of
             it inside one operation
Persistent   400 B live for the whole step and longer
Saved        96 B saved for backward, in 1 storage
Step         500 ms a step; 1 call; cpu
Read from    the live storages

Peak of each phase
  phase              bytes  of peak
  other              400 B    8.7 %  █
  forward         4.48 KiB  100.0 %  ████████████████
  backward           896 B   19.5 %  ███
  optimizer step     800 B   17.4 %  ███

At the peak, by kind
  kind           bytes  of peak
  parameter      400 B    8.7 %  █
  activation      96 B    2.1 %  █
  workspace   4.00 KiB   89.2 %  ██████████████

At the peak, by module
  module        bytes  of peak
  workspace  4.00 KiB   89.2 %  ██████████████
  fc            496 B   10.8 %  ██

At the peak, by line
  line                      bytes  of peak
  workspace              4.00 KiB   89.2 %  ██████████████
  project/nets/mlp.py:3     400 B    8.7 %  █
  project/nets/mlp.py:9      96 B    2.1 %  █

Largest tensors at the peak
  kind        where it was made          bytes
  parameter   fc, project/nets/mlp.py:3  400 B
  activation  fc, project/nets/mlp.py:9   96 B
"""
    )


def test_a_trace_of_nothing_is_drawn():
    assert (
        draw_text(draw_trace(Trace("cpu", (), (), (), (), ())))
        == """\
memfit trace: the step peaks at 0 B in other

Peak         in other
Persistent   0 B live for the whole step and longer
Saved        0 B saved for backward, in 0 storages
Step         time not known; 0 calls; cpu
"""
    )


def test_long_lists_end_in_one_row_for_the_rest_and_add_up_to_the_peak():
    text = draw_text(draw_trace(transformer(3), max_rows=3))
    assert text.partition("by module\n")[2].startswith("""\
  module                   bytes  of peak
  (no module)          45.33 MiB   13.6 %  ██
  encoder.layer.0.mlp  34.00 MiB   10.2 %  ██
  28 others            254.0 MiB   76.2 %  ████████████

""")


def test_lines_are_left_out_where_no_line_is_known():
    assert "by line" not in draw_text(draw_trace(transformer(1)))


def test_a_saved_parameter_is_no_saving_of_backward():
    storages = (replace(TRACE.storages[0]), replace(TRACE.storages[1], persistent=True), Storage(400, "gradient"))
    assert "0 B saved for backward" in draw_text(draw_trace(replace(TRACE, storages=storages)))


def test_a_peak_in_backward_is_inside_no_call_of_forward():
    quiet = tuple(event for event in TRACE.events if event[0] != "spike")
    assert "\nPeak         in backward\n" in draw_text(draw_trace(replace(TRACE, events=quiet)))


def test_what_is_dead_stands_with_its_bytes_its_place_and_what_to_do():
    finding = Finding(
        "/home/me/project/nets/mlp.py", 9, 1, "MF203", "`x` is dead after line 9", "`del x` after line 9.", 96, measured=True
    )
    assert (
        draw_text(draw_dead([finding], 4584, 4488))
        == """\
Dead, yet held at the peak: without it 4.38 KiB instead of 4.48 KiB
96 B         project/nets/mlp.py:9 MF203 `x` is dead after line 9. `del x` after
             line 9.
"""
    )
