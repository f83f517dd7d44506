"""The tape: what stock eager PyTorch lets a library see of a training step, turned into recipes and handles.

A TorchFunctionMode sees every tensor function call; saved_tensors_hooks see every tensor autograd saves. With a policy alone the
tape records only the calls the plan replays; while measuring or guarding (`record_all`) it records them all.
Costs (one thread, torch 2.13 CPU) are measured by benchmarks/overhead.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from memfit.core.errors import UnsupportedError
from memfit.engine import functions
from memfit.engine.aside import Aside
from memfit.engine.cell import Call, Cell, Handle, view_of
from memfit.engine.filing import forget_dead, unpin_all, unpin_dead
from memfit.engine.fingerprint import fingerprint
from memfit.engine.frames import learn_counts
from memfit.engine.handles import pack_saved, unpack_saved
from memfit.engine.need import add_need, drop_need, let_go
from memfit.engine.observing import Counts, Observer
from memfit.engine.packing import pack, workspace_bytes
from memfit.engine.places import Places
from memfit.engine.policy import Policy
from memfit.engine.private import in_backward, is_in_compiled, run_backward
from memfit.engine.recording import needs_gradient, record
from memfit.engine.traits import TRAITS
from memfit.engine.writes import let_out, run_writing

_COMPILED = (
    "The program runs torch.compile, which would run plain here while memfit measures and compiled later: neither its memory nor its "
    "last bits would be those of your run. Leave torch.compile out (TORCH_COMPILE_DISABLE=1 in the environment does), or use its "
    "own torch._functorch.config.activation_memory_budget."
)


class Tape(TorchFunctionMode):
    """Records, evicts and restores between `enter` and `exit`. One tape a thread at a time.

    policy: what to evict, or None. record_all: record every call (measuring, guarding). verify: fingerprint what is evicted.
    pin_sources: hold what recipes read from outside the tape until backward, so that anything can be evicted later (guarding).
    """

    def __init__(self) -> None:
        super().__init__()
        self.record_all = False
        self.verify = False
        self.pin_sources = False
        self.observer: Observer | None = None
        self.on_root: Callable[[torch.nn.Module, Any], None] | None = None  # told before a module the program itself calls
        self.on_enter: Callable[[tuple[int, str, int]], None] | None = (
            None  # told (section, path, invocation) of each module call
        )
        self.counts = Counts()
        self.places = Places()
        self.cells: dict[int, Cell] = {}
        self.on_storage_death = forget_dead(self.cells)
        self.pins: list[Cell] = []
        self.paused = 0
        self.num_packing = 0
        self.restoring: Cell | None = None
        self.seq = 0
        self.current: Call | None = None
        self.saved_now: list[Handle] = []
        self.num_pending = 0  # handles that hold nothing
        self.num_saved = 0  # tensors that autograd has saved
        self._aside = Aside(self)
        self._undo: list[Callable[[], None]] = []

    # ---- life ----------------------------------------------------------------------------------------------------

    def enter(self) -> None:
        """Install the mode, the saved-tensor hooks and the module hooks."""
        module_hooks = torch.nn.modules.module
        before = module_hooks.register_module_forward_pre_hook(self._before_module)
        after = module_hooks.register_module_forward_hook(self._after_module, always_call=True)
        self.pack_hook = partial(pack_saved, self)
        saved = torch.autograd.graph.saved_tensors_hooks(self.pack_hook, partial(unpack_saved, self))
        self.__enter__()
        saved.__enter__()
        self.paused += 1
        learn_counts()
        self.paused -= 1
        self._undo = [
            before.remove,
            after.remove,
            self._aside.leave,
            lambda: saved.__exit__(),
        ]
        self.places.begin_section(0)

    def exit(self) -> None:
        """Take everything off again. Graphs that are still alive can still be run backward."""
        self._aside.come_back()
        while self._undo:
            self._undo.pop()()
        unpin_all(self)

    def end_step(self) -> None:
        """The optimizer has stepped: what lives on is content from outside, and places count from zero again."""
        self._aside.come_back()
        unpin_all(self)
        for cell in self.cells.values():
            if cell.need == 0:
                cell.call = None
        self.places.begin_section(0)

    def start_over(self) -> None:
        """Count sections from zero again: what comes next is planned as if the step began here."""
        self.places.begin_section(0)

    def restart_section(self) -> None:
        """The policy changed between two steps: look it up anew."""
        self.places.begin_section(self.places.section)

    @staticmethod
    def unpin(cell: Cell) -> None:
        """Hold the cell's content no longer than something evicted needs it."""
        cell.pinned = False
        if cell.need == 0:
            cell.storage = None

    @property
    def is_restoring(self) -> bool:
        """Whether the tape itself is at work: what is allocated now is not the program's."""
        return self.paused > 0

    def pin(self, cell: Cell) -> None:
        """Hold the cell's content until backward begins, and longer while something evicted needs it."""
        if not cell.pinned and (storage := cell.living_storage()) is not None:
            cell.storage = storage
            cell.pinned = True
            self.pins.append(cell)

    def abandon(self, cell: Cell) -> bool:
        """Hold a kept cell no more: from now on it is recomputed where it is needed. False where that is impossible."""
        if cell.call is None:
            return False
        cell.keep = cell.pinned = False
        if cell.storage is not None:
            if cell.need == 0:
                cell.storage = None
            elif not let_go(cell):
                cell.keep = True
                return False
        self.evict_cell(cell)
        return True

    def evict_cell(self, cell: Cell) -> int:
        """Let go of what autograd saved of the cell, where that can be brought back; how many tensors went."""
        handles = [handle for ref in cell.handles if (handle := ref()) is not None and handle.alias is not None]
        return sum(self.evict_handle(handle) for handle in handles)

    def let_go_again(self, cell: Cell) -> bool:
        """Free restored content that only pending handles wait for; it will be restored once more. False where others read it."""
        if cell is self.restoring or cell.call is None or cell.storage is None:
            return False
        num_pending = sum(1 for ref in cell.handles if (handle := ref()) is not None and handle.alias is None)
        return cell.need == num_pending and let_go(cell)

    def fall_asleep(self) -> None:
        """Have no effect from now on, without being taken off: for a forked child in which others lie on top of the tape."""
        self.paused += 1

    # ---- where we are ----------------------------------------------------------------------------------------------

    @property
    def policy(self) -> Policy | None:
        return self.places.policy

    @policy.setter
    def policy(self, policy: Policy | None) -> None:
        self.places.follow(policy)

    def _before_module(self, module: torch.nn.Module, args: Any) -> None:
        if self.paused:
            return
        if self.places.is_outside:
            if self.on_root is not None:
                self.on_root(module, args)
            if self.pins and not self.pin_sources and torch.is_grad_enabled():
                unpin_dead(self)
            self._aside.come_back()
            self.places.begin_root()
        self.enter_module(module)

    def enter_module(self, module: torch.nn.Module) -> None:
        """A module's forward pass begins."""
        self.places.enter(module)
        frame = self.places.frame
        if self.on_enter is not None and frame.invocation >= 0:
            self.on_enter((self.places.section, frame.path, frame.invocation))

    def before_optimizer(self, _: Any, args: Any, kwargs: Any) -> None:
        """A hook for whoever has one before optimizer steps: stand aside if nothing evicted waits for what the optimizer overwrites. (A
        closure is a program.) The tape registers none itself: it is taken off inside such hooks, while PyTorch goes through them."""
        if not (self.record_all or self.paused or self.num_pending or len(args) > 1 or kwargs):
            self._aside.stand()

    def after_optimizer(self, *_: Any) -> None:
        """The hook for after them."""
        self._aside.come_back()

    def _after_module(self, module: torch.nn.Module, _: Any, output: Any) -> None:
        if not self.paused:
            self.places.leave(module, output)

    # ---- recording -------------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        traits = TRAITS[func]
        frame = self.places.frame
        is_unplanned = traits.is_plain and frame.planned is None and not self.record_all and not (kwargs and "out" in kwargs)
        if is_unplanned or traits.is_looking or self.paused:
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        if traits.kind is functions.LETTING_OUT:
            let_out(self, args[0])
            return func(*args, **kwargs)
        if func is torch.Tensor.backward or func is torch.autograd.backward:
            return self._run_backward(func, *args, **kwargs)
        if self.record_all and is_in_compiled():
            raise UnsupportedError(_COMPILED)
        if not torch.is_grad_enabled():
            if functions.may_write(func, args, kwargs):
                return run_writing(self, func, args, kwargs)
            return func(*args, **kwargs)
        if in_backward():
            return run_writing(self, func, args, kwargs)
        if self.places.backward_seen:
            self.places.begin_section(self.places.section + 1)
        entry = None
        is_differentiable = (frame.planned is not None or self.record_all) and needs_gradient(args, kwargs)
        if is_differentiable:
            frame.ordinal += 1
            entry = frame.planned.get(frame.ordinal) if frame.planned is not None else None
        if entry is None and not (self.record_all and is_differentiable):
            if functions.may_write(func, args, kwargs):
                return run_writing(self, func, args, kwargs)
            return func(*args, **kwargs)
        return record(self, func, types, args, kwargs, frame, entry)

    def _run_backward(self, func: Any, tensors: Any, *args: Any, **kwargs: Any) -> None:
        """A backward pass with the mode on: hooks that run inside it may overwrite what is needed."""
        names: tuple[str, ...] = ("gradient", "retain_graph", "create_graph", "inputs")
        if func is torch.autograd.backward:
            names = ("grad_tensors", "retain_graph", "create_graph", "grad_variables", "inputs")
        given = dict(zip(names, args, strict=False)) | kwargs
        gradients = given.get(names[0])
        inputs = given.get("inputs")
        if given.get("grad_variables") is not None or (inputs is not None and not len(inputs)):
            func(tensors, *args, **kwargs)  # deprecated or refused: PyTorch's own words
            return
        with self:
            run_backward(tensors, gradients, given.get("retain_graph"), given.get("create_graph", False), inputs)

    @property
    def is_packing(self) -> bool:
        """Whether noise is being packed at the moment: nobody may evict then."""
        return self.num_packing > 0

    def pack_noise(self, storage: torch.UntypedStorage, num_elements: int, dtype: torch.dtype) -> torch.UntypedStorage:
        """The bits of the noise on the storage."""
        self.paused += 1
        self.num_packing += 1
        try:
            bits = pack(view_of(storage, (dtype, 0, torch.Size([num_elements]), (1,)))).untyped_storage()
            if self.observer is not None:
                self.observer.on_packed(bits, workspace_bytes(num_elements))
            return bits
        finally:
            self.num_packing -= 1
            self.paused -= 1

    # ---- saved tensors ---------------------------------------------------------------------------------------------

    def settle_handle(self, handle: Handle, call: Call | None) -> None:
        """The saving call is over: which cell the handle is on is known now, and whether it holds its tensor."""
        assert handle.alias is not None
        cell = self.cells.get(handle.alias.untyped_storage()._cdata, handle.cell)  # a successor, if written in place
        handle.cell = cell
        if self.observer is not None:
            cell.handles += (weakref.ref(handle),)
            self.observer.on_save(handle, call)
        if cell.evict and not cell.written:
            self.evict_handle(handle)

    def evict_handle(self, handle: Handle) -> bool:
        """Let the handle's tensor go; True unless its content could not be brought back."""
        cell = handle.cell
        if cell.written:  # through another version counter: eager reads what is there now (else it would refuse to)
            return False
        if handle.alias is None or cell.call is None or cell.exposed or handle.probe._version != handle.version:
            return False
        if not add_need(cell):
            self.counts.num_kept_instead += 1
            return False
        if self.verify and cell.fingerprint is None:
            self.paused += 1
            cell.fingerprint = fingerprint(handle.alias.untyped_storage())
            self.paused -= 1
        if self.observer is not None:
            self.observer.on_evicted(handle)
        handle.let_go()
        self.num_pending += 1
        cell.pending += (weakref.ref(handle),)
        self.counts.num_evicted += 1
        return True

    def on_drop(self, handle: Handle) -> None:
        """Autograd let the handle go (called by its finaliser)."""
        if handle.alias is None:
            self.num_pending -= 1
            drop_need(handle.cell)
        if self.observer is not None:
            self.observer.on_drop(handle)
