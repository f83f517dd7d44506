"""What a training step truly takes and computes, read without memfit: the exact allocator trace, the bits, CPU time.

Memory (CPU). torch.profiler with profile_memory=True writes every allocation and free of PyTorch's CPU allocator, with
address and size, into its Chrome trace. peak = bytes of all storages alive when the step starts + highest running sum.
The recording slows a step by a few per cent and moves no byte. PyTorch reports the free of a block only if it recorded
its allocation: one from before the first recording counts as kept, so such a peak is too high and never too low. Not in
it: what oneDNN or MKL take outside PyTorch's allocator, fragmentation of malloc, code. CUDA has its own counters.
Format: https://docs.pytorch.org/docs/stable/profiler.html (export_chrome_trace, instant events named "[memory]").
"""

from __future__ import annotations

import functools
import gc
import hashlib
import itertools
import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]


@dataclass(frozen=True)
class StepMemory:
    """Memory of one step.

    baseline_bytes: all storages alive at its start. peak_bytes: the most at any moment, baseline included.
    live_bytes: bytes alive at the start and after each allocator event, in order.
    gradients: of each parameter's gradient, as it was complete: place in live_bytes, and bytes. Empty if nobody looked.
    """

    baseline_bytes: int
    live_bytes: tuple[int, ...]
    gradients: tuple[tuple[int, int], ...] = ()

    @property
    def peak_bytes(self) -> int:
        return max(self.live_bytes)

    @property
    def gradient_bytes(self) -> int:
        """Complete gradients at the moment of the peak, its first if it comes several times."""
        peak_place = self.live_bytes.index(self.peak_bytes)
        return sum(nbytes for place, nbytes in self.gradients if place <= peak_place)

    @property
    def activation_bytes(self) -> int:
        """Peak over the step's start, less complete gradients: activations, temporaries, workspaces."""
        return self.peak_bytes - self.baseline_bytes - self.gradient_bytes


Record = Callable[[Callable[[], Any]], tuple[Any, list[int]]]


def record_alone(step: Callable[[], Any]) -> tuple[Any, list[int]]:
    """What `step()` returns, and every CPU allocation (+bytes) and free (-bytes) meanwhile, in order.

    The public way. While it records, no other profiler of this thread can.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Profiler.*")
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
            result = step()
    return result, read_allocations(profiler)


def read_allocations(profiler: profile) -> list[int]:
    """Bytes of every CPU allocator event of a finished profile in order; frees are negative."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    memory = [event["args"] for event in events if event.get("name") == "[memory]" and event["args"]["Device Type"] == 0]
    return [args["Bytes"] for args in sorted(memory, key=lambda args: args["Ev Idx"])]


def record_shared(step: Callable[[], Any]) -> tuple[Any, list[int]]:
    """As record_alone, for a step that profiles single operations itself, as memfit does to find hidden workspaces."""
    result, allocations, _ = _record_shared(step, ())
    return result, allocations


def _record_shared(step: Callable[[], Any], parameters: Iterable[Tensor]) -> tuple[Any, list[int], list[tuple[int, int]]]:
    """As record_shared, and when each parameter's gradient was complete: allocator events before that, bytes.

    Under record_alone such a step would see that a profiler is on, not measure, and behave as it never does for a user.
    Here its uses of PyTorch's thread-local profiler go to the one that runs already, which can be read without being
    stopped, so none of its allocations is lost. Private names; tests/test_oracle.py holds it to record_alone.
    """
    enable, disable, is_on = names = ("_enable_profiler_legacy", "_disable_profiler_legacy", "_profiler_enabled")
    originals = {name: getattr(torch.autograd, name) for name in names}
    keep_running = torch._C._autograd._ProfilerDisableOptions(False, True)  # cleanup_tls_state, consolidate
    allocations: list[int] = []
    inner_is_on = False

    def read(*options: Any) -> list[Any]:
        records = originals[disable](*options)
        events = itertools.chain.from_iterable(records)
        allocations.extend(event.cpu_memory_usage() for event in events if event.kind() == "memory_alloc")
        return records

    def inner_enable(config: Any) -> None:
        nonlocal inner_is_on
        read(keep_running)  # what came before is not the inner one's
        inner_is_on = True

    def inner_disable(*options: Any) -> list[Any]:
        nonlocal inner_is_on
        inner_is_on = False
        return read(keep_running)

    gradients: list[tuple[int, int]] = []

    def note_gradient(nbytes: int, _: Tensor) -> None:
        read(keep_running)
        gradients.append((len(allocations), nbytes))

    hooks = [each.register_post_accumulate_grad_hook(functools.partial(note_gradient, each.nbytes)) for each in parameters]
    extra = torch._C._profiler._ExperimentalConfig()
    state = torch.autograd.ProfilerState.CPU
    originals[enable](torch.autograd.ProfilerConfig(state, False, True, False, False, False, extra))
    for name, ours in {enable: inner_enable, disable: inner_disable, is_on: lambda: inner_is_on}.items():
        setattr(torch.autograd, name, ours)
    try:
        result = step()
    finally:
        for hook in hooks:
            hook.remove()
        for name, original in originals.items():
            setattr(torch.autograd, name, original)
        read()
        # A profile once read while running does not take its callback away, and the next profiler would deadlock in it.
        torch._C._autograd._clear_callbacks()
    return result, allocations, gradients


def measure_step(step: Callable[[], Any], record: Record = record_alone) -> tuple[Any, StepMemory]:
    """Run `step` once under the allocator trace; gives what it returned and its memory (CPU bytes)."""
    gc.collect()
    baseline_bytes = count_live_bytes()
    result, allocations = record(step)
    return result, StepMemory(baseline_bytes, tuple(itertools.accumulate(allocations, initial=baseline_bytes)))


def measure_activations(step: Callable[[], Any], model: nn.Module) -> tuple[Any, StepMemory]:
    """As measure_step with record_shared, the model's gradients told apart. Its hooks on parameters stay for this step only."""
    gc.collect()
    baseline_bytes = count_live_bytes()
    parameters = [each for each in model.parameters() if each.requires_grad]
    result, allocations, gradients = _record_shared(step, parameters)
    live_bytes = tuple(itertools.accumulate(allocations, initial=baseline_bytes))
    return result, StepMemory(baseline_bytes, live_bytes, tuple(gradients))


def count_live_bytes(device_type: str = "cpu") -> int:
    """Bytes of all distinct storages that Python or a `.grad` can reach on one type of device."""
    sizes = {}
    for tensor in _all_tensors():
        for one in (tensor, tensor.grad if tensor.is_leaf else None):
            if one is not None and one.device.type == device_type and one.layout == torch.strided:
                storage = one.untyped_storage()
                if storage.device.type == device_type and storage.data_ptr():  # what a compiler traces with has none
                    sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def _all_tensors() -> Iterable[Tensor]:
    return [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]


def digest_state(model: nn.Module, optimizer: Optimizer, loss: Tensor | None = None) -> dict[str, str]:
    """A fingerprint of every bit that a step leaves behind: part -> SHA-256, parts that are missing as 'none'.

    Call it before zero_grad, so that the gradients are there. Parts: loss, parameters, gradients, buffers, optimizer
    state and the random generators (torch on CPU and CUDA). Two runs are equal bit for bit where the two dictionaries
    are equal; a missing gradient is a difference.
    """
    parts: dict[str, Any] = {"loss": loss, "random/cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        parts |= {f"random/cuda:{place}": state for place, state in enumerate(torch.cuda.get_rng_state_all())}
    names = {}
    for name, parameter in model.named_parameters():
        names[parameter] = name
        parts |= {f"parameter/{name}": parameter, f"gradient/{name}": parameter.grad}
    parts |= {f"buffer/{name}": buffer for name, buffer in model.named_buffers()}
    for parameter, state in optimizer.state.items():
        parts |= {f"optimizer/{names[parameter]}/{key}": value for key, value in state.items()}
    return {part: _digest(value) for part, value in parts.items()}


def compare_digests(ours: dict[str, str], theirs: dict[str, str]) -> list[str]:
    """Names of the parts whose bits differ or that only one side has; empty where all is equal."""
    return sorted(part for part in ours.keys() | theirs.keys() if ours.get(part) != theirs.get(part))


def _digest(value: Any) -> str:
    if value is None:
        return "none"
    if not isinstance(value, Tensor):
        return hashlib.sha256(repr(value).encode()).hexdigest()
    # A copy: memory that numpy has seen may be written unseen, so memfit would recompute nothing from it in the next step.
    # reshape, so that a scalar has a dimension whose bytes can be looked at
    bits = value.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
    return hashlib.sha256(f"{value.dtype}{tuple(value.shape)}".encode() + bits.numpy().tobytes()).hexdigest()


class StepTime(NamedTuple):
    """Seconds of a step: CPU time of all threads, wall time, and of the CPU time what was not spent in the system.

    The system's share is page faults nearly alone. glibc's malloc learns, over a process's first steps, to give large blocks back less often:
    BERT-base at 8 x 384 takes 4.1, 2.9, 2.0 and 1.3 s in the system in its first four steps, and 18.8 s +- 0.4 % besides.
    """

    cpu: float
    wall: float
    user: float


def time_step(step: Callable[[], Any], num_steps: int = 1) -> StepTime:
    """Seconds of one of `num_steps` calls, on average."""
    gc.collect()
    start = _read_clocks()
    for _ in range(num_steps):
        step()
    return StepTime(*((now - before) / num_steps for now, before in zip(_read_clocks(), start, strict=True)))


def _read_clocks() -> StepTime:
    user = resource.getrusage(resource.RUSAGE_SELF).ru_utime if resource is not None else os.times().user
    return StepTime(time.process_time(), time.perf_counter(), user)
