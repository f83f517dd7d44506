"""Nothing memfit does moves a generator the program draws from: in a fresh process, where all is imported for the first time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import random, sys
import numpy as np
import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.1))))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def step():
    x = torch.randn(512, 32) * (2 if random.random() < 0.5 else 1) + float(np.random.rand())
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def numbers():
    return random.random(), np.random.rand(), torch.rand(1).item()


def begin():
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(7)


def plainly():
    for _ in range(4):
        step()


def fit():
    import memfit
    with memfit.fit(model, optimizer, budget="0.8 MiB") as session:
        plainly()
    assert session.plan is not None and session.plan.moves, session.plan
    str(session.result())
    session.report()


def trace():
    import memfit
    memfit.trace(step, 4)


def plan():
    import memfit
    found = memfit.trace(step, 4)
    memfit.plan(found, found.meta["measured_peak_bytes"] * 9 // 10)


def watch():
    import memfit
    for _ in (watched := memfit.watch_growth(range(4))):
        step()
    print(watched)


begin()
plainly()
expected = numbers()
assert "rich" not in sys.modules
begin()
globals()[sys.argv[1]]()
found = numbers()
assert found == expected, (found, expected)
"""


@pytest.mark.parametrize("verb", ["fit", "trace", "plan", "watch"])
def test_the_program_draws_the_numbers_it_draws_without_memfit(verb: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([sys.executable, str(script), verb], env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
