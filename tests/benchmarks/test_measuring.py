"""Budgets between plain eager and the floor, a bench on a tiny model, and a process that does not answer in time."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import measuring
import peers
import worker
from worker import Variant, VariantError
from workloads import Setup, Workload


def test_budgets_are_even_and_moved_to_the_peaks_of_peers() -> None:
    assert measuring.choose_budgets(100, 800, [], 8) == [
        (800, "eager's peak"),
        *((each, "") for each in (700, 600, 500, 400, 300, 200)),
        (100, "floor"),
    ]
    peers = [("compile 1", 800), ("compile 0.5", 90), ("checkpoint", 210), ("selective", 240)]
    assert measuring.choose_budgets(100, 400, peers, 4) == [
        (400, "eager's peak"),
        (240, "selective's peak"),
        (210, "checkpoint's peak"),
        (100, "floor"),
    ]


def _build(device: torch.device) -> Setup:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Setup(model, optimizer, (torch.randn(256, 64),), lambda model, batch: model(*batch).square().mean(), tuple(model))


def _build_slowly(device: torch.device, seconds: float) -> Setup:
    import time

    time.sleep(seconds)
    return _build(device)


TINY = Workload("tiny", "three linear layers", _build)


class InThisProcess(Variant):
    """A variant without a process of its own, which would take five seconds to import torch."""

    def __enter__(self) -> InThisProcess:
        self._setup = self.workload.make()
        if self.name in peers.PEERS:
            peers.PEERS[self.name](self._setup)
        return self

    def __exit__(self, *_: object) -> None:
        del self._setup

    def _ask(self, command, *arguments):
        return worker._obey(self._setup, None, command, *arguments)


def test_a_bench_finds_the_bytes_and_bits_of_a_checkpoint(monkeypatch) -> None:
    monkeypatch.setattr(measuring, "Variant", InThisProcess)
    with measuring.Bench(TINY, num_pairs=1) as bench:
        row = bench.measure("checkpoint")
    assert bench.rows == [row]
    assert row["equal"] is True
    assert row["num_parts_compared"] == 14  # loss, generator, 6 parameters and their gradients
    # Three results of 64 KiB fewer at the peak, and each of the three checkpoints keeps the random state, 5056 bytes.
    assert bench.eager.activations - row["activation_bytes"] == 3 * (64 * 1024 - 5056)
    assert row["peak_bytes"] < bench.eager.peak
    assert row["cpu_time_ratio"] > 0


def test_a_variant_past_its_timeout_is_ended_and_told() -> None:
    slow = Workload("slow", "", functools.partial(_build_slowly, seconds=60.0))
    with Variant(slow, "eager", timeout_seconds=0.5) as variant, pytest.raises(VariantError, match=r"not done after 0\.5 s"):
        variant.trace_step()
    assert not variant._process.is_alive()
