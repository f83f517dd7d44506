"""Result: what one run did, in numbers, and the certificate of what was proved equal. The schema is in docs/result.md.

Everything here was measured or counted, except the fields whose name says `eager` (reconstructed from the trace,
because plain eager did not run) or `predicted` (the plan's). A number nobody measured is None, never 0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from memfit.core.errors import MemfitError
from memfit.core.finding import Finding
from memfit.core.plan import BITWISE, Move
from memfit.core.trace import load_json

FORMAT = "memfit-result"
VERSION = 1

# Why the run ended (Result.exit_reason).
FINISHED = "finished"  # the last line of the script was reached, or the block around the loop was left
EXITED = "exited"  # the script called sys.exit with a code other than 0
EXCEPTION = "exception"  # the script raised and did not catch
INTERRUPTED = "interrupted"  # Ctrl-C
BUDGET = "budget"  # memfit said before training that the budget cannot be met
OUT_OF_MEMORY = "out of memory"  # the device had no memory left all the same
EXIT_REASONS = (FINISHED, EXITED, EXCEPTION, INTERRUPTED, BUDGET, OUT_OF_MEMORY)

EQUAL, DIFFERENT, UNCHECKED, UNTOUCHED = VERDICTS = ("equal", "different", "unchecked", "untouched")

_REMEDY = "Make one with `memfit run --budget SIZE --json result.json SCRIPT`."


@dataclass(frozen=True)
class Certificate:
    """What was proved equal to plain eager in this run, and for how many tensors.

    num_evicted, num_restored: storages that left, and that came back, in all steps of the run.
    num_verified: restored ones whose fingerprint was compared with the one taken when they left, in `verified_steps`
        steps.
    num_mismatched: verified ones that differed, at `mismatched_places`; the run is stopped there.
    num_sources_checked: what replays read from outside (parameters, inputs) or must not write (running statistics), compared
        before and after. sources_equal: none of it had changed; None: not looked at.
    generators_equal: the random generators ended those steps where plain eager ends them; None: not looked at.
    """

    num_evicted: int = 0
    num_restored: int = 0
    num_verified: int = 0
    num_mismatched: int = 0
    num_sources_checked: int = 0
    sources_equal: bool | None = None
    generators_equal: bool | None = None
    verified_steps: int = 0
    mismatched_places: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """One of VERDICTS.

        'different' as soon as one comparison failed; 'untouched' where nothing was evicted, so nothing can differ;
        'unchecked' where tensors left and none was compared; else 'equal'.
        """
        if self.num_mismatched or self.sources_equal is False or self.generators_equal is False:
            return DIFFERENT
        if not self.num_evicted:
            return UNTOUCHED
        return EQUAL if self.num_verified else UNCHECKED


@dataclass(frozen=True)
class Result:
    """What a run did. Bytes are of the whole step (parameters, gradients, optimizer state, activations, workspaces).

    budget_bytes: the budget the run was held to, None where it was only measured; budget_source:
        'given', or how it was found ('free on the card less ...').
    allow: the exactness the user allowed (core.plan.EXACTNESS).
    precision: the opt level the run trained in and its half precision ('O1 bfloat16'), or ''. "Plain" means in this precision then.
    eager_peak_bytes: peak of the step as plain eager would have run it, reconstructed from the trace.
    predicted_peak_bytes, predicted_step_seconds: the plan's, for the steps it ran.
    peak_bytes: the highest peak of the measured steps, the first among them; `peak_source` says how it was read,
        `peak_phase` (trace.PHASES) and `peak_step` (from 1) where it was.
    planned_peak_bytes: the same of the measured steps that the plan ran: what the prediction is compared with.
    floor_bytes: the smallest budget the planner could have served.
    step_seconds: median of the steps under the plan, or of all where nothing was installed. eager_step_seconds: an
        estimate, the planned steps less what restoring took in them (recording, 1-4 %, stays in); None where no step ran under a plan.
    num_steps: optimizer steps seen; num_measured_steps: those whose peak was read; num_planned_steps:
        those under the plan.
    installed: whether memfit changed anything at all (False: the step fitted as it was).
    moves: the plan's, in forward order.
    eager_bytes_by_kind, bytes_by_kind: kind (trace.KINDS) -> bytes at the eager peak, and at the measured one.
    let_go: variable, as '`logits` (train.py:34)' -> bytes a step that were freed there, after its last use; largest first.
    findings: what the last measured step showed by the way: held at its peak for nothing, cleared late, collections that freed nothing.
    messages: what the runtime had to say, in order: replans, steps the guard caught, places it gave up.
    exit_reason: one of EXIT_REASONS; exit_code: of the script; error: the sentence of the exception that ended it,
        or ''.
    versions: 'memfit', 'python', 'torch', ... -> version.
    """

    budget_bytes: int | None
    peak_bytes: int | None = None
    peak_source: str = ""
    peak_phase: str = ""
    peak_step: int | None = None
    planned_peak_bytes: int | None = None
    eager_peak_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    floor_bytes: int | None = None
    step_seconds: float | None = None
    eager_step_seconds: float | None = None
    predicted_step_seconds: float | None = None
    num_steps: int = 0
    num_measured_steps: int = 0
    num_planned_steps: int = 0
    installed: bool = False
    moves: tuple[Move, ...] = ()
    certificate: Certificate = field(default_factory=Certificate)
    eager_bytes_by_kind: dict[str, int] = field(default_factory=dict)
    bytes_by_kind: dict[str, int] = field(default_factory=dict)
    let_go: dict[str, int] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    messages: tuple[str, ...] = ()
    exit_reason: str = FINISHED
    exit_code: int = 0
    error: str = ""
    program: str = ""
    device: str = "cpu"
    allow: str = BITWISE
    precision: str = ""
    budget_source: str = "given"
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def within_budget(self) -> bool | None:
        """Whether the peak of every measured step was within the budget; None if nothing was measured."""
        return self.peak_bytes <= self.budget_bytes if self.peak_bytes is not None and self.budget_bytes else None

    @property
    def time_ratio(self) -> float | None:
        """Seconds of a step over those of a plain eager step; None if either is unknown."""
        return _ratio(self.step_seconds, self.eager_step_seconds)

    @property
    def prediction_ratio(self) -> float | None:
        """Measured over predicted peak, of the steps the plan ran; None if either is unknown."""
        return _ratio(self.planned_peak_bytes, self.predicted_peak_bytes)

    def to_json(self) -> dict[str, Any]:
        """The result as plain dicts, lists, numbers and strings, as docs/result.md describes them."""
        data = {"format": FORMAT, "version": VERSION, **asdict(self)}
        data["certificate"]["verdict"] = self.certificate.verdict
        data["within_budget"] = self.within_budget
        return json.loads(json.dumps(data))

    def save(self, path: str | Path) -> None:
        """Write the result as indented JSON."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Result:
        """The result that `to_json` wrote. Raises MemfitError for a missing or unknown field."""
        known = {f.name for f in fields(cls)}
        derived = {"format", "version", "within_budget"}
        if unknown := sorted(set(data) - known - derived):
            raise MemfitError(f"The result has the unknown field {unknown[0]!r}. {_REMEDY}")
        try:
            kept = {name: _tuples(value) for name, value in data.items() if name in known}
            if "moves" in kept:
                kept["moves"] = tuple(Move(**{n: _tuples(v) for n, v in move.items()}) for move in kept["moves"])
            if "findings" in kept:
                kept["findings"] = tuple(Finding(**each) for each in kept["findings"])
            if "certificate" in kept:
                certificate = {n: _tuples(v) for n, v in kept["certificate"].items() if n != "verdict"}
                kept["certificate"] = Certificate(**certificate)
            return cls(**kept)
        except (TypeError, AttributeError) as error:
            raise MemfitError(f"The result is damaged: {error} while reading it. {_REMEDY}") from error

    @classmethod
    def load(cls, path: str | Path) -> Result:
        """Read a result written by `save`. Raises MemfitError for a missing, broken, foreign or newer file."""
        data = load_json(path, FORMAT, VERSION, MemfitError, _REMEDY)
        try:
            return cls.from_json(data)
        except MemfitError as error:
            raise MemfitError(f"{path}: {error}") from error


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator is not None and denominator else None


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
