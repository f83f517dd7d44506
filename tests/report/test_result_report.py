"""The drawn report of a run, whole and in its parts, at 80 columns without colour."""

from dataclasses import replace

import pytest

from memfit.core.plan import Move
from memfit.core.result import Certificate, Result
from memfit.report import draw_result, draw_text
from report.examples import GIB, MIB, MOVES, RESULT


def draw(result=RESULT, **changes):
    return draw_text(draw_result(replace(result, **changes)))


def fact(label, **changes):
    """The sentence of one fact of RESULT with changes, its lines joined."""
    lines = draw(**changes).splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith(label))
    found = [lines[start][13:]]
    for line in lines[start + 1 :]:
        if not line.startswith(" " * 13):
            break
        found.append(line[13:])
    return " ".join(found)


def test_the_whole_report_of_a_run():
    assert (
        draw()
        == """\
memfit: train.py stayed within 3.00 GiB

  before  ████████████████████████████  3.91 GiB  1.25 s a step (estimate)
  after   █████████████████████         2.93 GiB  1.50 s a step, 1.20x
  budget  ██████████████████████        3.00 GiB

Peak         in backward (step 2), 97.7 % of the budget; read from the live
             storages
Prediction   peak 2.92 GiB, measured 2.93 GiB, 0.50 % higher; 1.48 s a step,
             measured 1.50 s
Equal        yes, bit for bit: 44850 evicted, 44850 restored, 450 verified in 3
             steps; 12 sources unchanged; generators equal
Steps        300 steps: 300 measured, 299 under the plan; cpu, bitwise, torch
             2.13.0, memfit 0.1.0
Note         step 1: the guard let go of 12 saved tensors under pressure.

At the peak
  kind          before      after
  parameter   1.46 GiB   1.46 GiB  ██████████████
  activation  2.44 GiB   1.44 GiB  ██████████████
  workspace        0 B  30.00 MiB  █

3 moves, in forward order
  technique  place                                          bytes  seconds
  recompute  bert.encoder.layer.0                       96.00 MiB  1.30 ms
  recompute  bert.encoder.layer.1                       64.00 MiB   900 us
  recompute  (top level)                                 1.00 MiB  1.30 us
  all        together (peaks are replayed, not summed)  161.0 MiB  2.20 ms
"""
    )


def test_a_run_that_fitted_says_that_nothing_was_changed():
    result = Result(
        budget_bytes=3 * GIB,
        peak_bytes=2 * GIB,
        peak_phase="optimizer step",
        peak_step=2,
        step_seconds=0.02,
        num_steps=2,
        num_measured_steps=2,
        program="train.py",
    )
    assert (
        draw(result)
        == """\
memfit: train.py fits into 3.00 GiB as it is; nothing was changed

  peak    ███████████████████           2.00 GiB  20.0 ms a step
  budget  ████████████████████████████  3.00 GiB

Peak         in optimizer step (step 2), 66.7 % of the budget
Equal        plain PyTorch ran, nothing to compare
Steps        2 steps: 2 measured; cpu, bitwise
"""
    )


def test_a_script_that_never_trained_is_told_so():
    assert (
        draw(Result(budget_bytes=GIB, program="hello.py"))
        == """\
memfit: hello.py made no training step, so nothing was measured

Steps        0 steps; cpu, bitwise
"""
    )


def headline(**changes):
    return draw(**changes).splitlines()[0]


def test_the_headline_says_by_how_much_a_run_went_over():
    assert headline(peak_bytes=3 * GIB + 12 * MIB) == "memfit: train.py went 12.00 MiB over the budget of 3.00 GiB"


def test_the_headline_claims_no_more_steps_than_were_measured():
    assert headline(num_measured_steps=2) == "memfit: train.py stayed within 3.00 GiB in the 2 of 300 steps that were measured"


def test_the_headline_of_a_refused_budget_says_when_it_was_refused():
    assert headline(exit_reason="budget", num_steps=0) == (
        "memfit: train.py was stopped before its first step ended: 3.00 GiB is too small"
    )
    assert headline(exit_reason="budget", num_steps=4) == "memfit: train.py was stopped in step 5: 3.00 GiB is too small"


def test_a_run_without_a_budget_is_not_over_it():
    assert headline(budget_bytes=None) == "memfit: train.py was measured without a budget"
    assert "budget" not in fact("Peak", budget_bytes=None)


@pytest.mark.parametrize(
    ("reason", "code", "error", "words"),
    [
        ("exited", 3, "", "the script ended itself with exit code 3"),
        ("exception", 1, "ValueError: no", "the script ended with an exception it did not catch: ValueError: no"),
        ("interrupted", 130, "", "interrupted (Ctrl-C)"),
        ("budget", 2, "too small", "stopped by memfit: the budget cannot be met: too small"),
        ("out of memory", 1, "", "the device ran out of memory all the same"),
        ("struck by lightning", 1, "", "struck by lightning"),
    ],
)
def test_the_report_says_why_the_run_ended(reason, code, error, words):
    assert fact("Ended", exit_reason=reason, exit_code=code, error=error) == words


def test_a_run_that_finished_says_nothing_of_its_end():
    assert "Ended" not in draw()


def test_a_mismatch_is_said_in_capitals_with_the_places():
    certificate = Certificate(5, 5, 4, 1, 2, False, True, 1, ("layer.0", "layer.3"))
    assert fact("Equal", certificate=certificate) == (
        "NO: 5 evicted, 5 restored, 4 verified in 1 step, 1 differed; 2 sources CHANGED; generators equal"
    )
    assert fact("Differed", certificate=certificate) == "layer.0, layer.3; the run was stopped"


def test_what_was_not_compared_is_not_called_equal():
    unchecked = Certificate(5, 5)
    assert fact("Equal", certificate=unchecked) == "not checked: 5 evicted, 5 restored"
    assert fact("Equal", certificate=Certificate()) == "nothing was evicted, nothing to compare"


def test_a_prediction_that_was_never_measured_says_so():
    assert fact("Prediction", planned_peak_bytes=None, predicted_step_seconds=None) == (
        "peak 2.92 GiB, no planned step was measured"
    )


@pytest.mark.parametrize(
    ("measured", "words"), [(2985 * MIB, "equal"), (2990 * MIB, "0.17 % higher"), (2900 * MIB, "2.85 % lower")]
)
def test_the_prediction_stands_beside_the_measurement(measured, words):
    assert f", {words};" in fact("Prediction", planned_peak_bytes=measured)


def test_several_messages_stand_under_one_another():
    assert "Note         one\n             two\n" in draw(messages=("one", "two"))


def test_of_many_moves_the_largest_are_shown_in_forward_order_and_the_rest_summed():
    moves = tuple(Move("recompute", f"layer.{index}", (), (), index * MIB, 0.001) for index in range(1, 6))
    text = draw_text(draw_result(replace(RESULT, moves=moves), max_moves=3))
    assert (
        text.partition("forward order\n")[2]
        == """\
  technique  place                                          bytes  seconds
  recompute  layer.4                                     4.00 MiB  1.00 ms
  recompute  layer.5                                     5.00 MiB  1.00 ms
  and        3 smaller ones (-v shows all)               6.00 MiB  3.00 ms
  all        together (peaks are replayed, not summed)  15.00 MiB  5.00 ms
"""
    )
    assert "smaller ones" not in draw_text(draw_result(replace(RESULT, moves=moves), max_moves=None))


def test_names_are_never_read_as_markup():
    moves = (replace(MOVES[0], place="stack[bold]x[/bold]:smile:"),)
    assert "stack[bold]x[/bold]:smile:" in draw(moves=moves, program="[red]train.py")
    assert headline(program="[red]train.py").startswith("memfit: [red]train.py stayed")


def test_no_line_is_longer_than_80_columns_and_no_word_of_a_long_name_is_lost():
    place = "backbone." + ".".join(f"block{number}" for number in range(20))
    text = draw(moves=(replace(MOVES[0], place=place),), messages=("x" * 200,))
    assert max(map(len, text.splitlines())) <= 80
    assert place in text.replace("\n", "").replace(" ", "").replace("96.00MiB1.30ms", "")


def test_variables_that_were_let_go_are_named_with_their_bytes_and_a_run_that_fitted_with_them_says_so():
    names = {f"`x{number}` (train.py:{number})": (9 - number) * MIB for number in range(1, 8)}
    text = draw_text(draw_result(replace(RESULT, let_go=names, moves=(), installed=False)))
    assert "fits into 3.00 GiB with dead variables let go\n" in text
    assert "Let go       `x1` (train.py:1) 8.00 MiB, `x2` (train.py:2) 7.00 MiB, `x3`" in text
    assert "and 2 more; each step, after their last use" in " ".join(text.split())
