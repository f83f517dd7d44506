"""The rules, one family a file, all of them in RULES."""

from memfit.diagnosis.lints.report import Rule
from memfit.diagnosis.lints.rules import (
    apex,
    attention,
    attributes,
    calls,
    checkpointing,
    data,
    dead,
    evaluation,
    gradients,
    growth,
    inplace,
    loading,
    precision,
    references,
)

RULES: tuple[Rule, ...] = (
    *growth.RULES,
    *attributes.RULES,
    *references.RULES,
    *dead.RULES,
    *attention.RULES,
    *evaluation.RULES,
    *gradients.RULES,
    *checkpointing.RULES,
    *precision.RULES,
    *apex.RULES,
    *inplace.RULES,
    *calls.RULES,
    *loading.RULES,
    *data.RULES,
)
