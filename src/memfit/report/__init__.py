"""Data -> terminal. Every report is a function from a Result, a Plan or a Trace to a rich renderable; no torch."""

from memfit.report.console import draw_text, open_console, write_report
from memfit.report.growth import draw_growth, draw_proof
from memfit.report.inplace import draw_in_place, draw_sites
from memfit.report.plan import draw_plan
from memfit.report.progress import follow_progress
from memfit.report.result import draw_result
from memfit.report.trace import draw_dead, draw_trace

__all__ = [
    "draw_dead",
    "draw_growth",
    "draw_in_place",
    "draw_plan",
    "draw_proof",
    "draw_result",
    "draw_sites",
    "draw_text",
    "draw_trace",
    "follow_progress",
    "open_console",
    "write_report",
]
