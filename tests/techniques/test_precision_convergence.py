"""Training at O1 and O2 ends where float32 ends: the last loss within 5 % of it over five seeds. benchmarks/precision.py has the longer runs."""

from __future__ import annotations

import statistics

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

from memfit.core.precision import choose
from memfit.runtime.precision import Precision

NUM_SEEDS, NUM_EPOCHS, BAND = 5, 6, 0.05


def train(level: str, half: str, seed: int) -> tuple[float, list[float]]:
    """Mean loss of the last epoch on scikit-learn's digits, and the first losses."""
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16, torch.tensor(digits.target)
    torch.manual_seed(seed)
    with Precision(choose(level, half)):
        model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 10))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        first: list[float] = []
        for _ in range(NUM_EPOCHS):
            losses = []
            for places in torch.randperm(len(labels)).split(128):
                loss = F.cross_entropy(model(images[places]), labels[places])
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                losses.append(loss.item())
            first = first or losses[:3]
    return statistics.mean(losses), first


@pytest.fixture(scope="module")
def float32():
    return [train("O0", "bf16", seed) for seed in range(NUM_SEEDS)]


@pytest.mark.parametrize("half", ["bf16", "fp16"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_last_loss_is_that_of_float32_within_five_percent_over_five_seeds(float32, level, half):
    for seed, (wanted, first) in enumerate(float32):
        loss, ours_first = train(level, half, seed)
        assert wanted < 0.35 * first[0]  # it learns at all
        assert abs(loss / wanted - 1) < BAND, seed
        assert ours_first != first  # and not by training in float32
