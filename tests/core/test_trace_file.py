"""A trace survives its file; a file that is none is refused in a sentence with the remedy."""

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from memfit.core.errors import TraceError
from memfit.core.trace import Call, Cell, Handle, Storage, Trace

TRACE = Trace(
    device="cpu",
    storages=(Storage(400, "parameter", "fc", "train.py:3", True), Storage(96, "activation", "fc", "train.py:9")),
    cells=(Cell(0), Cell(1, 0, "out0", -1, True)),
    handles=(Handle(1, 0),),
    calls=(Call("0|fc#0/0:linear", "linear", "fc", "train.py:9", 0.25, (0,), (1,), 16),),
    events=(
        ("alloc", 0),
        ("phase", 0),
        ("begin", 0),
        ("alloc", 1),
        ("save", 0),
        ("spike", 4096),
        ("end", 0),
        ("release", 1),
        ("phase", 2),
        ("unpack", 0),
        ("drop", 0),
    ),
    step_seconds=0.5,
    meta={"program": "train.py", "torch": "2.13.0"},
)
EMPTY = Trace("cpu", (), (), (), (), ())


@pytest.fixture
def path(tmp_path):
    return tmp_path / "trace.json"


def damage(path, change):
    """Save TRACE, and change its data before it is read again."""
    TRACE.save(path)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


@pytest.mark.parametrize("trace", [TRACE, EMPTY])
def test_a_trace_comes_back_equal_from_its_file(trace, path):
    trace.save(path)
    assert Trace.load(path) == trace


def test_tables_are_written_as_columns_and_rows(path):
    TRACE.save(path)
    data = json.loads(path.read_text())
    assert (data["format"], data["version"]) == ("memfit-trace", 1)
    assert data["storages"] == {
        "columns": ["nbytes", "kind", "module", "location", "persistent"],
        "rows": [[400, "parameter", "fc", "train.py:3", True], [96, "activation", "fc", "train.py:9", False]],
    }
    assert data["events"][:2] == [[0, 0], [8, 0]]  # alloc storage 0; phase forward


def test_a_missing_file_is_refused_with_the_remedy(path):
    with pytest.raises(TraceError, match=r"trace\.json cannot be read: No such file.*memfit trace SCRIPT -o trace\.json"):
        Trace.load(path)


@pytest.mark.parametrize("content", [b"", b"loss 0.3", b'{"format": "memfit-trace"', b"\x89PNG\xff\xfe"])
def test_what_is_not_json_is_refused(content, path):
    path.write_bytes(content)
    with pytest.raises(TraceError, match="is not JSON"):
        Trace.load(path)


@pytest.mark.parametrize("content", ["[]", "3", "null", "{}", '{"format": "memfit-plan", "version": 1}'])
def test_json_of_another_kind_is_refused(content, path):
    path.write_text(content)
    with pytest.raises(TraceError, match="is no memfit-trace file: its format is"):
        Trace.load(path)


def test_a_newer_version_is_refused_by_number(path):
    damage(path, lambda data: data.update(version=2))
    with pytest.raises(TraceError, match="has version 2 of memfit-trace; this memfit reads version 1"):
        Trace.load(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.pop("cells"),
        lambda data: data.pop("device"),
        lambda data: data["storages"]["rows"][0].pop(),
        lambda data: data["storages"]["columns"].append("colour"),
        lambda data: data["storages"].pop("rows"),
        lambda data: data["events"].append([99, 0]),
        lambda data: data["events"].append([0]),
        lambda data: data.update(calls=None),
    ],
)
def test_a_damaged_trace_is_refused_with_the_remedy(change, path):
    damage(path, change)
    with pytest.raises(TraceError, match=r"is a damaged trace: .*Take it again with `memfit trace"):
        Trace.load(path)


def test_every_field_is_documented():
    text = (Path(__file__).parents[2] / "docs" / "trace.md").read_text()
    documented = set(re.findall(r"`(\w+)`", text))
    assert {f.name for row in (Trace, Storage, Cell, Handle, Call) for f in fields(row)} - documented == set()
