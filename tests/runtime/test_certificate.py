"""What the certificate claims was compared: a replay that draws or writes where it must not is caught in the step it happens."""

from __future__ import annotations

import pytest
import torch

from memfit.core.errors import CertificateError
from memfit.engine import replaying
from runtime.test_scripts import PLAIN


def run_with(scripts, monkeypatch, meddle, **options):
    """Run the plain script with `meddle(call)` called after every replayed call."""
    path = scripts.write(PLAIN)
    budget = scripts.budget(0.7, path)
    replay = replaying._replay

    def replay_and_meddle(call, *args):
        found = replay(call, *args)
        meddle(call)
        return found

    monkeypatch.setattr(replaying, "_replay", replay_and_meddle)
    return scripts.run(path, budget=budget, **options)[1]


def write_to_a_parameter(call):
    for value in call.values:
        if value.cell.call is None and (storage := value.cell.living_storage()) is not None and storage.nbytes() >= 64:
            torch.empty(0).set_(storage, 0, (1,), (1,)).add_(1.0)


def test_generators_and_sources_are_compared_in_verified_steps(scripts):
    certificate = scripts.compare(PLAIN).result.certificate
    assert (certificate.generators_equal, certificate.sources_equal) == (True, True)
    assert certificate.num_sources_checked >= 16  # weights and biases of the blocks


def test_nothing_is_claimed_where_nothing_was_compared(scripts):
    certificate = scripts.compare(PLAIN, verify="off").result.certificate
    assert certificate.num_evicted > 0
    assert (certificate.generators_equal, certificate.sources_equal) == (None, None)
    assert (certificate.num_sources_checked, certificate.num_verified, certificate.verdict) == (0, 0, "unchecked")


def test_a_replay_that_moves_the_generator_stops_the_step(scripts, monkeypatch):
    ran = run_with(scripts, monkeypatch, lambda call: torch.rand(1))
    assert isinstance(ran.error, CertificateError)
    with pytest.raises(CertificateError, match="moved the random generator; the step was stopped"):
        raise ran.error
    assert (ran.result.certificate.generators_equal, ran.result.certificate.verdict) == (False, "different")


def test_a_replay_that_writes_to_what_it_reads_stops_the_step(scripts, monkeypatch):
    ran = run_with(scripts, monkeypatch, write_to_a_parameter)
    with pytest.raises(CertificateError, match=r"wrote to one of its inputs .* which plain PyTorch does not do a second time"):
        raise ran.error
    assert (ran.result.certificate.sources_equal, ran.result.certificate.verdict) == (False, "different")
