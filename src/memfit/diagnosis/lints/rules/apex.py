"""MF604, MF605: scripts written for NVIDIA's apex.amp, which was removed in 2025: an order that fails, and what each level is called now.

Source: apex's public documentation (nvidia.github.io/apex/amp.html) and its issues 210 and 818.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from memfit.diagnosis.lints.program import Event, Function, Program
from memfit.diagnosis.lints.queries import events_of
from memfit.diagnosis.lints.report import Report

_APEX, _OURS = "apex.amp.", "memfit.integrations.apex.amp."

_NOW = {
    "O0": "O0 is plain float32: leave initialize and scale_loss out.",
    "O1": "O1 is torch.autocast around forward pass and loss, scaler.scale(loss).backward() with a torch.amp.GradScaler, scaler.unscale_(optimizer) before "
    "a clip (of model.parameters() where it says master_params), scaler.step(optimizer) and scaler.update().",
    "O2": "O2 (half weights, float32 masters in the optimizer) has no equal in PyTorch, and .half() is O3: take O1's autocast and GradScaler, or memfit's O2.",
    "O3": "O3 is model.half() with inputs cast too; small updates are rounded away. O1's autocast and GradScaler keep them.",
}
_KEEP = "Or keep the script: `memfit run` answers the import, as does `from memfit.integrations.apex import amp`."


def find_early_scale_loss(program: Program) -> Iterator[Report]:
    """`amp.scale_loss` where nothing has called `amp.initialize`: earlier in the function, or, for an optimizer made right there, at all."""
    initialized = {function for function in program.functions if any(_is(event, "initialize") for event in function.events)}
    for function in program.functions:
        for event in function.events:
            if not _is(event, "scale_loss"):
                continue
            is_early = function in initialized and not _follows(event, function)
            is_alone = not initialized and any(
                value.kind == "optimizer" and _is_made_in(value.made_by, function) for value in event.args
            )
            if is_early or is_alone:
                yield Report(
                    "MF604",
                    event.node,
                    'amp.scale_loss is called before amp.initialize: there is no loss scale yet, and apex stops with "AmpState has no attribute '
                    "'opt_properties'\".",
                    "Call `model, optimizer = amp.initialize(model, optimizer, opt_level='O1')` once both are made.",
                )


def _is(event: Event, name: str) -> bool:
    return event.kind == "call" and event.name in (_APEX + name, _OURS + name)


def _follows(event: Event, function: Function) -> bool:
    """Whether an `initialize` of the function stands before the event, or in a loop around it."""
    calls = [other for other in function.events if _is(other, "initialize")]
    return any(other.index < event.index or set(other.context.loops) & set(event.context.loops) for other in calls)


def _is_made_in(made_by: ast.AST | None, function: Function) -> bool:
    return made_by is not None and any(part is made_by for part in ast.walk(function.node))


def find_apex(program: Program) -> Iterator[Report]:
    """`amp.initialize(...)` of apex: it does not start with an apex of today."""
    for event in events_of(program, "call"):
        if event.name != _APEX + "initialize":
            continue
        call = event.node
        assert isinstance(call, ast.Call)
        given = next((item.value for item in call.keywords if item.arg == "opt_level"), None)
        level = given.value if isinstance(given, ast.Constant) else "O1" if given is None else None
        known = level in _NOW if isinstance(level, str) else False
        yield Report(
            "MF605",
            event.node,
            "apex.amp was removed from apex in 2025, so the import fails with an apex of today.",
            f"{_NOW[level] if known and isinstance(level, str) else _NOW['O1']} {_KEEP}",
        )


RULES = (find_early_scale_loss, find_apex)
