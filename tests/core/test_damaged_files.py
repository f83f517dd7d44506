"""A trace or plan file changed at random is read as what it says, or refused in a sentence: never another error."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest

from core.test_plan_file import PLAN
from core.test_trace_file import TRACE
from memfit.core.errors import PlanError, TraceError
from memfit.core.plan import Plan
from memfit.core.replay import replay
from memfit.core.trace import Trace

FOREIGN = [None, True, -2, -1, 0, 7, 10**30, 2.5, float("nan"), float("inf"), "", "text", [], [0], {}, {"rows": []}]


def _places(data: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in nested JSON data."""
    keys = list(data) if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ()
    return [(data, key) for key in keys] + [place for key in keys for place in _places(data[key])]


def _damage(data: Any, chance: random.Random) -> None:
    """One random change: a value replaced, removed, doubled or exchanged with another."""
    container, key = chance.choice(_places(data))
    other, other_key = chance.choice(_places(data))
    kind = chance.choice(["replace", "replace", "remove", "double", "exchange"])
    if kind == "replace":
        container[key] = copy.deepcopy(chance.choice(FOREIGN))
    elif kind == "remove":
        del container[key]
    elif kind == "double" and isinstance(container, list):
        container.append(copy.deepcopy(container[key]))
    elif kind == "exchange":
        container[key] = copy.deepcopy(other[other_key])


@pytest.mark.parametrize(("whole", "error"), [(TRACE, TraceError), (PLAN, PlanError)], ids=["trace", "plan"])
def test_a_thousand_damaged_files_are_read_or_refused(whole: Trace | Plan, error: type[Exception], tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    whole.save(path)
    intact = json.loads(path.read_text())
    chance = random.Random(0)
    num_read = num_refused = 0
    for _ in range(1000):
        data = copy.deepcopy(intact)
        for _ in range(chance.randint(1, 3)):
            _damage(data, chance)
        path.write_text(json.dumps(data))
        refusal = ""
        try:
            found = type(whole).load(path)
        except error as caught:
            refusal = str(caught)
        if refusal:
            assert str(path) in refusal
            assert "`memfit " in refusal
            num_refused += 1
        else:
            if isinstance(found, Trace):
                replay(found)  # what has been read can be worked with
            found.save(path)
            num_read += 1
    assert num_read > 50
    assert num_refused > 500


@pytest.mark.parametrize(("whole", "error"), [(TRACE, TraceError), (PLAN, PlanError)], ids=["trace", "plan"])
def test_a_file_cut_short_or_of_deep_brackets_is_not_json(whole: Trace | Plan, error: type[Exception], tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    whole.save(path)
    text = path.read_text()
    for content in (text[: len(text) // 2], "[" * 100_000, '{"a":' * 100_000):
        path.write_text(content)
        with pytest.raises(error, match="is not JSON"):
            type(whole).load(path)


@pytest.mark.parametrize(
    ("table", "column", "value", "words"),
    [
        ("storages", "nbytes", 2.5, "nbytes is 2.5, not a whole number in range"),
        ("storages", "nbytes", True, "nbytes is True, not a whole number in range"),
        ("storages", "kind", "weights", "storage 0 has 400 bytes of kind 'weights'"),
        ("storages", "persistent", 1, "persistent is 1, not true or false"),
        ("cells", "storage", 2, "2 where an index below 2 stands"),
        ("cells", "previous", 0, "0 where an index below 0 stands"),
        ("handles", "cell", -1, "-1 where an index below 2 stands"),
        ("calls", "place", "linear", "call 0 has the place 'linear'"),
        ("calls", "seconds", float("nan"), "seconds is nan, not a finite number"),
        ("calls", "inputs", [1], "0 where an index below 0 stands"),
        ("calls", "outputs", [0], "call 0 has the output 0, which is not its own"),
    ],
)
def test_a_wrong_value_in_a_table_is_named(table: str, column: str, value: Any, words: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    TRACE.save(path)
    data = json.loads(path.read_text())
    data[table]["rows"][0][data[table]["columns"].index(column)] = value
    path.write_text(json.dumps(data))
    with pytest.raises(TraceError) as caught:
        Trace.load(path)
    assert words in str(caught.value)


@pytest.mark.parametrize("event", [[0, 2], [2, 1], [5, 1], [8, 5], [-1, 0], [True, 0]])
def test_an_event_on_nothing_is_refused(event: list[int], tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    TRACE.save(path)
    data = json.loads(path.read_text())
    data["events"].append(event)
    path.write_text(json.dumps(data))
    with pytest.raises(TraceError, match=r"where an index below \d+ stands"):
        Trace.load(path)


def test_a_plan_whose_keys_name_no_call_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    PLAN.save(path)
    path.write_text(path.read_text().replace("0|layer.0#0/1:dropout|in0", "layer.0.dropout|in0"))
    with pytest.raises(PlanError, match=r"'layer\.0\.dropout' is no place of a call"):
        Plan.load(path)
