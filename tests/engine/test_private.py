"""Every private PyTorch name memfit leans on is there and does what engine/private.py says."""

from __future__ import annotations

import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.engine import private
from memfit.engine.tape import Tape


def test_in_backward_is_true_inside_a_gradient_hook_only() -> None:
    seen = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda gradient: seen.append(private.in_backward()))
    assert not private.in_backward()
    y.sum().backward()
    assert seen == [True]
    assert not private.in_backward()


def test_num_holders_counts_tensors_on_the_storage_and_not_the_python_object() -> None:
    x = torch.ones(4)
    storage = x.untyped_storage()
    assert private.num_holders(storage) == 1
    view = x[1:]
    assert private.num_holders(storage) == 2
    del view, x
    assert private.num_holders(storage) == 0


def test_run_with_allocations_gives_the_result_and_every_allocation_in_order() -> None:
    def run() -> torch.Tensor:
        one = torch.empty(1 << 20, dtype=torch.uint8)
        two = torch.empty(1 << 10, dtype=torch.uint8)
        del one
        return two

    result, deltas = private.run_with_allocations(run)
    assert result.numel() == 1 << 10
    assert deltas == [1 << 20, 1 << 10, -(1 << 20)]
    assert not private.is_profiling()


def test_is_on_top_is_false_once_somebody_stacked_a_mode_or_hooks_upon_the_tape() -> None:
    class Other(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    tape = Tape()
    tape.enter()
    try:
        assert private.is_on_top(tape, tape.pack_hook)
        with Other():
            assert not private.is_on_top(tape, tape.pack_hook)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            assert not private.is_on_top(tape, tape.pack_hook)
        assert private.is_on_top(tape, tape.pack_hook)
    finally:
        tape.exit()
    assert torch._C._len_torch_function_stack() == 0
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_a_view_keeps_its_base_and_a_linear_of_three_dimensions_gives_a_view():
    base = torch.ones(6)
    assert private.base_of(base) is None
    assert private.base_of(base.view(2, 3)[0]) is base
    out = torch.nn.Linear(2, 3)(torch.ones(4, 5, 2))
    assert private.base_of(out).shape == (20, 3)
    assert private.num_holders(out.untyped_storage()) == 2


def test_the_innermost_dispatch_mode_is_told_and_taken_off() -> None:
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    assert private.top_dispatch_mode() is None
    outer = Mode()
    with outer:
        Mode().__enter__()
        assert private.top_dispatch_mode() is not outer
        private.pop_dispatch_mode()
        assert private.top_dispatch_mode() is outer
    assert private.top_dispatch_mode() is None


def test_backward_number_is_another_one_in_each_backward_pass() -> None:
    numbers = []
    x = torch.ones(2, requires_grad=True)
    for _ in range(2):
        y = x * 2
        y.register_hook(lambda gradient: numbers.append(private.backward_number()))
        y.sum().backward()
    assert private.backward_number() == -1
    assert len(set(numbers)) == 2
    assert -1 not in numbers


def test_only_views_tells_views_from_what_writes_or_makes() -> None:
    aten = torch.ops.aten
    assert all(map(private.only_views, (aten.t.default, aten.view.default, aten.split.Tensor, aten.detach.default)))
    made = (aten.add.Tensor, aten.add_.Tensor, aten.add.out, aten._unsafe_view.default, aten.native_layer_norm.default)
    assert not any(map(private.only_views, made))
    assert not private.only_views(aten._foreach_add_.List)  # gives nothing back


def test_at_end_of_backward_is_called_once_with_the_gradients_in_place_and_refused_outside() -> None:
    seen = []
    x = torch.ones(2, requires_grad=True)
    y = x * 3
    y.register_hook(lambda _: private.at_end_of_backward(lambda: seen.append(x.grad.tolist())))
    y.sum().backward()
    assert seen == [[3.0, 3.0]]
    with pytest.raises(RuntimeError, match="during backward pass"):
        private.at_end_of_backward(lambda: None)


def test_read_saved_names_what_a_node_holds_until_backward_frees_it() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    y = torch.sigmoid(x)
    [(name, saved)] = private.read_saved(y.grad_fn)
    assert (name, saved.data_ptr()) == ("result", y.data_ptr())
    [(name, leaf)] = private.read_saved(y.grad_fn.next_functions[0][0])
    assert name == "variable"
    assert leaf is x
    y.sum().backward()
    assert private.read_saved(y.grad_fn) == []


def test_read_saved_sees_what_a_function_written_in_python_saved() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    x = torch.ones(2, requires_grad=True)
    [(_, saved)] = private.read_saved(Double.apply(x).grad_fn)
    assert saved.data_ptr() == x.data_ptr()


def test_read_saved_runs_no_hook_of_the_programs() -> None:
    unpacked = []
    x = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: unpacked.append(1) or tensor):
        y = torch.sigmoid(x)
    assert private.read_saved(y.grad_fn) == []
    assert unpacked == []


class _Counting(torch.overrides.TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_the_version_is_read_past_a_function_mode() -> None:
    x = torch.ones(2)
    x.add_(1)
    with _Counting() as mode:
        assert private.version_of(x) == 1
        assert mode.names == []
        x.add_(1)
        assert (private.version_of(x), mode.names) == (2, ["add_"])


def test_a_function_mode_comes_off_only_from_the_top_and_goes_back_only_where_it_was() -> None:
    mode, other = _Counting(), _Counting()
    assert private.take_off(mode) is None
    with mode:
        with other:
            assert private.take_off(mode) is None
        depth = private.take_off(mode)
        assert depth == 0
        torch.ones(2)
        with other:
            assert not private.put_back(mode, depth)
        assert private.put_back(mode, depth)
        torch.zeros(2)
    assert mode.names == ["zeros"]
    assert torch._C._len_torch_function_stack() == 0


def test_only_wrappers_of_a_transform_have_a_level() -> None:
    levels = []

    def function(x: torch.Tensor) -> torch.Tensor:
        levels.append(private.transform_level(x))
        return x.sin()

    x = torch.ones(3)
    torch.func.vmap(function)(x)
    assert levels == [1]
    assert private.transform_level(x) == -1


def test_use_count_counts_what_autograd_saved_without_a_hook() -> None:
    x = torch.ones(2, requires_grad=True) * 1
    assert private.use_count(x) == 1
    y = x.sin()  # saves x itself
    assert private.use_count(x) == 2
    del y
    assert private.use_count(x) == 1


def test_is_hooked_is_true_for_a_hook_and_for_a_retained_gradient() -> None:
    x, y = (torch.ones(2, requires_grad=True) * 1 for _ in range(2))
    assert not private.is_hooked(x)
    x.register_hook(lambda gradient: None)
    y.retain_grad()
    assert private.is_hooked(x)
    assert private.is_hooked(y)


def test_module_call_names_the_frames_between_a_call_and_forward_where_hooks_are() -> None:
    class Looking(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> list[object]:
            frame, found = sys._getframe(1), []
            while frame.f_code in private.MODULE_CALL:
                found.append(frame.f_code)
                frame = frame.f_back
            return found

    hook = torch.nn.modules.module.register_module_forward_pre_hook(lambda module, args: None)
    try:
        found = Looking()(torch.ones(1))
    finally:
        hook.remove()
    assert found == list(reversed(private.MODULE_CALL))


def test_has_foreign_hooks_sees_every_kind_of_hook_but_those_of_a_tape() -> None:
    module = torch.nn.ReLU()
    tape = Tape()
    tape.enter()
    try:
        assert not private.has_foreign_hooks(module)
        for register in ("forward", "forward_pre", "full_backward", "full_backward_pre"):
            hook = getattr(module, f"register_{register}_hook")(lambda *args: None)
            assert private.has_foreign_hooks(module)
            hook.remove()
        hook = torch.nn.modules.module.register_module_forward_hook(lambda *args: None)
        assert private.has_foreign_hooks(module)
        hook.remove()
        assert not private.has_foreign_hooks(module)
    finally:
        tape.exit()
