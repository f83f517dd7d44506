"""`memfit leaks` on a folder of small programs with known answers: what it finds, misses and reports for nothing.

    python benchmarks/leaks.py CASES_DIR [-o results/leaks.json] [--only 001,002]

CASES_DIR holds `expected.json`: {"cases": [{"file", "id", "Kind", "culprit_line", "same_text_but_fine", "measured"}]}. `measured` has
what the case's author read from the allocator, as `growth_bytes=20.0 KiB`. A case belongs to growth if its Kind begins with `leak` or
its `growth_bytes` is not 0; in every other case the right answer is silence. Found: a finding at the culprit line, and bytes within
10 % of the author's (all findings of the file added up, or that line alone). Each program runs once, in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

_UNITS = {"B": 1, "KiB": 1024, "MiB": 1024**2}
_TOLERANCE = 0.10


def read_measured(text: str) -> dict[str, float]:
    """'growth_bytes=20.0 KiB  nodes_per_step=8.0' -> {'growth_bytes': 20480.0, 'nodes_per_step': 8.0}."""
    found = re.findall(r"(\w+)=(-?[\d.]+)(?: (B|KiB|MiB))?(?=\s|$)", text)
    return {name: float(value) * _UNITS.get(unit, 1) for name, value, unit in found}


def is_growth(case: dict[str, Any]) -> bool:
    """Whether the right answer is a finding of `memfit leaks`."""
    return case["Kind"].startswith("leak") or _expected_bytes(case) > 0


def _expected_bytes(case: dict[str, Any]) -> float:
    """The author's growth a step, else what a leak left or held in all; 0 where nothing was measured to grow."""
    measured = read_measured(case["measured"])
    wanted = ("growth", "left", "held") if case["Kind"].startswith("leak") else ("growth",)
    return next((value for start in wanted for name, value in measured.items() if name.startswith(start)), 0.0)


def run_case(folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    """The report of one case, as JSON has it, and the exit code."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch, "report.json")
        command = [sys.executable, "-m", "memfit", "leaks", "--json", str(out), case["file"]]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=600)
        if not out.exists():
            raise RuntimeError(f"{case['file']} gave no report: {done.stderr[-500:]}")
        report = json.loads(out.read_text())
        return {"exit_code": done.returncode, "findings": report["findings"], "growths": report["growths"]}


def judge(case: dict[str, Any], report: dict[str, Any]) -> dict[str, Any]:
    """One row of the table."""
    findings = report["findings"]
    row = {"id": case["id"], "kind": case["Kind"], "exit_code": report["exit_code"], "line": case["culprit_line"]}
    row["found_lines"] = sorted({each["line"] for each in findings})
    if not is_growth(case):
        return {**row, "answer": "quiet" if not findings else "FALSE ALARM", "bytes": 0, "expected_bytes": 0}
    expected = _expected_bytes(case)
    at_line = [each for each in findings if each["line"] == case["culprit_line"]]
    function = _function_of(case, Path(case["folder"]))
    inside = [each for each in findings if each["line"] in function] or at_line
    sums = [sum(each["num_bytes"] for each in group) for group in (at_line, inside)]
    growths = [each for each in report["growths"] if each["line"] == case["culprit_line"]]
    sums += [total * max((each["num_steps"] for each in growths), default=0) for total in sums]  # authors give some totals
    sums += [total + sums[0] for total in sums[2:]]  # ... of all iterations, the last one included
    best = min(sums, key=lambda total: abs(total - expected), default=0)
    is_right = abs(best - expected) <= max(_TOLERANCE * expected, 64)
    fine = set(case["same_text_but_fine"]) & set(row["found_lines"])
    if fine:
        answer = "FALSE ALARM"
    elif at_line:
        answer = "found" if is_right else "BYTES DIFFER"
    else:
        answer = "found at another line" if findings and is_right else "MISSED"
    return {**row, "answer": answer, "bytes": best, "expected_bytes": expected}


def _function_of(case: dict[str, Any], folder: Path) -> range:
    """The lines of the function or class that the culprit lies in."""
    lines = Path(folder, case["file"]).read_text(encoding="utf-8").splitlines()
    start = case["culprit_line"]
    while start > 1 and not re.match(r"(def|class) ", lines[start - 1]):
        start -= 1
    end = start + 1
    while end <= len(lines) and (not lines[end - 1] or lines[end - 1][0].isspace()):
        end += 1
    return range(start, end)


def draw_table(rows: list[dict[str, Any]]) -> str:
    """Markdown: growth cases one by one, the others as a count."""
    lines = ["| case | kind | culprit line | lines found | bytes | expected | answer |", "|---|---|---:|---|---:|---:|---|"]
    for row in rows:
        if row["answer"] != "quiet":
            places = ", ".join(map(str, row["found_lines"])) or "none"
            lines.append(
                f"| {row['id']} | {row['kind']} | {row['line'] or ''} | {places} | {row['bytes']:,.0f} | "
                f"{row['expected_bytes']:,.0f} | {row['answer']} |"
            )
    quiet = sum(row["answer"] == "quiet" for row in rows)
    false = sum(row["answer"] == "FALSE ALARM" for row in rows)
    growth = [row for row in rows if row["answer"] not in ("quiet", "FALSE ALARM")]
    found = sum(row["answer"].startswith("found") for row in growth)
    lines += ["", f"Growth: {found} of {len(growth)} found. Everything else: {quiet} quiet, {false} false alarms."]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--only", default="", help="ids, separated by commas")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    wanted = set(filter(None, arguments.only.split(",")))
    rows = []
    for case in json.loads((arguments.cases / "expected.json").read_text())["cases"]:
        if not wanted or case["id"] in wanted:
            rows.append(judge({**case, "folder": str(arguments.cases)}, run_case(arguments.cases, case)))
            print(rows[-1]["id"], rows[-1]["answer"], rows[-1]["found_lines"], file=sys.stderr, flush=True)
    table = draw_table(rows)
    print(table)
    if arguments.output:
        arguments.output.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")
        arguments.output.with_suffix(".md").write_text(f"torch {torch.__version__}, CPU, one thread\n\n{table}\n")


if __name__ == "__main__":
    main()
