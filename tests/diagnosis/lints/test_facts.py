"""What the rules believe of PyTorch, asked of PyTorch itself."""

import pytest
import torch
from torch import nn

from memfit.diagnosis.lints import facts


def saved_bytes(module, x):
    """Bytes of the distinct storages that a forward saves for backward."""
    seen = {}

    def pack(tensor):
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        kept.append(tensor)
        return tensor

    kept = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = module(x)
    del out
    return sum(seen.values())


@pytest.mark.parametrize("name", sorted(facts.SAVE_OUTPUT))
def test_backward_raises_where_the_saved_output_was_written(name):
    x = torch.rand(4, 4).add(0.5).requires_grad_()
    function = getattr(torch, name)
    out = function(x, -1) if "softmax" in name else function(x)
    out += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("name", ["LayerNorm", "Linear", "LeakyReLU", "GELU"])
def test_backward_goes_through_where_the_input_is_what_is_saved(name):
    module = nn.LayerNorm(4) if name == "LayerNorm" else nn.Linear(4, 4) if name == "Linear" else getattr(nn, name)()
    out = module(torch.rand(4, 4, requires_grad=True))
    out += 1
    out.sum().backward()


@pytest.mark.parametrize("name", sorted(facts.INPLACE_SAVES_LESS))
def test_these_activations_save_one_map_less_in_place(name):
    activation = getattr(nn, name)

    def model(inplace):
        return nn.Sequential(nn.Conv1d(4, 4, 1), nn.InstanceNorm1d(4), activation(inplace=inplace), nn.Conv1d(4, 4, 1)).eval()

    x = torch.rand(2, 4, 64)  # one map is 2 * 4 * 64 float32
    assert saved_bytes(model(False), x) - saved_bytes(model(True), x) == 2 * 4 * 64 * 4


def test_relu_saves_nothing_less_in_place():
    x = torch.rand(2, 4, 64)
    out_of_place = nn.Sequential(nn.Conv1d(4, 4, 1), nn.InstanceNorm1d(4), nn.ReLU(), nn.Conv1d(4, 4, 1))
    in_place = nn.Sequential(nn.Conv1d(4, 4, 1), nn.InstanceNorm1d(4), nn.ReLU(inplace=True), nn.Conv1d(4, 4, 1))
    assert saved_bytes(out_of_place, x) == saved_bytes(in_place, x)


def test_cross_entropy_saves_no_logits_and_mean_squared_error_saves_its_input():
    logits, y = torch.rand(8, 16, requires_grad=True), torch.zeros(8, dtype=torch.long)
    pointers = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: pointers.append(t.data_ptr()) or t, lambda t: t):
        loss = nn.functional.cross_entropy(logits, y)
        assert logits.data_ptr() not in pointers
        loss = loss + nn.functional.mse_loss(logits, torch.zeros(8, 16))
        assert logits.data_ptr() in pointers


def test_every_method_of_a_module_is_known_as_such():
    assert {name for name in dir(nn.Module) if not name.startswith("_")} <= facts.MODULE_METHODS
