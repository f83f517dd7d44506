"""All of memfit on a folder of small programs with known answers: what a run tells, what the source tells, and torch-preflight beside.

    python benchmarks/leaks.py CASES_DIR [-o results/leaks.json] [--write ../docs/leaks.md] [--preflight PROGRAM] [--only 001,002] [--no-proof]
        [--jobs 2]

CASES_DIR holds `expected.json`: {"cases": [{"file", "id", "Kind", "title", "culprit_line", "same_text_but_fine", "measured"}]}. `measured`
has what the case's author read from the allocator, as `growth_bytes=20.0 KiB`. A case belongs to growth if its Kind begins with `leak` or
its `growth_bytes` is not 0; in every other case the right answer of `memfit leaks` is silence. Found: a finding at the culprit line, and
bytes within 10 % of the author's (all findings of the function added up, or that line alone). Each program runs in a process of its own
for `memfit leaks` and in another for the findings of `memfit trace`, forked from one in which torch is loaded. Where growth was found the fix
is tried as `memfit leaks --prove` does. Generators start alike, as there.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lints import BEGIN as _LINTS_BEGIN
from lints import END, Case, Outcome, run_memfit, run_preflight
from machine import write_between
from memfit import api
from memfit.core import proof as core_proof
from memfit.core.growth_file import from_document, to_document
from memfit.diagnosis.proving import Ran, prove
from memfit.diagnosis.values import ValueLog

BEGIN = _LINTS_BEGIN.replace("lints", "leaks")
_UNITS = {"B": 1, "KiB": 1024, "MiB": 1024**2}
_TOLERANCE = 0.10
_SECONDS = 300  # for one program


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


# ---- running -----------------------------------------------------------------------------------------------------------


def in_child(folder: Path, work: Callable[[], Any]) -> Any:
    """What `work()` gives, run silently in a forked child in `folder`; through JSON. Raises RuntimeError if it gives nothing."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch, "out.json")
        child = os.fork()
        if not child:
            try:
                signal.alarm(_SECONDS)
                quiet = os.open(os.devnull, os.O_RDWR)
                for each in range(3):
                    os.dup2(quiet, each)
                os.chdir(folder)
                out.write_text(json.dumps(work()), encoding="utf-8")
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        if not out.exists():
            raise RuntimeError("a program gave no answer; run it with `memfit leaks` to see why")
        return json.loads(out.read_text(encoding="utf-8"))


def watch(folder: Path, file: str, texts: Mapping[str, str]) -> Ran:
    """One run of the program under `memfit leaks`, with these texts in place of its files'."""

    def work() -> dict[str, Any]:
        values = ValueLog()
        report, exit_code, error = api.watch_script(file, [], values=values, texts=texts)
        failed = "" if error is None or isinstance(error, SystemExit) else type(error).__name__
        return {
            "report": to_document(report),
            "values": [values.outputs, values.gradients],
            "exit_code": exit_code,
            "failed": failed,
        }

    ran = in_child(folder, work)
    outputs, gradients = ran["values"]
    return Ran(from_document(ran["report"]), tuple(outputs), tuple(gradients), ran["failed"], ran["exit_code"])


def measure(file: str) -> dict[str, Any]:
    """What `memfit trace` finds in a step of the program, or in all that ran where no step ended; and its optimizer state."""
    run = api.trace_run(file, [])
    trace = run.trace
    if trace is None:
        return {"findings": [], "state_bytes": 0}
    state = sum(each.nbytes for each in trace.storages if each.kind == "optimizer state" and each.persistent)
    found = [asdict(each) for each in api.findings_of(trace)]
    return {"findings": [each for each in found if Path(each["path"]).name == file], "state_bytes": state}


def run_case(folder: Path, case: dict[str, Any], *, is_proved: bool) -> dict[str, Any]:
    """Everything that is run of one case, as a row."""
    start = time.perf_counter()
    file = case["file"]
    ran = watch(folder, file, {})
    proof = prove(ran, lambda texts: watch(folder, file, texts)) if is_proved and is_growth(case) else None
    row = judge(case, folder, ran, proof, in_child(folder, lambda: measure(file)))
    seconds = time.perf_counter() - start
    print(case["id"], row["answer"], row["found_lines"], row["traced"], f"{seconds:.0f} s", file=sys.stderr, flush=True)
    return row


# ---- judging -----------------------------------------------------------------------------------------------------------


def judge(
    case: dict[str, Any], folder: Path, ran: Ran, proof: core_proof.Proof | None, traced: dict[str, Any]
) -> dict[str, Any]:
    """One row: what `memfit leaks` and `memfit trace` said, and whether it is right."""
    report = ran.report
    leaks = {"findings": [asdict(each) for each in report.findings], "growths": [asdict(each) for each in report.growths]}
    row = {
        "id": case["id"],
        "kind": case["Kind"],
        "title": case["title"],
        "line": case["culprit_line"],
        "exit_code": ran.exit_code,
    }
    row["found_lines"] = sorted({each["line"] for each in leaks["findings"]})
    row["codes"] = sorted({each["code"] for each in leaks["findings"]})
    row["traced"] = sorted({(each["line"], each["code"]) for each in traced["findings"]})
    row["peaks"] = None if report.peaks is None else {**asdict(report.peaks), "is_uneven": report.peaks.is_uneven}
    row["state_bytes"] = traced["state_bytes"]
    row["proof"] = None if proof is None else core_proof.to_document(proof)
    if not is_growth(case):
        return {**row, "answer": "quiet" if not leaks["findings"] else "FALSE ALARM", "bytes": 0, "expected_bytes": 0}
    expected = _expected_bytes(case)
    best = _closest_bytes(case, folder, leaks, expected)
    is_right = abs(best - expected) <= max(_TOLERANCE * expected, 64)
    if set(case["same_text_but_fine"]) & set(row["found_lines"]):
        answer = "FALSE ALARM"
    elif case["culprit_line"] in row["found_lines"]:
        answer = "found" if is_right else "BYTES DIFFER"
    else:
        answer = "found at another line" if leaks["findings"] and is_right else "MISSED"
    return {**row, "answer": answer, "bytes": best, "expected_bytes": expected}


def _closest_bytes(case: dict[str, Any], folder: Path, leaks: dict[str, Any], expected: float) -> float:
    """Of the ways in which authors add up: the culprit's line or its function, a step or all steps."""
    line = case["culprit_line"]
    at_line = [each for each in leaks["findings"] if each["line"] == line]
    function = _function_of(folder / case["file"], line)
    inside = [each for each in leaks["findings"] if each["line"] in function] or at_line
    sums = [sum(each["num_bytes"] for each in group) for group in (at_line, inside)]
    growths = [each for each in leaks["growths"] if each["line"] == line]
    sums += [total * max((each["num_steps"] for each in growths), default=0) for total in sums]  # authors give some totals
    sums += [total + sums[0] for total in sums[2:]]  # ... of all iterations, the last one included
    return min(sums, key=lambda total: abs(total - expected), default=0)


def _function_of(path: Path, line: int) -> range:
    """The lines of the function or class that the line lies in."""
    lines = path.read_text(encoding="utf-8").splitlines()
    start = line
    while start > 1 and not re.match(r"(def|class) ", lines[start - 1]):
        start -= 1
    end = start + 1
    while end <= len(lines) and (not lines[end - 1] or lines[end - 1][0].isspace()):
        end += 1
    return range(start, end)


# ---- drawing -----------------------------------------------------------------------------------------------------------


def draw(rows: list[dict[str, Any]], cases: list[dict[str, Any]], outcomes: list[Outcome]) -> str:
    """The two tables as Markdown: growth with bytes and proof, and every case with all who were asked."""
    growth = [row for row in rows if row["answer"] not in ("quiet", "FALSE ALARM")]
    found = [row for row in growth if row["answer"].startswith("found")]
    false = sum(row["answer"] == "FALSE ALARM" for row in rows)
    lines = [
        f"{len(rows)} programs. Growth or memory held for nothing: {len(found)} of {len(growth)} found with their bytes, "
        f"{sum(row['answer'] == 'found' for row in found)} at the authors' line. In the others `memfit leaks` was quiet "
        f"{sum(row['answer'] == 'quiet' for row in rows)} times and gave {false} false alarms.",
        "",
        "| case | what grows or is held | code | lines told | bytes | expected | answer | with the fix |",
        "|---|---|---|---|---:|---:|---|---|",
    ]
    for row in rows:
        if row["answer"] != "quiet":
            told = ", ".join(f"**{line}**" if line == row["line"] else str(line) for line in row["found_lines"]) or "none"
            lines.append(
                f"| {row['id']} | {row['title'].rstrip('.')} | {', '.join(row['codes'])} | {told} | {row['bytes']:,.0f} | "
                f"{row['expected_bytes']:,.0f} | {row['answer']} | {_say_proof(row['proof'])} |"
            )
    heads = " | ".join(outcome.tool for outcome in outcomes)
    lines += ["", f"| case | {heads} | memfit leaks | memfit trace |", "|---|" + "---|" * (len(outcomes) + 2)]
    for row, case in zip(rows, cases, strict=True):
        known = Case(case["id"], case["file"], case["title"], case["culprit_line"], tuple(case["same_text_but_fine"]))
        cells = [_say(known, [(line, code) for file, line, code in each.findings if file == known.file]) for each in outcomes]
        run = _say(known, [(each["line"], each["code"]) for each in _findings_of(row)]) or _say_peaks(row["peaks"])
        lines.append(f"| {row['id']} | {' | '.join([*cells, run, _say_traced(known, row)])} |")
    return "\n".join(lines)


def _findings_of(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"line": line, "code": ", ".join(row["codes"])} for line in row["found_lines"]]


def _say(case: Case, findings: list[tuple[int, str]]) -> str:
    """The codes at the culprit's line; else those at others, with their lines; in a negative case, or on a line that is fine, a false alarm."""
    alarms = sorted({code for line, code in findings if case.culprit is None or line in case.fine})
    at_line = sorted({code for line, code in findings if line == case.culprit})
    elsewhere = sorted({f"{code} (line {line})" for line, code in findings if line not in (case.culprit, *case.fine)})
    text = ", ".join(at_line) or ("" if case.culprit is None else ", ".join(elsewhere))
    return f"{text}; **false alarm** {', '.join(alarms)}".lstrip("; ") if alarms else text


def _say_peaks(peaks: dict[str, Any] | None) -> str:
    if peaks is None or not peaks["is_uneven"]:
        return ""
    ratio = peaks["largest_bytes"] / max(1, peaks["first_bytes"])
    return f"step {peaks['largest_step']} takes {ratio:.1f} times step {peaks['first_step']}"


def _say_traced(case: Case, row: dict[str, Any]) -> str:
    said = _say(case, [tuple(each) for each in row["traced"]])
    state = f"{row['state_bytes']:,} bytes of optimizer state" if row["state_bytes"] else ""
    return "; ".join(filter(None, (said, state)))


def _say_proof(proof: dict[str, Any] | None) -> str:
    if proof is None or proof["after"] is None:
        return "no safe change" if proof is None or not proof["rejected"] else "changes results"
    flat = "flat" if proof["is_flat"] else f"{proof['after'][0]:,} B a step"
    return f"{flat}, {'equal' if proof['compared']['is_equal'] else 'equality not known'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the tables between the marks in this Markdown file")
    parser.add_argument("--preflight", default="torch-preflight", help="the program, if it is not on the PATH")
    parser.add_argument("--only", default="", help="ids, separated by commas")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time")
    parser.add_argument("--no-proof", action="store_true", help="do not run mended copies")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    wanted = set(filter(None, arguments.only.split(",")))
    folder = arguments.cases.resolve()
    cases = json.loads((folder / "expected.json").read_text(encoding="utf-8"))["cases"]
    cases = [case for case in cases if not wanted or case["id"] in wanted]
    with ProcessPoolExecutor(arguments.jobs, mp_context=multiprocessing.get_context("fork")) as pool:
        rows = list(pool.map(partial(run_case, folder, is_proved=not arguments.no_proof), cases))
    known = [
        Case(each["id"], each["file"], each["title"], each["culprit_line"], tuple(each["same_text_but_fine"])) for each in cases
    ]
    outcomes = [run_memfit(folder, known)]
    try:
        outcomes.append(run_preflight(arguments.preflight, folder, known, notes=False))
    except OSError as error:
        print(f"torch-preflight could not be run: {error.strerror}.", file=sys.stderr)
    table = draw(rows, cases, outcomes)
    print(table)
    if arguments.output:
        versions = {outcome.tool: outcome.version for outcome in outcomes}
        arguments.output.write_text(
            json.dumps({"torch": torch.__version__, "versions": versions, "rows": rows}, indent=1) + "\n"
        )
    if arguments.write:
        write_between(arguments.write, BEGIN, END, table)


if __name__ == "__main__":
    main()
