"""A plan survives its file; a file that is none is refused in a sentence with the remedy."""

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from memfit.core.errors import PlanError
from memfit.core.plan import Move, Plan

PLAN = Plan(
    budget_bytes=3000,
    eager_peak_bytes=4000,
    predicted_peak_bytes=2990,
    floor_bytes=1000,
    moves=(
        Move("recompute", "layer.0", ("0|layer.0#0/1:dropout|in0",), ("0|layer.0#0/0:linear|out0",), 64, 0.25, "cheap"),
        Move("recompute", "layer.1", ()),
    ),
    extra_seconds=0.25,
    lower_bound_seconds=0.2,
    eager_seconds=4.0,
    peak_phase="backward",
    solver="sweep",
    signature="abc",
    notes=("one", "two"),
    meta={"torch": "2.13.0"},
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "plan.json"


def damage(path, change):
    """Save PLAN, and change its data before it is read again."""
    PLAN.save(path)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


@pytest.mark.parametrize("plan", [PLAN, Plan(1, 1, 1, 1)])
def test_a_plan_comes_back_equal_from_its_file(plan, path):
    plan.save(path)
    assert Plan.load(path) == plan


def test_a_plan_file_is_indented_for_people(path):
    PLAN.save(path)
    assert path.read_text().startswith('{\n "format": "memfit-plan",\n "version": 1,\n "budget_bytes": 3000,\n')


def test_a_missing_plan_is_refused_with_the_remedy(path):
    with pytest.raises(PlanError, match=r"plan\.json cannot be read: No such file.*memfit plan trace\.json --budget SIZE"):
        Plan.load(path)


def test_a_trace_is_no_plan(path):
    path.write_text('{"format": "memfit-trace", "version": 1}')
    with pytest.raises(PlanError, match="is no memfit-plan file: its format is 'memfit-trace'"):
        Plan.load(path)


def test_a_newer_plan_is_refused_by_number(path):
    damage(path, lambda data: data.update(version=7))
    with pytest.raises(PlanError, match="has version 7 of memfit-plan"):
        Plan.load(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.pop("moves"),
        lambda data: data.pop("notes"),
        lambda data: data.pop("budget_bytes"),
        lambda data: data.update(colour="red"),
        lambda data: data["moves"][0].pop("evict"),
        lambda data: data["moves"][0].update(colour="red"),
        lambda data: data.update(moves=3),
        lambda data: data.update(moves=["recompute"]),
    ],
)
def test_a_damaged_plan_is_refused_with_the_remedy(change, path):
    damage(path, change)
    with pytest.raises(PlanError, match=r"is a damaged plan: .*Make one with `memfit plan"):
        Plan.load(path)


def test_every_field_is_documented():
    text = (Path(__file__).parents[2] / "docs" / "trace.md").read_text()
    documented = set(re.findall(r"`(\w+)`", text))
    assert {f.name for row in (Plan, Move) for f in fields(row)} - documented == set()
