"""The result of a run as data: what follows from its numbers, and its file."""

import json
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

from memfit.core.errors import MemfitError
from memfit.core.plan import Move
from memfit.core.result import EXIT_REASONS, Certificate, Result

RESULT = Result(
    budget_bytes=3000,
    peak_bytes=2970,
    peak_source="the live storages of every step",
    peak_phase="backward",
    peak_step=3,
    planned_peak_bytes=2970,
    eager_peak_bytes=4000,
    predicted_peak_bytes=2950,
    step_seconds=1.5,
    eager_step_seconds=1.25,
    num_steps=9,
    installed=True,
    moves=(Move("recompute", "layer.0", ("a|out0", "b|in0"), ("c|out0",), 64, 0.25, "cheap"),),
    certificate=Certificate(8, 8, 6, 0, 2, True, True, 3, ()),
    eager_bytes_by_kind={"activation": 3000},
    bytes_by_kind={"activation": 1970},
    messages=("one",),
    versions={"torch": "2.13.0"},
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "result.json"


@pytest.mark.parametrize(
    "result",
    [RESULT, Result(1), replace(RESULT, certificate=replace(RESULT.certificate, mismatched_places=("a", "b")))],
)
def test_a_result_comes_back_equal_from_its_file(result, path):
    result.save(path)
    assert Result.load(path) == result


def test_the_file_says_the_verdict_and_whether_the_budget_held(path):
    RESULT.save(path)
    data = json.loads(path.read_text())
    assert (data["format"], data["version"]) == ("memfit-result", 1)
    assert data["within_budget"] is True
    assert data["certificate"]["verdict"] == "equal"
    assert data["moves"][0]["evict"] == ["a|out0", "b|in0"]


def test_every_field_is_documented():
    text = (Path(__file__).parents[2] / "docs" / "result.md").read_text()
    documented = set(re.findall(r"`(\w+)`", text))
    wanted = {f.name for row in (Result, Certificate, Move) for f in fields(row)}
    assert wanted - documented == set()
    assert {f'"{reason}"' for reason in EXIT_REASONS} <= set(re.findall(r'"[a-z ]+"', text))


@pytest.mark.parametrize(
    ("certificate", "verdict"),
    [
        (Certificate(), "untouched"),
        (Certificate(sources_equal=True, generators_equal=True), "untouched"),
        (Certificate(5, 5), "unchecked"),
        (Certificate(5, 5, sources_equal=True, generators_equal=True), "unchecked"),  # no tensor was compared
        (Certificate(5, 5, 3, verified_steps=1), "equal"),
        (Certificate(5, 5, 3, 1, verified_steps=1), "different"),
        (Certificate(5, 5, 3, sources_equal=False), "different"),
        (Certificate(5, 5, 3, generators_equal=False), "different"),
        (Certificate(generators_equal=False), "different"),
    ],
)
def test_one_failed_comparison_makes_the_verdict_different(certificate, verdict):
    assert certificate.verdict == verdict


def test_a_peak_of_exactly_the_budget_is_within_it():
    assert replace(RESULT, peak_bytes=3000).within_budget is True
    assert replace(RESULT, peak_bytes=3001).within_budget is False
    assert replace(RESULT, peak_bytes=None).within_budget is None


def test_ratios_are_unknown_where_a_number_is():
    assert RESULT.time_ratio == 1.2
    assert RESULT.prediction_ratio == 2970 / 2950
    assert replace(RESULT, eager_step_seconds=None).time_ratio is None
    assert replace(RESULT, eager_step_seconds=0.0).time_ratio is None
    assert replace(RESULT, planned_peak_bytes=None).prediction_ratio is None


def test_a_missing_result_is_refused_with_the_remedy(path):
    with pytest.raises(MemfitError, match=r"cannot be read: No such file.*memfit run --budget SIZE --json result\.json"):
        Result.load(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data.update(format="memfit-plan"), "is no memfit-result file"),
        (lambda data: data.update(version=2), "has version 2 of memfit-result"),
        (lambda data: data.update(colour="red"), "unknown field 'colour'"),
        (lambda data: data.pop("budget_bytes"), "is damaged: .*budget_bytes"),
        (lambda data: data.update(certificate=3), "is damaged"),
        (lambda data: data["certificate"].update(colour="red"), "is damaged: .*colour"),
        (lambda data: data["moves"][0].pop("place"), "is damaged: .*place"),
        (lambda data: data.update(moves=3), "is damaged"),
    ],
)
def test_a_damaged_result_is_refused(change, words, path):
    RESULT.save(path)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(MemfitError, match=words):
        Result.load(path)
