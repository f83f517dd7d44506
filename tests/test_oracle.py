"""The oracle itself: bytes against arithmetic and the profiler's other records, digests against one changed bit."""

from __future__ import annotations

import gc
import itertools
import operator
import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import oracle
import peers
import workloads

KIB = 1024
# state, shapes, memory, stacks, flops, modules, the rest
LEGACY_CONFIG = (
    torch.autograd.ProfilerState.CPU,
    False,
    True,
    False,
    False,
    False,
    torch._C._profiler._ExperimentalConfig(),
)


def make_training() -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.BatchNorm1d(64), nn.Linear(64, 1))
    return model, torch.optim.Adam(model.parameters()), torch.randn(32, 64)


def train_once(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


RECORDERS = pytest.mark.parametrize("record", [oracle.record_alone, oracle.record_shared])


@RECORDERS
def test_peak_is_the_arithmetic_of_allocations_and_frees(record: oracle.Record) -> None:
    def step() -> torch.Tensor:
        one = torch.empty(512 * KIB, dtype=torch.uint8)  # + 512
        two = torch.empty(128 * KIB, dtype=torch.uint8)  # + 128: the peak
        del one  # - 512
        return two

    _, memory = oracle.measure_step(step, record)
    assert list(map(operator.sub, memory.live_bytes[1:], memory.live_bytes)) == [512 * KIB, 128 * KIB, -512 * KIB]
    assert memory.activation_bytes == memory.peak_bytes - memory.baseline_bytes == 640 * KIB


def test_complete_gradients_are_no_activations_from_the_moment_they_are_complete() -> None:
    """Layers of 1 MiB and 512 KiB: the peak is in the backward of the first, when the second's gradient is there."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Tanh(), nn.Linear(512, 256, bias=False))
    x = torch.randn(8, 512)

    def step() -> None:
        model(x).sum().backward()

    step()
    model.zero_grad(set_to_none=True)
    _, memory = oracle.measure_activations(step, model)
    assert [nbytes for _, nbytes in memory.gradients] == [512 * KIB, 1024 * KIB]
    assert memory.gradient_bytes == 512 * KIB
    # The first layer's gradient, not complete yet, the 16 KiB it is computed from, the loss and its gradient.
    assert memory.peak_bytes - memory.baseline_bytes == (512 + 1024 + 16) * KIB + 8
    assert memory.activation_bytes == (1024 + 16) * KIB + 8
    assert all(parameter._post_accumulate_grad_hooks in (None, {}) for parameter in model.parameters())


OLDER = """
import torch, oracle

old = [torch.empty({0}, dtype=torch.uint8)]
_, memory = oracle.measure_step(lambda: (old.clear(), torch.empty({1}, dtype=torch.uint8)), oracle.{2})
print(memory.activation_bytes)
"""


@RECORDERS
def test_a_block_older_than_the_first_recording_counts_as_kept(record: oracle.Record) -> None:
    """In a process of its own: elsewhere a block at the same address may have been recorded, and its size is what is known then."""
    script = OLDER.format(256 * KIB, 128 * KIB, record.__name__)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert int(ran.stdout) == 128 * KIB  # in truth the 256 KiB had gone before


def test_a_step_that_profiles_itself_sees_its_own_allocations_and_loses_none() -> None:
    """Inside backward too, where the engine swaps the thread's state at every node."""
    found: list[list[int]] = []

    def allocate_under_profiler() -> torch.Tensor:
        assert not torch.autograd._profiler_enabled()
        torch.autograd._enable_profiler_legacy(torch.autograd.ProfilerConfig(*LEGACY_CONFIG))
        assert torch.autograd._profiler_enabled()
        tensor = torch.empty(128 * KIB, dtype=torch.uint8)
        events = itertools.chain.from_iterable(torch.autograd._disable_profiler_legacy())
        found.append([event.cpu_memory_usage() for event in events if event.kind() == "memory_alloc"])
        return tensor

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.kept = [torch.empty(512 * KIB, dtype=torch.uint8), allocate_under_profiler()]
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            ctx.kept.append(allocate_under_profiler())
            ctx.kept.pop(0)
            return gradient

    x = torch.zeros(1, requires_grad=True)
    (y, _), memory = oracle.measure_step(lambda: ((y := Node.apply(x)), y.backward()), oracle.record_shared)
    assert found == [[128 * KIB], [128 * KIB]]
    large = [size for size in map(operator.sub, memory.live_bytes[1:], memory.live_bytes) if abs(size) > KIB]
    assert large == [512 * KIB, 128 * KIB, 128 * KIB, -512 * KIB]
    assert torch.autograd._profiler_enabled() is False
    del y


def test_a_shared_recording_leaves_no_callback_behind() -> None:
    def step() -> None:
        torch.autograd._enable_profiler_legacy(torch.autograd.ProfilerConfig(*LEGACY_CONFIG))
        torch.autograd._disable_profiler_legacy()

    before = _count_callbacks()
    oracle.measure_step(step, oracle.record_shared)
    assert _count_callbacks() == before


def _count_callbacks() -> int:
    """How many profiler callbacks see one operation: more than before where one was left behind."""
    torch.autograd._enable_profiler_legacy(torch.autograd.ProfilerConfig(*LEGACY_CONFIG))
    torch.arange(3)
    return sum(event.name() == "aten::arange" for thread in torch.autograd._disable_profiler_legacy() for event in thread)


def test_baseline_counts_a_storage_once_and_a_gradient_nobody_holds() -> None:
    gc.collect()
    before = oracle.count_live_bytes()
    weight = torch.ones(1000, requires_grad=True)  # 4000 bytes
    views = [weight.detach()[:10], weight.detach().view(10, 100)]
    weight.sum().backward()  # 4000 more, its Python object never made
    assert oracle.count_live_bytes() - before == 8000
    del views


def test_chrome_trace_and_event_tree_of_the_profiler_agree_on_every_allocation() -> None:
    from torch._C._profiler import _EventType

    model, optimizer, x = make_training()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        train_once(model, optimizer, x)
    tree: list[tuple[int, int]] = []
    stack = list(profiler.profiler.kineto_results.experimental_event_tree())
    while stack:
        event = stack.pop()
        stack.extend(event.children)
        if event.tag == _EventType.Allocation:
            tree.append((event.start_time_ns, event.extra_fields.alloc_size))
    allocations = oracle.read_allocations(profiler)
    assert len(allocations) > 50
    assert sorted(allocations) == sorted(size for _, size in tree)


def test_equal_runs_have_equal_digests() -> None:
    digests = []
    for _ in range(2):
        model, optimizer, x = make_training()
        digests.append(oracle.digest_state(model, optimizer, train_once(model, optimizer, x)))
    assert oracle.compare_digests(*digests) == []
    # loss, generator, 6 parameters with gradient and 3 pieces of Adam's state each, 3 buffers
    assert len(digests[0]) == 2 + 6 * (2 + 3) + 3


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda m, o: m[0].weight.grad.view(-1)[7].mul_(-1), "gradient/0.weight"),
        (lambda m, o: setattr(m[3].bias, "grad", None), "gradient/3.bias"),
        (lambda m, o: m[2].num_batches_tracked.add_(1), "buffer/2.num_batches_tracked"),
        (lambda m, o: o.state[m[2].weight]["exp_avg_sq"].add_(1e-9), "optimizer/2.weight/exp_avg_sq"),
        (lambda m, o: o.state[m[0].bias].pop("exp_avg"), "optimizer/0.bias/exp_avg"),
        (lambda m, o: torch.rand(1), "random/cpu"),
    ],
)
def test_a_digest_names_the_part_that_changed(change, part) -> None:
    model, optimizer, x = make_training()
    loss = train_once(model, optimizer, x)
    before = oracle.digest_state(model, optimizer, loss)
    with torch.no_grad():
        change(model, optimizer)
    assert oracle.compare_digests(before, oracle.digest_state(model, optimizer, loss)) == [part]


# Published with the workloads: bytes of the plain step at its start and its peak, then of checkpoint per block.
PEAK_BYTES = {
    "W1": (82_293_300, 748_342_996, 239_699_484),
    "W2": (139_397_328, 1_083_527_384, 957_325_272),
    "W3": (11_143_112, 628_359_776, 292_178_336),
    "W4": (40_205_872, 633_457_672, 408_601_352),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PEAK_BYTES)
def test_workload_takes_the_published_bytes_by_either_recorder(name: str) -> None:
    recorders = (oracle.record_alone, oracle.record_shared)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the workspaces of convolutions depend on it
    try:
        measured = []
        for prepare in (lambda setup: setup, peers.checkpoint_blocks):
            gc.collect()
            elsewhere = oracle.count_live_bytes()  # what other tests left
            setup = prepare(workloads.WORKLOADS[name].make())
            setup.step()  # the optimizer's state arrives
            alone, shared = (oracle.measure_step(setup.step, record)[1] for record in recorders)
            assert alone.live_bytes == shared.live_bytes
            measured.append((alone.baseline_bytes - elsewhere, alone.peak_bytes - elsewhere))
            del setup
    finally:
        torch.set_num_threads(threads)
    baseline, eager, checkpoint = PEAK_BYTES[name]
    assert measured == [(baseline, eager), (baseline, checkpoint)]
