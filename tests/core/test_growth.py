"""Growth told from plateaus by the shape of the samples alone."""

from __future__ import annotations

import json

import pytest

from memfit.core import growth as core
from memfit.core import growth_file
from memfit.core.growth import Growth, GrowthReport, Rise, Sample, judge


def samples(counts, size=100):
    return [Sample(number, count, count * size) for number, count in enumerate(counts, start=1)]


def test_a_tensor_more_each_step_is_a_rise_of_its_bytes():
    assert judge(samples([1, 2, 3, 4, 5, 6]), is_own_input=False) == Rise(100.0, 1.0, 6)


def test_three_samples_are_enough_and_two_are_not():
    assert judge(samples([1, 2, 3]), is_own_input=False) == Rise(100.0, 1.0, 3)
    assert judge(samples([1, 2]), is_own_input=False) is None


@pytest.mark.parametrize(
    "counts",
    [
        [4, 4, 4, 4, 4],  # there from the start
        [0, 4, 4, 4, 4],  # an optimizer's state
        [1, 2, 3, 4, 4, 4, 4, 4, 4],  # a queue that is full after four steps
        [1, 2, 3, 1, 2, 3, 1, 2, 3],  # emptied every third step
        [5, 4, 3, 2, 1],
        [1, 1, 1, 1, 1, 1, 1, 1, 2],  # one more, at the end
    ],
)
def test_what_has_settled_is_no_rise(counts):
    assert judge(samples(counts), is_own_input=False) is None


def test_one_tensor_that_grows_out_of_itself_rises_and_one_made_for_a_longer_batch_does_not():
    longer = [Sample(number, 1, 100 * number) for number in range(1, 7)]
    assert judge(longer, is_own_input=True) == Rise(100.0, 0.0, 6)
    assert judge(longer, is_own_input=False) is None


def test_a_tensor_every_tenth_step_is_a_rise_of_a_tenth():
    counts = [step // 10 for step in range(1, 61)]
    rise = judge(samples(counts), is_own_input=False)
    assert rise is not None
    assert rise.bytes_per_step == pytest.approx(10.0, rel=0.05)


def test_small_results_without_a_graph_are_no_finding_and_graphs_always_are():
    assert not Growth(core.CONTAINER, "a.py", 1, num_bytes=1000, share=0.01).is_material
    assert Growth(core.CONTAINER, "a.py", 1, num_bytes=1000, share=0.03).is_material
    assert Growth(core.CONTAINER, "a.py", 1, num_bytes=1000, share=0.01, is_attached=True).is_material
    assert Growth(core.GRAPH, "a.py", 1, num_bytes=0, nodes_per_step=8).is_material
    assert not Growth(core.CONTAINER, "a.py", 1, num_bytes=8, share=0.5, is_attached=True).is_material


def test_graph_nodes_without_tensors_are_not_told_as_bytes():
    growth = Growth(core.GRAPH, "a.py", 7, num_bytes=0, nodes_per_step=8, chain="`total` in train()")
    finding = core.to_finding(growth)
    assert finding.num_bytes == 0
    assert finding.message == (
        "0 tensor bytes but 8 graph nodes a step (host memory) grow, held by `total` in train(): backward() has freed what they saved."
    )


def test_a_view_is_mended_by_a_copy_and_not_by_detach():
    growth = Growth(core.CONTAINER, "a.py", 7, num_bytes=102400, used_bytes=2048)
    assert core.to_finding(growth).remedy == (
        "The views kept show 2.00 KiB a step of it: keep a copy, `.clone()`. detach() does not help."
    )


def test_the_budget_is_full_after_what_is_left_of_it_divided_by_the_growth():
    growth = Growth(core.CONTAINER, "a.py", 7, num_bytes=1000)
    assert GrowthReport("a.py", (growth,), live_bytes=5000, budget_bytes=25_000).steps_left == 20
    assert GrowthReport("a.py", (), live_bytes=5000, budget_bytes=25_000).steps_left is None
    assert GrowthReport("a.py", (growth,)).steps_left is None


def test_a_saved_report_has_its_findings_and_is_read_again_as_it_was(tmp_path):
    made_at = (("a.py:2", "Linear", 4096),)
    growth = Growth(core.CYCLE, "a.py", 3, num_bytes=4096, chain="Step.me -> the same Step", made_at=made_at)
    peaks = core.StepPeaks(1, 10, 5, 80, 9)
    report = GrowthReport("a.py", (growth,), (("a.py:1", 5),), num_steps=9, peaks=peaks, messages=("A note.",))
    growth_file.save(report, tmp_path / "report.json")
    assert growth_file.load(tmp_path / "report.json") == report
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match="is no growth report"):
        growth_file.load(tmp_path / "other.json")
    document = json.loads((tmp_path / "report.json").read_text())
    assert (document["format"], document["num_steps"]) == ("memfit-growth", 9)
    assert [(each["code"], each["line"], each["num_bytes"]) for each in document["findings"]] == [("MF134", 3, 4096)]
