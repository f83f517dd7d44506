"""Programs whose expected findings stand in them as comments: `# <- MF101` on the line, nothing anywhere else."""

from __future__ import annotations

import re
import textwrap

from memfit.diagnosis.lints import check_text

_MARK = re.compile(r"#\s*<-\s*(MF\d{3}(?:\s*,\s*MF\d{3})*)")
HEADER = "import torch\nfrom torch import nn\nimport torch.nn.functional as F\n"


def find(program: str) -> set[tuple[int, str]]:
    """(line, code) of all findings in a program, HEADER put before it."""
    return {(finding.line, finding.code) for finding in check_text(HEADER + textwrap.dedent(program), "program.py")}


def assert_marked(program: str) -> None:
    """Asserts that the findings are exactly the marked ones."""
    text = HEADER + textwrap.dedent(program)
    expected = {
        (number, code.strip())
        for number, line in enumerate(text.splitlines(), start=1)
        if (match := _MARK.search(line))
        for code in match.group(1).split(",")
    }
    found = find(program)
    lines = text.splitlines()
    wrong = [f"missing {code} on line {line}: {lines[line - 1]}" for line, code in sorted(expected - found)]
    wrong += [f"false {code} on line {line}: {lines[line - 1]}" for line, code in sorted(found - expected)]
    assert not wrong, "\n" + "\n".join(wrong)
