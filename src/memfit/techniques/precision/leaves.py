"""Leaves: the tensors a backward pass will add gradients to, and whether the optimizer updates what they hold.

Found by walking the graph from the loss, about 0.75 us a node (torch 2.13). So nothing needs to be known about models or
optimizers, and an input that requires a gradient gets it in the right unit too.

Flat parameter buffers (`contiguous_params.ContiguousParams`, and every optimizer of that kind) make one tensor of all weights,
let the weights be views of it and hand the optimizer the one tensor. Training stops, without an error, when the two are parted: by a
cast or a move of the model afterwards, or by a `zero_grad` that drops one of the two gradients.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from memfit.core.errors import PrecisionError

_ADVICE_FLAT = (
    "Cast and move the model first, build the flat buffer after that, the optimizer last. memfit's O1 and O2 leave the weights where "
    "they are, so a flat buffer made before the first forward pass stays whole."
)


def leaves_of(outputs: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The leaves that `backward` of these tensors will reach, each once. Graphs inside a reentrant checkpoint are not seen."""
    found: dict[torch.Tensor, None] = {}
    waiting = []
    for output in outputs:
        if output.grad_fn is not None:
            waiting.append(output.grad_fn)
        elif output.requires_grad:
            found[output] = None
    seen = set(waiting)
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is None or node in seen:
                continue
            seen.add(node)
            if type(node).__name__ == "AccumulateGrad":
                found[node.variable] = None  # type: ignore[attr-defined]
            else:
                waiting.append(node)
    return list(found)


def address_of(tensor: torch.Tensor) -> int:
    """Where the tensor's storage lies: equal for all views of one buffer while it lives."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)


def find_flat(module: torch.nn.Module) -> str | None:
    """The name of a weight that is part of a larger buffer, such as a flat parameter buffer; None where each has its own storage.

    The weights of recurrent layers do not count: on CUDA PyTorch itself puts them into one buffer, and again after a cast.
    """
    for path, each in module.named_modules():
        for name, weight in () if isinstance(each, torch.nn.RNNBase) else each.named_parameters(recurse=False):
            if weight.layout is torch.strided and weight.untyped_storage().nbytes() > weight.nbytes:
                return f"{path}.{name}" if path else name
    return None


def check_connected(
    optimizer: torch.optim.Optimizer, leaves: list[torch.Tensor], others: Iterable[torch.optim.Optimizer]
) -> None:
    """Raise PrecisionError if the step that comes now cannot reach the weights the last backward passes gave gradients to.

    leaves: those the passes since the last step reached. others: all optimizers known, for weights that are another one's.
    """
    held = [p for group in optimizer.param_groups for p in group["params"]]
    reached = {id(leaf) for leaf in leaves}
    if not leaves or any(id(p) in reached for p in held):
        return
    leaves_at = {address_of(leaf): leaf for leaf in leaves}
    shared = [p for p in held if address_of(p) in leaves_at]
    if shared:
        _check_gradients(shared, leaves)
        return
    owned = {address_of(p) for each in others for group in each.param_groups for p in group["params"]}
    orphans = [leaf for leaf in leaves if isinstance(leaf, torch.nn.Parameter) and address_of(leaf) not in owned]
    if orphans:
        raise PrecisionError(
            f"This {type(optimizer).__name__} would update storage that the model no longer reads: the backward pass gave gradients to "
            f"{len(orphans)} parameters, the first of shape {tuple(orphans[0].shape)}, and no optimizer holds them or a buffer they lie in. "
            f"The parameters were given new storage after the optimizer's were made, so the model would stop learning. {_ADVICE_FLAT}"
        )


def _check_gradients(flat: list[torch.Tensor], leaves: list[torch.Tensor]) -> None:
    """The optimizer holds the buffer the weights lie in: does it hold the gradients' too?"""
    for buffer in flat:
        inside = [leaf for leaf in leaves if address_of(leaf) == address_of(buffer) and leaf.grad is not None]
        gradient = buffer.grad
        if not inside or (gradient is not None and all(address_of(each.grad) == address_of(gradient) for each in inside)):  # type: ignore[arg-type]
            continue
        lost = "has no gradient" if gradient is None else "still has the gradient of an earlier step"
        raise PrecisionError(
            f"The flat parameter buffer of {buffer.numel():,} numbers {lost}, while the {len(inside)} parameters in it have new gradients of "
            "their own: a zero_grad with set_to_none=True, PyTorch's default, dropped one of the two, so the model would stop learning. "
            "Call zero_grad(set_to_none=False) on the optimizer, and none on the model."
        )
