"""`memfit check` and torch-preflight on a directory of small programs with known faults: found, missed, false alarms.

    python benchmarks/lints.py CASES_DIR [--preflight PATH_OF_TORCH_PREFLIGHT] [--write docs/findings.md]

CASES_DIR holds the programs and expected.json: {"cases": [{"file", "id", "Kind", "title", "culprit_line",
"same_text_but_fine"}]}. Of kind "negative" the right answer is nothing. *Found* is a finding on the culprit's line, *missed* none
there; a *false alarm* is a finding in a negative program or on a line that only looks like the culprit. Findings on other lines are
counted apart. Both tools get the same files in one run; only lines are compared, so a tool need not share our names for faults.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from machine import write_between
from memfit.diagnosis.lints import check_paths

BEGIN, END = "<!-- benchmarks/lints.py begin -->", "<!-- end -->"

# What no reading of the source can tell; each needs a run.
ONLY_IN_A_RUN = {
    "060": "when the optimizer's state arrives",
    "100": "whether autocast pays depends on the batch",
    "102": "bytes of autocast's weight cache",
    "103": "which share of the saved bytes autocast can shrink",
    "121": "whether the logits are the peak",
    "132": "which length comes",
    "160": "which frozen layers still save",
}


@dataclass(frozen=True)
class Case:
    """One program and its right answer. culprit: the line, None where the right answer is nothing. fine: look-alike lines."""

    id: str
    file: str
    title: str
    culprit: int | None
    fine: tuple[int, ...]


@dataclass(frozen=True)
class Outcome:
    """What a tool said: (file, line, code) of each finding, and the seconds it took. version: of the tool."""

    tool: str
    version: str
    seconds: float
    findings: frozenset[tuple[str, int, str]]

    def codes(self, case: Case, line: int | None) -> list[str]:
        """Codes on a line of the case's file, sorted."""
        return sorted(code for file, where, code in self.findings if file == case.file and where == line)


def read_cases(directory: Path) -> list[Case]:
    """The cases of expected.json, in its order."""
    described = json.loads((directory / "expected.json").read_text(encoding="utf-8"))["cases"]
    return [
        Case(each["id"], each["file"], each["title"], each["culprit_line"], tuple(each["same_text_but_fine"]))
        for each in described
    ]


def run_memfit(directory: Path, cases: Iterable[Case]) -> Outcome:
    """Our own rules."""
    start = time.perf_counter()
    checked = check_paths([directory / case.file for case in cases])
    seconds = time.perf_counter() - start
    findings = frozenset((Path(found.path).name, found.line, found.code) for found in checked.findings)
    return Outcome("memfit check", metadata.version("memfit"), seconds, findings)


def run_preflight(program: str, directory: Path, cases: Iterable[Case], *, notes: bool) -> Outcome:
    """torch-preflight's; its notes (an unseeded run, for instance) are hints of the lowest severity. Raises OSError if it is missing."""
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.split()[-1]
    command = [program, "check", "--format", "json", "--jobs", "1", *(str(directory / case.file) for case in cases)]
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # its exit code says whether it found something
    seconds = time.perf_counter() - start
    findings = frozenset(
        (Path(found["path"]).name, found["line"], found["code"])
        for found in json.loads(done.stdout)["diagnostics"]
        if notes or found["severity"] != "note"
    )
    return Outcome("torch-preflight" + (" with notes" if notes else ""), version, seconds, findings)


def count(outcome: Outcome, cases: list[Case]) -> dict[str, int]:
    """found, missed, false alarms (negative files and look-alike lines), findings elsewhere."""
    faults = [case for case in cases if case.culprit is not None]
    found = sum(bool(outcome.codes(case, case.culprit)) for case in faults)
    by_file = {case.file: case for case in cases}
    alarms = elsewhere = 0
    for file, line, _ in outcome.findings:
        case = by_file[file]
        if case.culprit is None or line in case.fine:
            alarms += 1
        elif line != case.culprit:
            elsewhere += 1
    readable = sum(bool(outcome.codes(case, case.culprit)) for case in faults if case.id not in ONLY_IN_A_RUN)
    return {"found": found, "readable": readable, "missed": len(faults) - found, "alarms": alarms, "elsewhere": elsewhere}


def draw(outcomes: list[Outcome], cases: list[Case]) -> str:
    """The tables as Markdown."""
    num_faults = sum(case.culprit is not None for case in cases)
    num_readable = num_faults - len(ONLY_IN_A_RUN)
    lines = [
        f"{len(cases)} programs: {num_faults} with one fault each ({num_readable} that the source shows, {len(ONLY_IN_A_RUN)} that only "
        f"a run can), {len(cases) - num_faults} negative, {sum(len(case.fine) for case in cases)} look-alike lines.",
        "",
        "| static | version | found, of what the source shows | found, of all | missed | false alarms | on other lines | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for outcome in outcomes:
        counts = count(outcome, cases)
        lines.append(
            f"| {outcome.tool} | {outcome.version} | {counts['readable']} of {num_readable} | {counts['found']} of {num_faults} | "
            f"{counts['missed']} | {counts['alarms']} | {counts['elsewhere']} | {outcome.seconds:.1f} |"
        )
    lines += [
        "",
        f"| case | fault | {' | '.join(outcome.tool for outcome in outcomes)} |",
        "|---|---|" + "---|" * len(outcomes),
    ]
    for case in cases:
        cells = [_cell(outcome, case) for outcome in outcomes]
        lines.append(f"| {case.id} | {case.title.rstrip('.')} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(outcome: Outcome, case: Case) -> str:
    everywhere = sorted({code for file, _, code in outcome.findings if file == case.file})
    if case.culprit is None:
        return f"**false alarm** {', '.join(everywhere)}" if everywhere else "quiet"
    alarms = [code for line in case.fine for code in outcome.codes(case, line)]
    said = ", ".join(outcome.codes(case, case.culprit)) or ("needs a run" if case.id in ONLY_IN_A_RUN else "missed")
    return said + (f"; **false alarm** {', '.join(alarms)}" if alarms else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", type=Path, metavar="CASES_DIR")
    parser.add_argument("--preflight", default="torch-preflight", help="the program, if it is not on the PATH")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the tables between the marks in this Markdown file")
    args = parser.parse_args()

    cases = read_cases(args.cases)
    outcomes = [run_memfit(args.cases, cases)]
    missing = ""
    try:
        outcomes += [run_preflight(args.preflight, args.cases, cases, notes=notes) for notes in (False, True)]
    except OSError as error:
        missing = f"\n\ntorch-preflight could not be run: {error.strerror}."
    text = draw(outcomes, cases) + missing
    print(text)
    if args.write:
        write_between(args.write, BEGIN, END, text)


if __name__ == "__main__":
    main()
