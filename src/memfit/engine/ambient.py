"""What surrounds a call and changes its result: generators, autocast, attention kernel choice. Captured before, put back after.

Source of the random-state rule: DESIGN.md section 2 (save before the call, restore around the replay, put the current one back).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

RandomState = tuple[bytes, tuple[tuple[int, bytes], ...]]  # CPU state (5 KB), (device index, CUDA state) pairs
Autocast = tuple[tuple[str, bool, torch.dtype], ...]


def random_state(cuda_devices: tuple[int, ...] = ()) -> RandomState:
    """The states of the default CPU generator and of the given CUDA devices' generators. Bytes, for a recipe holds them to the end: they are
    bookkeeping like itself, no tensors of the step."""
    cuda_states = tuple((index, torch.cuda.get_rng_state(index).numpy().tobytes()) for index in cuda_devices)
    return torch.get_rng_state().numpy().tobytes(), cuda_states


def set_random_state(state: RandomState) -> None:
    torch.set_rng_state(_as_tensor(state[0]))
    for index, cuda_state in state[1]:
        torch.cuda.set_rng_state(_as_tensor(cuda_state), index)


def _as_tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def autocast_state() -> Autocast:
    """(device type, enabled, dtype) of the autocast contexts that are on; () when none is."""
    state: Autocast = ()
    for device_type in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device_type):
            state += ((device_type, True, torch.get_autocast_dtype(device_type)),)
    return state


def is_autocast_on() -> bool:
    """Whether any autocast context is on."""
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


def attention_flags() -> tuple[bool, ...]:
    """Which kernels `scaled_dot_product_attention` may choose from (the `sdpa_kernel` context sets these)."""
    cuda = torch.backends.cuda
    return (
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
    )


def _set_attention_flags(flags: tuple[bool, ...]) -> None:
    cuda = torch.backends.cuda
    cuda.enable_flash_sdp(flags[0])
    cuda.enable_mem_efficient_sdp(flags[1])
    cuda.enable_math_sdp(flags[2])
    cuda.enable_cudnn_sdp(flags[3])


@contextmanager
def surroundings(state: RandomState | None, autocast: Autocast, flags: tuple[bool, ...] | None) -> Iterator[None]:
    """Run the body as if it stood where the call stood; afterwards everything is as before."""
    if state is None and flags is None and not autocast and not is_autocast_on():
        yield
        return
    with ExitStack() as stack:
        if state is not None:
            stack.callback(set_random_state, random_state(tuple(index for index, _ in state[1])))
            set_random_state(state)
        if flags is not None:
            stack.callback(_set_attention_flags, attention_flags())
            _set_attention_flags(flags)
        enabled = {device: dtype for device, _, dtype in autocast}
        for device_type in ("cpu", "cuda"):
            wanted = device_type in enabled
            if wanted or torch.is_autocast_enabled(device_type):
                # The weight cache of the user's own autocast must not receive what a replay casts.
                stack.enter_context(torch.autocast(device_type, enabled.get(device_type), enabled=wanted, cache_enabled=False))
        yield
