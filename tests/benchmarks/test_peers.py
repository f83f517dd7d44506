"""That the peers do what their names say, in calls and bytes of tiny models."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import peers
from workloads import Setup


class CountCalls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket._qualified_op_name.split("::")[1]] += 1
        return func(*args, **(kwargs or {}))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(x).view(2, 4, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind()
        return x + torch.sigmoid(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(2, 4, 8))


def make_setup() -> Setup:
    torch.manual_seed(0)
    model = nn.Sequential(Attention(), Attention())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = (torch.randn(2, 4, 8, requires_grad=True),)
    return Setup(model, optimizer, batch, lambda model, batch: model(*batch).square().sum(), tuple(model))


@pytest.mark.parametrize(
    ("name", "products", "attentions", "sigmoids"),
    [("checkpoint", 4, 4, 4), ("selective", 2, 2, 4)],
)
def test_selective_checkpoint_keeps_products_and_attention_and_recomputes_the_rest(
    name, products, attentions, sigmoids
) -> None:
    plain, setup = make_setup(), peers.PEERS[name](make_setup())
    with CountCalls() as counted:
        loss = setup.forward_backward()
    assert torch.equal(loss, plain.forward_backward())
    counts = counted.counts
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    assert (counts["addmm"], counts[attention], counts["sigmoid"]) == (products, attentions, sigmoids)


def test_every_kernel_a_selective_checkpoint_keeps_exists_in_this_torch() -> None:
    assert len(peers.EXPENSIVE) == len(set(peers.EXPENSIVE)) == 9


def test_the_compilers_budget_is_what_the_name_says() -> None:
    from torch._functorch import config

    with config.patch(activation_memory_budget=1.0, enable_autograd_cache=True):
        setup = make_setup()
        peers.PEERS["compile 0.25"](setup)
        assert config.activation_memory_budget == 0.25
        assert config.enable_autograd_cache is False
        assert setup.model._compiled_call_impl is not None
