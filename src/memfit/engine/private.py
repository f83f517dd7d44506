"""Every private PyTorch name memfit leans on, with what stands in for it. `tests/engine/test_private.py` watches them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch


def in_backward() -> bool:
    """Whether this thread is inside an autograd backward pass.

    Source: `torch.utils.checkpoint` and `torch.autograd.graph` use the same call (torch >= 2.1).
    """
    return torch._C._current_graph_task_id() != -1


def only_views(operation: Any) -> bool:
    """Whether all an operation of a dispatch mode gives back are views of its arguments, and it writes into none: by its schema.

    Source: `OpOverload._schema`, which `torch.utils._python_dispatch` reads for the same.
    """
    returns = operation._schema.returns
    return bool(returns) and all(each.alias_info is not None and not each.alias_info.is_write for each in returns)


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Call it when the backward pass that runs now has ended, all gradients in place. RuntimeError outside of one.

    Source: DistributedDataParallel and FSDP end their communication so.
    """
    variable: Any = torch.autograd.Variable
    variable._execution_engine.queue_callback(call)


def num_holders(storage: torch.UntypedStorage) -> int:
    """How many tensors hold the storage, the given Python object not counted. Source: `torch._inductor.cudagraph_trees`."""
    return torch._C._storage_Use_Count(storage._cdata) - 1


def use_count(tensor: torch.Tensor) -> int:
    """How often C++ holds the tensor: 1 for the Python object, more where autograd saved it without a hook. Source: `Tensor._use_count`."""
    return tensor._use_count()  # type: ignore[attr-defined]


def is_hooked(tensor: torch.Tensor) -> bool:
    """Whether somebody waits for the tensor's gradient: a hook on it, or `retain_grad`. Source: `Tensor._backward_hooks`, in torch since 0.2."""
    return tensor._backward_hooks is not None or tensor.retains_grad


def _code_of_module_call() -> tuple[CodeType, CodeType, CodeType]:
    outer, middle = torch.nn.Module._wrapped_call_impl.__code__, torch.nn.Module._call_impl.__code__
    inner = next(each for each in middle.co_consts if isinstance(each, CodeType) and each.co_name == "inner")
    return outer, middle, inner


# What runs between a call of a module and its `forward` where hooks are, outermost first. Source: torch/nn/modules/module.py.
MODULE_CALL = _code_of_module_call()


def has_foreign_hooks(module: torch.nn.Module) -> bool:
    """Whether hooks that are not memfit's see the module's arguments. Source: torch/nn/modules/module.py."""
    all_modules: Any = torch.nn.modules.module
    own = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    backward = (all_modules._global_backward_hooks, all_modules._global_backward_pre_hooks)
    forward = (*all_modules._global_forward_hooks.values(), *all_modules._global_forward_pre_hooks.values())
    return any(map(len, (*own, *backward))) or not all(str(hook.__module__).startswith("memfit.") for hook in forward)


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor this one is a view of, which it keeps alive; None if it is none. Source: `Tensor._base`, in torch since 0.4."""
    return tensor._base


def run_with_allocations(run: Callable[[], Any]) -> tuple[Any, list[int]]:
    """The result of `run()`, and every allocation (+bytes) and free (-bytes) of the CPU allocator meanwhile, in order.

    Uses the thread-local autograd profiler, which prints nothing and costs about 0.3 ms; the public `torch.profiler` (kineto)
    reports the same events for ten times the time. Raises RuntimeError where a profiler runs already (see `is_profiling`).
    """
    autograd: Any = torch.autograd
    config = autograd.ProfilerConfig(
        autograd.ProfilerState.CPU, False, True, False, False, False, torch._C._profiler._ExperimentalConfig()
    )
    autograd._enable_profiler_legacy(config)
    try:
        result = run()
    finally:
        records: Any = autograd._disable_profiler_legacy()
    deltas = [each.cpu_memory_usage() for thread in records for each in thread if each.kind() == "memory_alloc"]
    return result, deltas


def is_profiling() -> bool:
    """Whether somebody's profiler is on in this thread."""
    autograd: Any = torch.autograd
    return autograd._profiler_enabled()


def is_on_top(mode: torch.overrides.TorchFunctionMode, pack_hook: Callable[..., Any]) -> bool:
    """Whether the mode and the saved-tensor hooks are the innermost ones, so that leaving them leaves nobody else's."""
    depth = torch._C._len_torch_function_stack()
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return depth > 0 and torch._C._get_function_stack_at(depth - 1) is mode and top is not None and top[0] == pack_hook


def take_off(mode: torch.overrides.TorchFunctionMode) -> int | None:
    """Take the function mode off this thread's stack if it is the innermost; the depth of the stack without it, or None if it is not.

    Left on, it would cost 0.7 us each function call and attribute of a tensor, whatever it does with them.
    """
    depth = torch._C._len_torch_function_stack() - 1
    if depth < 0 or torch._C._get_function_stack_at(depth) is not mode:
        return None
    torch._C._pop_torch_function_stack()
    return depth


def put_back(mode: torch.overrides.TorchFunctionMode, depth: int) -> bool:
    """Undo `take_off` that gave `depth`. False where the stack is not as it was: the mode would come off in somebody else's place."""
    if torch._C._len_torch_function_stack() != depth:
        return False
    torch._C._push_on_torch_function_stack(mode)
    return True


def version_of(tensor: torch.Tensor) -> int:
    """The tensor's version counter, read past a function mode that is on (0.2 instead of 0.8 us): what an unpack hook needs."""
    with torch._C.DisableTorchFunction():
        return tensor._version


def top_dispatch_mode() -> Any:
    """The innermost dispatch mode, or None."""
    depth = torch._C._len_torch_dispatch_stack()
    return torch._C._get_dispatch_stack_at(depth - 1) if depth else None


def pop_dispatch_mode() -> None:
    """Take the innermost dispatch mode off without a word to it."""
    torch._C._pop_torch_dispatch_stack(None)


def stacks() -> tuple[int, Any, int]:
    """What lies on this thread's stacks of function modes, saved-tensor hooks and dispatch modes: equal means nothing was added."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return torch._C._len_torch_function_stack(), top, torch._C._len_torch_dispatch_stack()


def is_in_compiled() -> bool:
    """Whether the code that runs now is inside a torch.compiled function that dynamo does not compile (a dispatch mode is on)."""
    return "torch._dynamo" in sys.modules and torch._C._dynamo.eval_frame.get_eval_frame_callback() is not None


def run_backward(tensors: Any, gradients: Any, retain_graph: bool | None, create_graph: bool, inputs: Any) -> None:
    """What `torch.autograd.backward` does once nothing overrides it. (Called through the public name it would be dispatched to the
    function mode again, which takes the mode off while hooks run.) Source: `torch/autograd/__init__.py`."""
    autograd: Any = torch.autograd
    tensors = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
    inputs = () if inputs is None else (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    gradients = autograd._tensor_or_tensors_to_tuple(gradients, len(tensors))
    gradients = autograd._make_grads(tensors, gradients, is_grads_batched=False)
    if retain_graph is None:
        retain_graph = create_graph
    autograd.graph._engine_run_backward(
        tensors, gradients, retain_graph, create_graph, inputs, allow_unreachable=True, accumulate_grad=True
    )


# The level of the `torch.func` transform (vmap, grad, jvp) whose wrapper the tensor is, -1 for one whose storage is its own.
# (Bound once: it is asked for every tensor of a recorded call.)
transform_level: Callable[[torch.Tensor], int] = torch._C._functorch.maybe_get_level


def keywords_of_module_call() -> dict[str, Any]:
    """The keyword arguments of the module call whose global pre-hook is running; {} if they cannot be found.

    Global pre-hooks are given positional arguments only (`register_module_forward_pre_hook`), so this reads them from the frame
    of `torch.nn.Module._call_impl` that called the hook.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == torch.nn.modules.module.__file__:
            keywords = frame.f_locals.get("kwargs")
            return keywords if isinstance(keywords, dict) else {}
        frame = frame.f_back
    return {}


def backward_number() -> int:
    """A number of the backward pass this thread is in, another one for each; -1 outside. Source: as `in_backward`."""
    return torch._C._current_graph_task_id()


_SAVED_NAMES: dict[type, tuple[str, ...]] = {}


def read_saved(node: Any) -> list[tuple[str, torch.Tensor]]:
    """The tensors an autograd node holds, with the names autograd gives them; none after they were freed.

    Left out: what a saved-tensor hook packed, since unpacking runs the hook. Source: `torch/csrc/autograd/saved_variable.h`.
    """
    kind = type(node)
    if kind.__name__ == "AccumulateGrad":
        return [("variable", node.variable)]
    names = _SAVED_NAMES.get(kind)
    if names is None:
        names = _SAVED_NAMES[kind] = tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))
    found: list[tuple[str, torch.Tensor]] = []
    for name in names:
        try:
            raw = getattr(node, name)
            if any(
                getattr(each, "unpack_hook", None) is not None for each in (raw if isinstance(raw, (list, tuple)) else (raw,))
            ):
                continue
            # a Function written in Python names them `saved_tensors`
            saved = getattr(node, "saved_tensors" if name == "_raw_saved_tensors" else name.replace("_raw", "", 1))
        except (RuntimeError, AttributeError, TypeError):  # freed by a backward pass, or nothing was saved here
            continue
        for each in saved if isinstance(saved, (list, tuple)) else (saved,):
            if isinstance(each, torch.Tensor):
                found.append((name.removeprefix("_raw_saved_"), each))
    return found
