"""Findings as text, JSON and annotations of GitHub."""

import json
from dataclasses import asdict

import pytest

from memfit.core.errors import MemfitError
from memfit.core.finding import Finding
from memfit.report.findings import count_findings, format_worth, render_findings

LEAK = Finding(
    "train.py",
    25,
    9,
    "MF101",
    "`total` keeps the graph of every step.",
    "Add `loss.detach()`.",
    num_bytes=20 * 1024,
    per_step=True,
    measured=True,
)
EARLIER = Finding("train.py", 3, 1, "MF902", "torch.load without map_location.")
CELL = Finding("work.ipynb:cell 4", 2, 5, "MF101", "100 % of it, kept.", "Let go.")


def test_text_is_one_line_a_finding_sorted_by_place_and_the_remedy_is_indented_below():
    assert render_findings([LEAK, EARLIER]) == (
        "train.py:3:1 MF902 torch.load without map_location.\n"
        "train.py:25:9 MF101 `total` keeps the graph of every step. [20.00 KiB a step, measured]\n"
        "    help: Add `loss.detach()`.\n"
    )


def test_text_with_a_width_is_wrapped_and_goes_on_indented():
    drawn = render_findings([LEAK], width=40)
    assert drawn.splitlines() == [
        "train.py:25:9 MF101 `total` keeps the",
        "    graph of every step. [20.00 KiB a",
        "    step, measured]",
        "    help: Add `loss.detach()`.",
    ]


def test_json_holds_every_field_and_reads_back_as_the_finding():
    (read,) = json.loads(render_findings([LEAK], "json"))
    assert read == asdict(LEAK)
    assert Finding(**read) == LEAK


def test_github_gets_one_command_a_finding_with_its_signs_escaped():
    assert render_findings([CELL, LEAK], "github").splitlines() == [
        "::warning file=train.py,line=25,col=9,title=MF101::`total` keeps the graph of every step. "
        "[20.00 KiB a step, measured]%0AAdd `loss.detach()`.",
        "::warning file=work.ipynb,title=MF101::cell 4, line 2: 100 %25 of it, kept.%0ALet go.",
    ]


def test_a_comma_in_a_path_does_not_end_the_property():
    assert "file=a%2Cb%3Ac.py," in render_findings([Finding("a,b:c.py", 1, 1, "MF101", "x")], "github")


@pytest.mark.parametrize(("style", "empty"), [("text", ""), ("json", "[]\n"), ("github", "")])
def test_no_findings_are_silence(style, empty):
    assert render_findings([], style) == empty


def test_another_format_is_refused_with_the_ones_there_are():
    with pytest.raises(MemfitError, match=r"'xml' is no format of findings\. There are text, json, github"):
        render_findings([], "xml")


def test_cells_of_one_notebook_count_as_one_file():
    other = Finding("work.ipynb:cell 5", 1, 1, "MF101", "x")
    assert count_findings([CELL, other, LEAK]) == "3 findings in 2 files"
    assert count_findings([LEAK]) == "1 finding in 1 file"


def test_worth_says_whether_it_is_once_or_each_step():
    assert format_worth(LEAK) == "20.00 KiB a step, measured"
    assert format_worth(Finding("a.py", 1, 1, "MF201", "x", num_bytes=512 * 1024, measured=True)) == (
        "512.0 KiB at the peak, measured"
    )
    assert format_worth(EARLIER) == ""
