"""The precision benchmark's table from hand-written rows: broken promises in bold, errors by their sentence, the guide's claims."""

from __future__ import annotations

import json

import torch

import precision
from benchmarks.rows import MIB, document
from precision_table import draw_claims, draw_document, draw_row


def row(variant: str, peak_mib: float, **other):
    facts = {"workload": "W1", "variant": variant, "half": "" if variant in ("float32", "O0") else "bf16", "commit": "abc"}
    sizes = {"peak_bytes": int(peak_mib * MIB), "peak_of_float32": peak_mib / 100, "lasting_bytes": 20 * MIB}
    return facts | sizes | {"cpu_time_of_float32": 0.5} | other


def test_broken_promises_stand_out() -> None:
    good = row("O1", 60, percent=100, budget_bytes=60 * MIB, equal=True, within_budget=True, no_slower=True)
    assert draw_row(good) == "| W1 | O1 at 100 % of by hand | bf16 | 60.0 | 60.0 | 0.60 | 20.0 | 0.50 | yes |"
    bad = good | {"equal": False, "within_budget": False, "no_slower": False}
    assert draw_row(bad).endswith("| 60.0 **over** | 0.60 | 20.0 | 0.50 **slower than by hand** | **NO** |")


def test_what_was_not_timed_and_what_did_not_run_have_no_numbers() -> None:
    untimed = row("O2", 60, half="fp16", cpu_time_of_float32=None)
    assert draw_row(untimed) == "| W1 | O2 | fp16 | – | 60.0 | 0.60 | 20.0 | – |  |"
    refused = {"workload": "W1", "variant": "O2", "half": "bf16", "error": "PrecisionError: O2 runs the whole in half."}
    assert draw_row(refused) == "| W1 | O2 | bf16 | – | – | – | – | – | not run: O2 runs the whole in half. |"


def test_the_claims_are_read_from_the_rows_of_o1_alone(tmp_path) -> None:
    rows = [row("float32", 100), row("O1", 60), row("O1", 45, percent=75), row("O1", 55, half="fp16")]
    claims = draw_claims(rows, tmp_path)
    assert '| in-place modules save "a little" of the peak | not measured here |' in claims
    assert '| O1 saves "about half" of the peak (bf16) | W1 40% |' in claims
    assert '| O1 saves "about half" of the peak (fp16) | W1 45% |' in claims
    assert claims[-1].endswith("under O1 | W1 20.0 MiB of 20.0 in float32 |")
    in_place = {"workload": "W3", "variant": "LeakyReLU(0.1)", "predicted_bytes": 30 * MIB, "peak_bytes": 100 * MIB}
    (tmp_path / "inplace.json").write_text(
        json.dumps({"rows": [in_place, in_place | {"workload": "W4", "predicted_bytes": 0}]})
    )
    found = "W3 LeakyReLU(0.1) 30.0%, W4 LeakyReLU(0.1) 0.0% ([inplace.md](inplace.md))"
    assert f'| in-place modules save "a little" of the peak | {found} |' in draw_claims(rows, tmp_path)


def test_the_document_names_the_commit_of_each_row(tmp_path) -> None:
    rows = [row("float32", 100), row("O1", 60), row("O1", 60, commit="def")]
    assert "commit abc, def;" in draw_document(document(*rows) | {"convergence": []}, tmp_path)


def test_by_hand_and_o1_leave_the_same_bits_and_float32_others() -> None:
    threads = torch.get_num_threads()
    variants = ("float32", "by hand", "O1")
    plain, by_hand, level = (precision.measure("BERT-micro 2x16", variant, "bf16", None, 0) for variant in variants)
    torch.set_num_threads(threads)
    assert level["digest"] == by_hand["digest"] != plain["digest"]
    assert plain["lasting_bytes"] == level["lasting_bytes"] < plain["peak_bytes"]
    assert "cpu_seconds" not in level
    assert not torch.is_autocast_enabled("cpu")


def test_what_a_process_of_its_own_raises_is_a_row_with_the_error() -> None:
    assert precision.run_apart(precision.find_workload, ("W9",), 100) == {"error": "KeyError: 'W9'"}


def test_rows_replace_those_of_the_same_workload_and_half_and_the_others_stay(tmp_path) -> None:
    path = tmp_path / "out.json"
    path.write_text(
        json.dumps(
            {
                "commit": "old",
                "rows": [row("O1", 90), row("O1", 80, half="fp16"), row("O1", 70, workload="W2")],
                "convergence": [],
            }
        )
    )
    precision.write(path, [row("O1", 60)], [])
    document = json.loads(path.read_text())
    assert [(each["workload"], each["half"], each["peak_bytes"] // MIB) for each in document["rows"]] == [
        ("W1", "fp16", 80), ("W1", "bf16", 60), ("W2", "bf16", 70)
    ]  # fmt: skip
    assert document["rows"][2]["commit"] == "abc"
    assert "| W1 | O1 | fp16 |" in path.with_suffix(".md").read_text()
