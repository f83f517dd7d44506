"""What a person has today, put around a workload: PyTorch's checkpoints, its compiler's knob, Hugging Face's switch.

    checkpoint        every block under torch.utils.checkpoint
    selective         the same, keeping what matrix products, convolutions and attention made
    compile 0.5       torch.compile(backend="aot_eager") with activation_memory_budget = 0.5: autograd's graph cut anew, eager's kernels
    hf checkpoint     model.activation_checkpointing_enable() of `transformers`, gradient_checkpointing_enable() until version 5

Checkpoints update the running statistics of batch norm twice a step (the second forward is a forward in training mode); the
compiler below 1 draws dropout anew in backward. Both are measured all the same: peers in bytes and seconds, not in results.
aot_eager and not inductor, since the question is which tensors are kept, and results are compared bit for bit.
https://docs.pytorch.org/docs/stable/checkpoint.html, https://pytorch.org/blog/activation-checkpointing-techniques/
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from workloads import Setup

CHECKPOINT, SELECTIVE, HF_CHECKPOINT = "checkpoint", "selective", "hf checkpoint"
COMPILE_BUDGETS = (1.0, 0.75, 0.5, 0.25)

# Every overload that does the arithmetic of a matrix product, a convolution or fused attention on CPU or CUDA.
EXPENSIVE = [
    getattr(torch.ops.aten, name).default
    for name in (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "convolution",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
]


def checkpoint_blocks(setup: Setup, **options: Any) -> Setup:
    """The same setup, each block now under torch.utils.checkpoint(use_reentrant=False); parameter names stay."""
    for block in setup.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **options)  # type: ignore[method-assign]
    return setup


def checkpoint_blocks_selectively(setup: Setup) -> Setup:
    """As checkpoint_blocks, the results of EXPENSIVE kept. PyTorch raises in backward where a kept one was overwritten."""
    return checkpoint_blocks(setup, context_fn=functools.partial(create_selective_checkpoint_contexts, EXPENSIVE))


def compile_with_budget(setup: Setup, budget: float) -> Setup:
    """The same setup, its model compiled, for this process's life with the fraction `budget` of what its forward would save."""
    from torch._functorch import config

    config.activation_memory_budget = budget
    config.enable_autograd_cache = False  # an entry of another budget would do for this one
    setup.model.compile(backend="aot_eager")
    return setup


def checkpoint_as_transformers_does(setup: Setup) -> Setup:
    """The same setup, the switch of its `transformers` model on; gradient_checkpointing_enable is its older name."""
    setup.model.activation_checkpointing_enable()  # non-reentrant, every layer
    return setup


def name_of_compiled(budget: float) -> str:
    return f"compile {budget:g}"


# What a peer does to a setup, by its name.
PEERS: dict[str, Callable[[Setup], Setup]] = {
    CHECKPOINT: checkpoint_blocks,
    SELECTIVE: checkpoint_blocks_selectively,
    **{name_of_compiled(budget): functools.partial(compile_with_budget, budget=budget) for budget in COMPILE_BUDGETS},
    HF_CHECKPOINT: checkpoint_as_transformers_does,
}
