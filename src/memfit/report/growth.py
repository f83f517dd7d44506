"""The report of a growth watch: the verdict, then each finding with its line, its holder, its bytes and the fix."""

from __future__ import annotations

import os

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from memfit.core.finding import Finding
from memfit.core.growth import Growth, GrowthReport, StepPeaks, show_path, to_finding
from memfit.core.proof import Compared, Proof, growth_per_step
from memfit.core.sizes import format_size
from memfit.report.drawing import BAD, GOOD, HEAD, QUIET, draw_facts, draw_heading, draw_table, format_count

_MAX_MADE = 4  # places where the tensors of one finding were made


def draw_growth(report: GrowthReport) -> RenderableType:
    """The whole report."""
    material = [each for each in report.growths if each.is_material]
    small = [each for each in report.growths if not each.is_material and each.num_bytes]
    parts: list[RenderableType] = [_headline(report, material), Text(), draw_facts(_facts(report))]
    for each in material:
        parts += [Text(), *_draw_finding(each, to_finding(each))]
    if small:
        rows = [(f"{show_path(each.path)}:{each.line}", format_size(each.num_bytes), each.chain) for each in small]
        parts += [Text(), draw_heading("Grows too, but little (less than a fiftieth of what a step makes)")]
        parts.append(draw_table(("<line", "a step", "<held by"), rows, wide=2))
    if report.settled:
        parts += [Text(), draw_heading("Came once and stays: no growth")]
        parts.append(draw_table(("<made at", "bytes"), [(place, format_size(size)) for place, size in report.settled]))
    return Group(*parts)


_FEWEST_STEPS = 4  # growth shows from there on


def _headline(report: GrowthReport, material: list[Growth]) -> Text:
    line = Text("memfit leaks: ", style=HEAD)
    program = os.path.basename(report.program) or "the loop"
    per_step = sum(each.num_bytes for each in material if each.per_step)
    nodes = sum(each.nodes_per_step for each in material if each.per_step)
    once = sum(each.num_bytes for each in material if not each.per_step)
    if per_step:
        line.append(f"{program} grows by {format_size(per_step)} a step", style=BAD)
    elif nodes:
        line.append(f"{program} grows by {format_count(nodes, 'graph node')} a step, which hold no tensor bytes", style=BAD)
    elif once:
        line.append(f"{program} does not grow, but {format_size(once)} are held for nothing", style=BAD)
    elif not report.num_steps:
        line.append(f"{program} was over before a loop had gone around: there is nothing to compare")
    elif report.num_steps < _FEWEST_STEPS:
        line.append(f"{program} was over after {format_count(report.num_steps, 'step')}, too few to show growth")
    else:
        line.append(f"{program} does not grow", style=GOOD)
    return line


def _facts(report: GrowthReport) -> list[tuple[str, str | Text]]:
    facts: list[tuple[str, str | Text]] = []
    if report.num_steps:
        facts.append(("Steps", f"{report.num_steps} watched; a step is {report.step}"))
        if report.num_steps < _FEWEST_STEPS:
            facts.append(("Too few", "growth shows from the fourth step on"))
    facts.append(
        ("Peak", f"{format_size(report.peak_bytes)} of what was made meanwhile; {format_size(report.live_bytes)} at the end")
    )
    if report.peaks is not None and report.peaks.is_uneven:
        facts.append(("Step peaks", _draw_peaks(report.peaks, is_growing=any(each.is_material for each in report.growths))))
    if report.steps_left is not None and report.budget_bytes is not None:
        facts.append(("Full in", f"about {report.steps_left:,} more steps: {format_size(report.budget_bytes)}"))
    facts += [("Note", message) for message in report.messages]
    return facts


def _draw_peaks(peaks: StepPeaks, *, is_growing: bool) -> str:
    ratio = f"{peaks.largest_bytes / peaks.first_bytes:.1f} times as much as" if peaks.first_bytes else "beside"
    text = f"{format_size(peaks.largest_bytes)} in step {peaks.largest_step}, {ratio} {format_size(peaks.first_bytes)} in step {peaks.first_step}"
    if is_growing:
        return text
    return (
        f"{text}. That is no growth, for nothing of it stays: that step had more to do. If it is the batch, a larger one still takes "
        "more: put the largest first, or cap or bucket the lengths"
    )


def _draw_finding(growth: Growth, finding: Finding) -> list[RenderableType]:
    head = Text(f"{finding.path}:{finding.line}", style=HEAD).append(f"  {finding.code}", style=QUIET)
    lines = [Text(growth.text, style=QUIET)] if growth.text else []
    lines.append(Text(finding.message))
    sizes: dict[tuple[str, str], int] = {}
    for place, module, size in growth.made_at:
        sizes[place, module] = sizes.get((place, module), 0) + size
    made = [f"{place}{f' in {module}' if module else ''} ({format_size(size)})" for (place, module), size in sizes.items()]
    if made:
        rest = f", and {len(made) - _MAX_MADE} more" if len(made) > _MAX_MADE else ""
        lines.append(Text(f"Made at {', '.join(made[:_MAX_MADE])}{rest}."))
    if growth.per_step and growth.num_steps:
        lines.append(
            Text(
                f"Seen over {format_count(growth.num_steps, 'step')}{f' of the loop at {growth.loop}' if growth.loop else ''}."
            )
        )
    lines.append(Text("Fix: ", style=HEAD).append(Text(finding.remedy, style="")))
    return [head, *(Padding(line, (0, 0, 0, 4)) for line in lines)]


def draw_proof(proof: Proof) -> RenderableType:
    """What was changed in the copy, growth before and after, whether it computes the same, and what has no mend."""
    if not (proof.mended or proof.unmended or proof.rejected):
        return draw_heading("Nothing grows, so there is nothing to mend.")
    facts: list[tuple[str, str | Text]] = []
    if proof.after is not None:
        verdict = Text("flat", style=GOOD) if proof.is_flat else Text("not flat", style=BAD)
        facts += [
            ("Before", _rate(proof.before)),
            ("After", verdict.append(f": {_rate(proof.after)}", style="not bold default")),
        ]
        left = [to_finding(each) for each in proof.after.growths if each.is_material]
        facts += [("Left", f"line {each.line} of the copy, {each.code}: {each.message} {each.remedy}") for each in left]
    elif proof.problem:
        facts.append(("Not run", Text(proof.problem, style=BAD)))
    if proof.compared is not None:
        facts.append(("Equal", _draw_compared(proof.compared)))
    facts += [
        ("Taken back", f"this was tried and changes results, so it is yours to decide:\n{diff}") for diff in proof.rejected
    ]
    for each in map(to_finding, proof.unmended):
        facts.append(
            ("No mend", f"{each.path}:{each.line} {each.code}: no change of the line is known to be safe. {each.remedy}")
        )
    codes = ",".join(sorted({code for each in proof.mended for code in each.codes}))
    if codes and not any(each.num_tried for each in proof.mended):
        paths = " ".join(show_path(each.path) for each in proof.mended)
        facts.append(("To write it", f"memfit check --fix --yes --select {codes} {paths}"))
    parts: list[RenderableType] = [draw_heading("The fix in a copy, run again" if proof.mended else "The fix")]
    parts += [
        Text(line, style=QUIET, no_wrap=True, overflow="ignore") for each in proof.mended for line in each.diff.splitlines()
    ]
    return Group(*parts, draw_facts(facts))


def _draw_compared(compared: Compared) -> Text:
    counts = f"{format_count(compared.num_outputs, 'output')} of modules and the gradients of {compared.num_gradients} backward passes"
    if compared.is_equal is None:
        return Text("not known: the program computes something else in each run, though its generators began alike")
    if compared.is_equal:
        return Text("yes, bit for bit", style=GOOD).append(f": {counts}", style="not bold default")
    return Text("NO", style=BAD).append(f": the copy computes something else in {counts}", style="not bold default")


def _rate(report: GrowthReport) -> str:
    num_bytes, nodes = growth_per_step(report)
    return f"{format_size(num_bytes)} and {format_count(nodes, 'graph node')} a step, over {format_count(report.num_steps, 'step')}"
