"""The tuple of rules as a whole: each finds something in the tests' programs, each code has three shapes at least."""

import ast
import textwrap
from collections import Counter

from diagnosis.lints import (
    test_attributes_and_references,
    test_dead_and_evaluation,
    test_gradients_and_checkpoints,
    test_growth,
    test_more_shapes,
    test_precision_inplace_and_the_rest,
)
from diagnosis.lints.marked import HEADER
from memfit.diagnosis.codes import CODES, MEASURED_ONLY
from memfit.diagnosis.lints.flow import analyse
from memfit.diagnosis.lints.program import read_program
from memfit.diagnosis.lints.rules import RULES

FILES = (
    test_attributes_and_references,
    test_dead_and_evaluation,
    test_gradients_and_checkpoints,
    test_growth,
    test_more_shapes,
    test_precision_inplace_and_the_rest,
)


def read(program):
    text = HEADER + textwrap.dedent(program)
    return analyse(read_program(ast.parse(text), text))


def test_every_rule_finds_something_and_every_code_is_found_in_several_shapes():
    found, used = Counter(), set()
    for file in FILES:
        for shape in file.FOUND.values():
            program = read(shape)
            for rule in RULES:
                reports = list(rule(program))
                found.update(report.code for report in reports)
                used |= {rule} if reports else set()
    assert used == set(RULES)
    assert set(found) == set(CODES) - set(MEASURED_ONLY)
    assert min(found.values()) >= 3, found
