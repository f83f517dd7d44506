"""Scripts as users write them, run plainly and under memfit; each prints digests of all that training changed."""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import oracle
from memfit import api
from memfit.core.replay import replay
from memfit.runtime.script import ScriptRun, execute, exit_code_of

# What memfit takes for a moment and does not count: the generator's state before and after a call that draws, two rows of a fingerprint.
MOMENT_BYTES = 2 * 5056 + 2 * 8192

HELPER = '''
import hashlib
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width, dropout=0.1):
        super().__init__()
        self.norm, self.linear, self.dropout = nn.LayerNorm(width), nn.Linear(width, width), nn.Dropout(dropout)

    def forward(self, x):
        x = self.linear(self.norm(x))
        return self.dropout(x * 0.5 * (1.0 + torch.erf(x / 1.41421)))


class Net(nn.Module):
    def __init__(self, width=32, depth=4, dropout=0.1):
        super().__init__()
        self.first = nn.Linear(8, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(depth))
        self.last = nn.Linear(width, 4)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


def batch(number, size=512):
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(size, 8, generator=generator)
    return x, torch.randint(0, 4, (size,), generator=generator)


def tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors(each)


def digest(*things):
    """Of parameters, buffers, gradients, optimizer state and the random state, bit for bit."""
    total = hashlib.sha256(bytes(torch.get_rng_state().tolist()))
    for thing in things:
        found = list(tensors(thing.state_dict() if hasattr(thing, "state_dict") else thing))
        if isinstance(thing, nn.Module):
            found += [p.grad if p.grad is not None else torch.zeros(1) for p in thing.parameters()]
        assert found
        for tensor in found:
            total.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()
'''


def live_bytes() -> int:
    gc.collect()
    return oracle.count_live_bytes()


@dataclass
class Scripts:
    """Runs scripts in one directory."""

    directory: Path
    capsys: pytest.CaptureFixture[str]

    def write(self, source: str, name: str = "train.py") -> str:
        (self.directory / "helper.py").write_text(HELPER)
        (self.directory / name).write_text(
            "import torch\nfrom torch import nn\nfrom torch.nn import functional as F\n" + source
        )
        return str(self.directory / name)

    def run_plain(self, path: str, *args: str) -> tuple[str, int]:
        """What the script prints, and its exit code, without a session."""
        error = None
        sys.modules.pop("helper", None)
        self.capsys.readouterr()
        try:
            execute(path, list(args))
        except BaseException as caught:
            error = caught
        return self.capsys.readouterr().out, exit_code_of(error)

    def run(self, path: str, *args: str, **options) -> tuple[str, ScriptRun]:
        """What it prints under memfit, and how that ended."""
        sys.modules.pop("helper", None)
        self.capsys.readouterr()
        ran = api.run_script(path, list(args), **options)
        return self.capsys.readouterr().out, ran

    def budget(self, share: float, path: str, *args: str, in_this_process: bool = True) -> int:
        """This share of the script's own peak, and what other tests have left in this process on top, if the script runs in it."""
        sys.modules.pop("helper", None)
        elsewhere = live_bytes()
        peak = replay(api.trace_script(path, list(args))).peak_bytes
        return int(share * (peak - elsewhere)) + (live_bytes() if in_this_process else 0)

    def compare(self, source: str, *args: str, share: float = 0.7, **options) -> ScriptRun:
        """Run the script plainly and within `share` of its peak; what it prints must be the same, within the budget."""
        path = self.write(source)
        plain, code = self.run_plain(path, *args)
        assert code == 0, plain
        assert plain, "the script printed nothing to compare"
        budget = self.budget(share, path, *args)
        out, ran = self.run(path, *args, budget=budget, **options)
        if ran.error is not None:
            raise ran.error
        assert out == plain
        assert ran.result.num_steps > 0
        assert ran.result.peak_bytes <= budget
        assert ran.result.certificate.num_mismatched == 0
        return ran


@pytest.fixture
def scripts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Scripts(tmp_path, capsys)
    torch.set_num_threads(threads)
