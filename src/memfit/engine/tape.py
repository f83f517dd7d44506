"""The tape: what stock eager PyTorch lets a library see of a training step, turned into recipes and handles.

A TorchFunctionMode sees every tensor function call; saved_tensors_hooks see every tensor autograd saves. With a policy alone the
tape records only the calls the plan replays; while measuring or guarding (`record_all`) it records them all.
Costs (one thread, torch 2.13 CPU) are measured by benchmarks/overhead.py.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode

from memfit.core.errors import UnsupportedError
from memfit.core.inplace import SAFE
from memfit.engine import functions
from memfit.engine.ambient import attention_flags, autocast_state, random_state, same_random_state
from memfit.engine.cell import (
    PLAIN_TYPES,
    Call,
    Cell,
    Geometry,
    Handle,
    KeptHandle,
    PackedCell,
    Slot,
    StorageRef,
    Value,
    geometry_of,
    is_plain,
    probe_of,
    view_of,
)
from memfit.engine.fingerprint import fingerprint
from memfit.engine.frames import learn_counts
from memfit.engine.need import add_need, drop_need, let_go, materialise, tensors_in
from memfit.engine.overwriting import in_place_form, why_not
from memfit.engine.packing import draw, pack, unpack
from memfit.engine.policy import CallPolicy, Policy
from memfit.engine.private import in_backward, is_in_compiled, num_holders, run_backward

_COMPILED = (
    "The program runs torch.compile, which would run plain here while memfit measures and compiled later: neither its memory nor its "
    "last bits would be those of your run. Leave torch.compile out (TORCH_COMPILE_DISABLE=1 in the environment does), or use its "
    "own torch._functorch.config.activation_memory_budget."
)
_SMALL_SOURCE_BYTES = 16 << 20

_MODIFIED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: [{kind} {shape}] "
    "is at version {found}; expected version {expected} instead."
)


class Observer(Protocol):
    """Who watches the tape: the recorder of a measured step, the guard. All calls come from the step's own thread."""

    def on_begin(self, call: Call) -> None: ...
    def on_failed(self, call: Call) -> None: ...  # it raised; no on_end follows
    def on_internal(self, call: Call) -> None: ...  # autograd has just saved something inside the call that nobody else sees
    def on_part(
        self, part: Call, cells: list[Cell]
    ) -> None: ...  # a recipe for these cells alone, before their call's own on_end
    def on_end(self, call: Call, cells: list[Cell]) -> None: ...
    def on_save(self, handle: Handle, call: Call | None) -> None: ...
    def on_evicted(self, handle: Handle) -> None: ...
    def on_unpack(self, handle: Handle) -> None: ...
    def on_restored(self, handle: Handle, num_calls: int) -> None: ...
    def on_drop(self, handle: Handle) -> None: ...


class _Frame:
    """One module invocation on the stack."""

    __slots__ = ("invocation", "ordinal", "path", "planned")

    def __init__(self, path: str, invocation: int, planned: dict[int, CallPolicy] | None) -> None:
        self.path = path
        self.invocation = invocation
        self.ordinal = -1
        self.planned = planned


class Counts:
    """What the certificate is made of."""

    def __init__(self) -> None:
        self.num_evicted = self.num_restored = self.num_verified = self.num_replayed_calls = self.num_kept_instead = 0
        self.num_mismatched = self.num_sources_checked = self.num_sources_changed = 0
        self.num_overwritten = self.num_not_overwritten = (
            0  # calls the plan wanted in place: those that were, and those that could not
        )
        self.num_generator_checks = self.num_generators_moved = 0
        self.restore_seconds = 0.0
        self.sources: weakref.WeakSet[Cell] = weakref.WeakSet()  # already counted in num_sources_checked
        self.mismatched_places: list[str] = []


class Tape(TorchFunctionMode):
    """Records, evicts and restores between `enter` and `exit`. One tape a thread at a time.

    policy: what to evict, or None. record_all: record every call (measuring, guarding). verify: fingerprint what is evicted.
    pin_sources: hold what recipes read from outside the tape until backward, so that anything can be evicted later (guarding).
    """

    def __init__(self) -> None:
        super().__init__()
        self.policy: Policy | None = None
        self.record_all = False
        self.verify = False
        self.pin_sources = False
        self.observer: Observer | None = None
        self.on_root: Callable[[torch.nn.Module, Any], None] | None = None  # told before a module the program itself calls
        self.counts = Counts()
        self.section = 0
        self._cells: dict[int, Cell] = {}
        self._pins: list[Cell] = []
        self._paused = 0
        self._num_packing = 0
        self._restoring: Cell | None = None
        self._seq = 0
        self._current: Call | None = None
        self._saved_now: list[Handle] = []
        self._backward_seen = False
        self._invocations: dict[str, int] = {}
        self._invocations_before_root: dict[str, int] = {}
        self._frames: list[_Frame] = []
        self._paths: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()
        self._undo: list[Callable[[], None]] = []

    # ---- life ----------------------------------------------------------------------------------------------------

    def enter(self) -> None:
        """Install the mode, the saved-tensor hooks and the module hooks."""
        module_hooks = torch.nn.modules.module
        before = module_hooks.register_module_forward_pre_hook(self._before_module)
        after = module_hooks.register_module_forward_hook(self._after_module, always_call=True)
        self.pack_hook = self._pack
        saved = torch.autograd.graph.saved_tensors_hooks(self.pack_hook, self._unpack)
        self.__enter__()
        saved.__enter__()
        self._paused += 1
        learn_counts()
        self._paused -= 1
        self._undo = [before.remove, after.remove, lambda: self.__exit__(None, None, None), lambda: saved.__exit__()]
        self._begin_section(0)

    def exit(self) -> None:
        """Take everything off again. Graphs that are still alive can still be run backward."""
        while self._undo:
            self._undo.pop()()
        self._unpin()

    def end_step(self) -> None:
        """The optimizer has stepped: what lives on is content from outside, and places count from zero again."""
        self._unpin()
        for cell in self._cells.values():
            if cell.need == 0:
                cell.call = None
        self._begin_section(0)

    def start_over(self) -> None:
        """Count sections from zero again: what comes next is planned as if the step began here."""
        self._begin_section(0)

    def restart_section(self) -> None:
        """The policy changed between two steps: look it up anew."""
        self._begin_section(self.section)

    def _begin_section(self, section: int) -> None:
        self.section = section
        self._backward_seen = False
        self._invocations.clear()
        self._invocations_before_root.clear()
        if not self._frames:
            self._frames.append(_Frame("", 0, None))
        bottom = self._frames[0]
        bottom.ordinal = -1
        bottom.planned = self._planned("", 0)

    def _planned(self, path: str, invocation: int) -> dict[int, CallPolicy] | None:
        return self.policy.frame(self.section, path, invocation) if self.policy is not None else None

    def _unpin(self) -> None:
        for cell in self._pins:
            self.unpin(cell)
        self._pins.clear()

    def _unpin_dead(self) -> None:
        """Another forward pass begins: let go of what was pinned for a graph that died without a backward pass."""
        kept = []
        for cell, num_references in zip(self._pins, _count_references(self._pins), strict=True):
            is_filed = self._cells.get(cell.ref.key) is cell
            is_alive = cell.storage is not None and num_holders(cell.storage) > 0  # the program may still read it
            if cell.need or is_alive or num_references > _UNREAD_REFERENCES + is_filed:
                kept.append(cell)
            else:
                self.unpin(cell)
        self._pins = kept

    def _pin_source(self, cell: Cell, tensor: torch.Tensor) -> bool:
        """Make what a recipe reads from outside fit to be a source. False: it must be none.

        A probe notices writes nobody told the tape of. It is pinned only where anything may be evicted later; under a plan, what is
        needed is held from the eviction on, and the rest would be held for nothing.

        Memory that is not PyTorch's own (numpy arrays, shared memory) can change without any trace: a copy is pinned if it is small.
        """
        if not cell.pinned and cell.call is None and (cell.exposed or not tensor.untyped_storage().resizable()):
            if cell.nbytes > _SMALL_SOURCE_BYTES:
                return False
            self._paused += 1
            cell.storage = tensor.untyped_storage().clone()
            self._paused -= 1
            cell.pinned = True
            self._pins.append(cell)
            return True
        if self.pin_sources:
            self.pin(cell)
        if cell.probe is None and cell.call is None:
            cell.probe = probe_of(tensor)
            cell.probe_version = tensor._version
        return True

    @staticmethod
    def unpin(cell: Cell) -> None:
        """Hold the cell's content no longer than something evicted needs it."""
        cell.pinned = False
        if cell.need == 0:
            cell.storage = None

    @property
    def is_restoring(self) -> bool:
        """Whether the tape itself is at work: what is allocated now is not the program's."""
        return self._paused > 0

    def pin(self, cell: Cell) -> None:
        """Hold the cell's content until backward begins, and longer while something evicted needs it."""
        if not cell.pinned and (storage := cell.living_storage()) is not None:
            cell.storage = storage
            cell.pinned = True
            self._pins.append(cell)

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
        for ref in cell.handles:
            handle = ref()
            if handle is not None and handle.alias is not None:
                self.evict_handle(handle)
        return True

    def let_go_again(self, cell: Cell) -> bool:
        """Free restored content that only pending handles wait for; it will be restored once more. False where others read it."""
        if cell is self._restoring or cell.call is None or cell.storage is None:
            return False
        num_pending = sum(1 for ref in cell.handles if (handle := ref()) is not None and handle.alias is None)
        return cell.need == num_pending and let_go(cell)

    def fall_asleep(self) -> None:
        """Have no effect from now on, without being taken off: for a forked child in which others lie on top of the tape."""
        self._paused += 1

    # ---- where we are ----------------------------------------------------------------------------------------------

    def _before_module(self, module: torch.nn.Module, args: Any) -> None:
        if self._paused:
            return
        if len(self._frames) == 1:
            if self.on_root is not None:
                self.on_root(module, args)
            if self._pins and not self.pin_sources and torch.is_grad_enabled():
                self._unpin_dead()
            self._invocations_before_root = dict(self._invocations)
        self.enter_module(module)

    def enter_module(self, module: torch.nn.Module) -> None:
        """A module's forward pass begins."""
        path = self._paths.get(module)
        if path is None:
            path = self._name(module)
        if not torch.is_grad_enabled():  # an evaluation now and then must not shift the places of the steps that train
            self._frames.append(_Frame(path, -1, None))
            return
        if self._backward_seen and not in_backward():
            self._begin_section(self.section + 1)
        invocation = self._invocations.get(path, 0)
        self._invocations[path] = invocation + 1
        self._frames.append(_Frame(path, invocation, self._planned(path, invocation)))

    def _after_module(self, module: torch.nn.Module, _: Any, output: Any) -> None:
        if self._paused or len(self._frames) < 2:
            return
        path = self._paths.get(module)
        while len(self._frames) > 1:
            if self._frames.pop().path == path:
                break
        if len(self._frames) == 1 and output is None and sys.exc_info()[0] is not None:
            self._invocations = (
                self._invocations_before_root
            )  # the forward pass failed: it must not shift the places of the next

    def _name(self, module: torch.nn.Module) -> str:
        parent = self._frames[-1].path
        root = f"{parent}.{type(module).__name__}" if parent else type(module).__name__
        for name, child in module.named_modules():
            self._paths.setdefault(child, f"{root}.{name}" if name else root)
        return self._paths[module]

    # ---- recording -------------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = functions.kind_of(func)
        if kind is functions.LETTING_OUT and not self._paused:
            self._let_out(args[0])
            return func(*args, **kwargs)
        if self._paused or kind is functions.LOOKING:
            return func(*args, **kwargs)
        if kind is functions.PLAIN and not self.record_all and self._frames[-1].planned is None and "out" not in kwargs:
            return func(*args, **kwargs)
        if func is torch.Tensor.backward or func is torch.autograd.backward:
            return self._run_backward(func, *args, **kwargs)
        if self.record_all and is_in_compiled():
            raise UnsupportedError(_COMPILED)
        if not torch.is_grad_enabled():
            if functions.may_write(func, args, kwargs):
                return self._run_writing(func, args, kwargs)
            return func(*args, **kwargs)
        if in_backward():
            return self._run_writing(func, args, kwargs)
        if self._backward_seen:
            self._begin_section(self.section + 1)
        frame = self._frames[-1]
        entry = None
        is_differentiable = (frame.planned is not None or self.record_all) and _needs_gradient((args, kwargs))
        if is_differentiable:
            frame.ordinal += 1
            entry = frame.planned.get(frame.ordinal) if frame.planned is not None else None
        if entry is None and not (self.record_all and is_differentiable):
            if functions.may_write(func, args, kwargs):
                return self._run_writing(func, args, kwargs)
            return func(*args, **kwargs)
        return self._record(func, types, args, kwargs, frame, entry)

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

    def _run_writing(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a call that is not recorded but may overwrite content others depend on."""
        if not kwargs and not self._knows_any(args):  # an optimizer's arithmetic on its state
            return func(*args)
        statistics = functions.written_statistics(func, args, kwargs)
        certain = functions.written_lists(func, args)
        known = [(t, t._version) for t in tensors_in((args, kwargs)) if self._cell_if_known(t) is not None]
        target = args[0] if args and "out" not in kwargs and functions.writes_first_only(func) else None
        cells = [self._before_write(tensor) if target is None or tensor is target else None for tensor, _ in known]
        result = func(*args, **kwargs)
        for (tensor, version), cell in zip(known, cells, strict=True):
            if tensor._version != version or any(tensor is each for each in (*statistics, *certain)):
                self._forget(tensor)
            elif cell is not None:
                cell.written = False
        return result

    def _knows_any(self, args: tuple[Any, ...]) -> bool:
        """Whether an argument's storage may be a cell's: quick, and True where it is not simple to say."""
        for each in args:
            if isinstance(each, torch.Tensor):
                if (
                    type(each) not in PLAIN_TYPES
                    or each.layout is not torch.strided
                    or each.untyped_storage()._cdata in self._cells
                ):
                    return True
            elif isinstance(each, (list, tuple)):
                return True
        return False

    def _record(self, func: Any, types: Any, args: Any, kwargs: Any, frame: _Frame, entry: CallPolicy | None) -> Any:
        name = functions.name_of(func)
        if entry is not None and entry.function != name:
            entry = None  # the program took another way this time: nothing planned here
        in_place, is_overwriting = "", False
        if (self.observer is not None or (entry is not None and entry.in_place)) and (
            form := in_place_form(func, args, kwargs)
        ):
            in_place = why_not((func, args, kwargs), self._cell_if_known(args[0]), sys._getframe(2), self._paths.get)
            if entry is not None and entry.in_place:
                is_overwriting = in_place == SAFE
                self.counts.num_overwritten += is_overwriting
                if is_overwriting:
                    func, args, kwargs = form
                else:
                    self.counts.num_not_overwritten += 1
                    entry = entry.out_of_place()
            del form
        values: list[torch.Tensor] = []
        template_args = tuple(_strip(each, values) for each in args)
        template_kwargs = {key: _strip(each, values) for key, each in kwargs.items()} if kwargs else {}
        place = f"{self.section}|{frame.path}#{frame.invocation}/{frame.ordinal}:{name}"
        self._seq += 1
        call = Call(func, place, frame.path, user_line(3) if self.observer is not None else "", self._seq)
        call.in_place, call.is_overwriting = in_place, is_overwriting
        is_recipe = (
            PLAIN_TYPES.issuperset(types)
            and not functions.is_foreign(func)
            and "out" not in kwargs
            and kwargs.get("generator") is None
            and not functions.written_lists(func, args)
            and all(map(is_plain, values))
        )
        versions = [tensor._version for tensor in values]
        if is_recipe:
            call.args, call.kwargs = template_args, template_kwargs
            call.values = [Value(self._cell_of(t), geometry_of(t), t.requires_grad) for t in values]
            statistics = functions.written_statistics(func, args, kwargs)
            is_recipe = not (statistics and functions.saves_statistics(func))
            for tensor, value in zip(values, call.values, strict=True):
                if any(tensor is each for each in statistics):
                    value.scratch = True
                    self._before_write(tensor)
            call.autocast = autocast_state()
            if name in functions.READS_ATTENTION_FLAGS:
                call.attention_flags = attention_flags()
            if any(t.is_cuda for t in values) and not functions.is_reproducible_on_cuda(func):
                is_recipe = torch.are_deterministic_algorithms_enabled()
            if entry is not None or self.pin_sources:
                for tensor, value in zip(values, call.values, strict=True):
                    if not value.scratch and value.cell.call is None:
                        is_recipe = self._pin_source(value.cell, tensor) and is_recipe
        maybe_written: list[tuple[int, Cell | None]] = []
        if functions.may_write(func, args, kwargs):
            targets = values[:1] if is_recipe else values
            maybe_written = [(index, self._before_write(tensor)) for index, tensor in enumerate(targets)]
        draws = functions.may_draw(func)
        if draws:
            devices = tuple({t.device.index for t in values if t.is_cuda})
            self._paused += 1
            state = random_state(devices)
            self._paused -= 1
        outer_call, self._current = self._current, call
        outer_saved, self._saved_now = self._saved_now, []
        if self.observer is not None:
            self.observer.on_begin(call)
        try:
            result = func(*args, **kwargs)
        except BaseException:
            if self.observer is not None:
                self.observer.on_failed(call)
            raise
        finally:
            self._current = outer_call
            saved, self._saved_now = self._saved_now, outer_saved
        if draws:
            self._paused += 1
            if not same_random_state(state, random_state(devices)):
                call.random_state = state
            self._paused -= 1
        call.stops_early = call.random_state is None and (bool(call.autocast) or name in functions.SAVES_BEFORE_WORK)
        for index, cell in maybe_written:
            if cell is not None and values[index]._version == versions[index]:
                cell.written = False
        is_recipe = self._settle_writes(call, values, versions, is_recipe)
        cells = self._settle_results(call, values, result, is_recipe, entry, saved)
        if self.observer is not None:
            self.observer.on_end(call, cells)
        for handle in saved:
            self._settle_handle(handle, call)
        return result

    def _settle_writes(self, call: Call, values: list[torch.Tensor], versions: list[int], is_recipe: bool) -> bool:
        """Find what the call overwrote: argument 0 gets a successor cell; anything else but statistics is no recipe."""
        written = [index for index, tensor in enumerate(values) if tensor._version != versions[index]]
        for tensor, value in zip(values, call.values, strict=False):
            if value.scratch:
                self._forget(tensor)
        if not is_recipe:
            certain = functions.written_lists(call.func, (values,))
            for index, tensor in enumerate(values):
                if index in written or any(tensor is each for each in certain):
                    self._forget(tensor)
            return False
        for index in written:
            if call.values[index].scratch:
                continue
            if index == 0:
                call.writes = 0
            else:
                is_recipe = False
        if not is_recipe:
            for index in written:
                self._forget(values[index])
            call.writes = None
        seen: dict[Cell, None] = {}
        for value in call.values:
            if not value.scratch:
                seen[value.cell] = None
        call.inputs = tuple(seen)
        if call.writes is not None and not self._is_restorable(call.values[0].cell):
            self._forget(values[0])
            call.writes = None
            return False
        return is_recipe

    @staticmethod
    def _is_restorable(cell: Cell) -> bool:
        """Whether overwritten content can be had again: by its own recipe, or because the tape holds a copy."""
        return cell.call is not None or cell.storage is not None

    def _settle_results(
        self,
        call: Call,
        values: list[torch.Tensor],
        result: Any,
        is_recipe: bool,
        entry: CallPolicy | None,
        saved: list[Handle],
    ) -> list[Cell]:
        """Cells for what the call made: an overwritten argument, internal tensors seen by the hooks, results."""
        cells: list[Cell] = [each for ref in call.outputs.values() if (each := ref()) is not None]
        if call.writes is not None:
            old = call.values[call.writes].cell
            old.written = True
            if old.pending:
                self._follow_alien_write(old)
            new = Cell(old.ref, old.nbytes, old.device, 0)
            new.previous = old
            new.exposed = old.exposed
            self._cells[old.ref.key] = new
            self._adopt(new, call, "mut0", cells)
        for number, tensor in enumerate(tensors_in(result)):
            if not is_plain(tensor):
                continue
            known = self._cells.get(tensor.untyped_storage()._cdata)
            if known is None:
                self._adopt(self._file(tensor), call, f"out{number}", cells)
            elif known.call is call and known.position.startswith("in"):
                del call.outputs[known.position]
                known.position = f"out{number}"
                known.version = tensor._version
                call.outputs[known.position] = weakref.ref(known)
            elif known.call is call and known.position == "mut0":
                known.version = tensor._version
        if not is_recipe:
            for cell in cells:
                cell.call = None
            call.outputs.clear()
            if entry is not None and "mut0" in entry.pin and (written := self._cell_if_known(values[0])) is not None:
                self.pin(written)  # content from outside, overwritten: what the plan keeps is the result
            return cells
        self._split(call, values, cells, saved)
        for cell in cells:
            if entry is not None:
                cell.evict = cell.position in entry.evict
                cell.keep = cell.position in entry.keep or cell.position in entry.pin
                if cell.position in entry.pin:
                    self.pin(cell)
            elif self.policy is not None:
                cell.keep = True
        return cells

    def _split(self, call: Call, values: list[torch.Tensor], cells: list[Cell], saved: list[Handle]) -> None:
        """Give internal cells a recipe of their own where it is cheaper than the whole call: a dropout's noise its bits (and these
        another drawing), the copies a matrix product makes of its arguments the call's beginning."""
        internal = [cell for cell in cells if cell.position.startswith("in")]
        is_dropout = functions.is_dropout(call.func)
        if not internal or (call.writes is not None and not is_dropout):
            return
        noise = internal[0]
        if is_dropout and len(internal) == 1 and noise.device.type == "cpu":
            probability = functions.dropout_probability(call.args, call.kwargs)
            geometry = next((geometry_of(each.probe) for each in saved if each.cell is noise), None)
            if geometry is None or geometry[0] != values[0].dtype or noise.nbytes != geometry[2].numel() * geometry[0].itemsize:
                return
            part = call.part()
            num_elements = geometry[2].numel()
            packed = PackedCell(self, noise, num_elements, geometry[0])
            packed.call = again = call.part()  # where the bits are gone as well
            again.func, again.kwargs, again.values, again.inputs = draw, {}, [], ()
            again.args = (geometry[2], geometry[3], geometry[0], probability)
            again.makes, again.autocast = "bits", ()
            again.outputs[packed.position] = weakref.ref(packed)
            part.func, part.kwargs = unpack, {}
            part.args = (Slot(0), num_elements, geometry[0], probability)
            part.values, part.inputs = [Value(packed, packed.geometry, False)], (packed,)
            part.makes, part.autocast, part.random_state = "in", (), None
            call.func = torch.mul if call.writes is None else torch.Tensor.mul_
            call.args, call.kwargs = (Slot(0), Slot(1)), {}
            call.values, call.inputs = [call.values[0], Value(noise, geometry, False)], (*call.inputs, noise)
            call.random_state = None
        elif call.stops_early and call.writes is None:
            part = call.part()
        else:
            return
        for cell in internal:
            del call.outputs[cell.position]
            cell.call = part
            part.outputs[cell.position] = weakref.ref(cell)
        if self.observer is not None:
            self.observer.on_part(part, internal)

    @property
    def is_packing(self) -> bool:
        """Whether noise is being packed at the moment: nobody may evict then."""
        return self._num_packing > 0

    def pack_noise(self, storage: torch.UntypedStorage, num_elements: int, dtype: torch.dtype) -> torch.UntypedStorage:
        """The bits of the noise on the storage."""
        self._paused += 1
        self._num_packing += 1
        try:
            return pack(view_of(storage, (dtype, 0, torch.Size([num_elements]), (1,)))).untyped_storage()
        finally:
            self._num_packing -= 1
            self._paused -= 1

    @staticmethod
    def _adopt(cell: Cell, call: Call, position: str, cells: list[Cell]) -> None:
        cell.call = call
        cell.position = position
        call.outputs[position] = weakref.ref(cell)
        cells.append(cell)

    # ---- cells -----------------------------------------------------------------------------------------------------

    def _file(self, tensor: torch.Tensor) -> Cell:
        """A new cell for the tensor's storage, filed under it; external until somebody adopts it."""
        storage = tensor.untyped_storage()
        ref = StorageRef(storage, self._on_storage_death)
        ref.key = storage._cdata
        cell = Cell(ref, storage.nbytes(), tensor.device, tensor._version)
        self._cells[ref.key] = cell
        return cell

    def _on_storage_death(self, ref: Any) -> None:
        cell = self._cells.get(ref.key)
        if cell is not None and cell.ref is ref:
            del self._cells[ref.key]

    def _cell_if_known(self, tensor: torch.Tensor) -> Cell | None:
        if not is_plain(tensor):
            return None
        return self._cells.get(tensor.untyped_storage()._cdata)

    def _cell_of(self, tensor: torch.Tensor) -> Cell:
        """The cell of the tensor's storage; unknown or unaccountably changed content is a new external cell."""
        cell = self._cells.get(tensor.untyped_storage()._cdata)
        if cell is None:
            return self._file(tensor)
        if cell.version != tensor._version and (cell.call is None or tensor._version != 0):
            if cell.call is None and cell.storage is None and cell.need == 0:
                cell.version = tensor._version
                return cell
            if cell.call is None or cell.version < tensor._version:
                self._lose(cell)
                return self._file(tensor)
        return cell

    def _before_write(self, tensor: torch.Tensor) -> Cell | None:
        """The tensor's storage is about to be overwritten: if the tape holds its content for somebody, hold a copy instead.

        From here on nothing may take hold of the storage as this content (the guard may evict while the call runs), so the
        cell counts as written; where the call turns out not to write, say so with `cell.written = False`.
        """
        cell = self._cell_if_known(tensor)
        if cell is None or cell.written:
            return None
        if cell.storage is not None and cell.call is not None and self.pin_sources:  # the guard is short of bytes, not of time
            cell.pinned = cell.keep = False
            if cell.need == 0:
                cell.storage = None
            else:
                let_go(cell)
        if cell.storage is not None and (cell.need > 0 or cell.pinned):
            self._paused += 1
            cell.storage = cell.storage.clone()
            cell.probe = None  # the copy is ours alone
            self._paused -= 1
        cell.written = True
        return cell

    def _follow_alien_write(self, cell: Cell) -> None:
        """The cell was overwritten. Autograd checks the version counter of each tensor it saved; where the write moved another counter
        (through `.data`, or an array's) it will read what is there now. So what was evicted must hold what is there now."""
        storage = cell.ref()
        for ref in cell.pending:
            handle = ref()
            if handle is None or handle.alias is not None or handle.probe._version != handle.version or storage is None:
                continue
            assert handle.geometry is not None
            self._paused += 1
            handle.alias = view_of(storage, handle.geometry)
            self._paused -= 1
            self.counts.num_kept_instead += 1
            drop_need(cell)
        cell.pending.clear()

    def _let_out(self, tensor: torch.Tensor) -> None:
        """The program gets at the tensor's memory (`.numpy()`), and may write there unseen: nothing in it is a recipe's from now on."""
        cell = self._cell_if_known(tensor)
        if cell is None:
            return
        self._before_write(tensor)
        self._follow_alien_write(cell)
        self._forget(tensor)
        self._cells[cell.ref.key].exposed = True

    def _forget(self, tensor: torch.Tensor) -> None:
        """The tensor's storage was overwritten by a call that is no recipe: its content is external from now on."""
        cell = self._cell_if_known(tensor)
        if cell is not None:
            if cell.pending:
                self._follow_alien_write(cell)
            living = cell.ref()
            if cell.storage is not None and living is not None and cell.storage._cdata == living._cdata:
                self._lose(cell)
            cell.written = True
            self._file(tensor)

    def _lose(self, cell: Cell) -> None:
        """Content the tape held was overwritten unseen: go back to its recipe. Without one, restoring will raise."""
        cell.written = True
        if cell.storage is None:
            return
        cell.pinned = False
        if not let_go(cell):
            cell.storage = None
            cell.call = None

    # ---- saved tensors ---------------------------------------------------------------------------------------------

    def _pack(self, tensor: torch.Tensor) -> Any:
        call = self._current
        number = 0
        if call is not None:
            number = call.num_saved
            call.num_saved = number + 1
        if self._paused or not is_plain(tensor) or tensor.untyped_storage().nbytes() == 0:
            return KeptHandle(tensor)
        cell = self._cells.get(tensor.untyped_storage()._cdata)
        if cell is None and call is not None:
            cell = self._file(tensor)
            if tensor.dtype is not torch.uint8:  # a workspace (mkldnn's LSTM): its bytes are not all written
                cell.call = call
                cell.position = f"in{number}"
                call.outputs[cell.position] = weakref.ref(cell)
                if self.observer is not None:
                    self.observer.on_internal(call)
        if not self.record_all and call is None and (cell is None or not cell.evict):
            return KeptHandle(tensor)
        if cell is None:
            cell = self._file(tensor)
        handle = Handle(self, cell, tensor)
        if call is not None:
            self._saved_now.append(handle)
        else:
            self._settle_handle(handle, None)
        return handle

    def _settle_handle(self, handle: Handle, call: Call | None) -> None:
        """The saving call is over: which cell the handle is on is known now, and whether it holds its tensor."""
        assert handle.alias is not None
        cell = self._cells.get(handle.alias.untyped_storage()._cdata, handle.cell)  # a successor, if written in place
        handle.cell = cell
        if self.observer is not None:
            cell.handles.append(weakref.ref(handle))
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
            self._paused += 1
            cell.fingerprint = fingerprint(handle.alias.untyped_storage())
            self._paused -= 1
        if self.observer is not None:
            self.observer.on_evicted(handle)
        handle.let_go()
        cell.pending.append(weakref.ref(handle))
        self.counts.num_evicted += 1
        return True

    def _unpack(self, handle: Any) -> torch.Tensor:
        if not self._backward_seen:
            self._backward_seen = True
            if not self.pin_sources:
                self._unpin()
        if type(handle) is Handle:
            if self.observer is not None:
                self.observer.on_unpack(handle)
            if handle.probe._version != handle.version:
                raise _modified(handle.probe, handle.probe._version, handle.version, handle.geometry)
            if handle.alias is None:
                return self._restore(handle)
            handle.is_handed_out = True
            return handle.alias
        alias = handle.alias
        if alias._version != handle.version:
            raise _modified(alias, alias._version, handle.version)
        return alias

    def _restore(self, handle: Handle) -> torch.Tensor:
        cell = handle.cell
        num_calls = 0
        start = time.perf_counter()
        self._restoring = cell
        self._paused += 1
        try:
            if cell.storage is None:
                num_calls = materialise(cell, self.verify, self.counts)
                self.counts.num_replayed_calls += num_calls
            assert cell.storage is not None
            assert handle.geometry is not None
            handle.alias = view_of(cell.storage, handle.geometry)
        finally:
            self._paused -= 1
            self._restoring = None
            self.counts.restore_seconds += time.perf_counter() - start
        self.counts.num_restored += 1
        self.counts.num_verified += cell.fingerprint is not None
        drop_need(cell)
        if self.observer is not None:
            self.observer.on_restored(handle, num_calls)
        return handle.alias

    def on_drop(self, handle: Handle) -> None:
        """Autograd let the handle go (called by its finaliser)."""
        if handle.alias is None:
            drop_need(handle.cell)
        if self.observer is not None:
            self.observer.on_drop(handle)


def _modified(tensor: torch.Tensor, found: int, expected: int, geometry: Geometry | None = None) -> RuntimeError:
    """What plain autograd raises; it checks versions only where no hooks are."""
    shape = list(geometry[2] if geometry is not None else tensor.shape)
    return RuntimeError(_MODIFIED.format(kind=tensor.type(), shape=shape, found=found, expected=expected))


def _needs_gradient(argument: Any) -> bool:
    """Whether any tensor in the nested argument requires a gradient."""
    if isinstance(argument, torch.Tensor):
        return argument.requires_grad
    if isinstance(argument, (list, tuple)):
        return any(_needs_gradient(each) for each in argument)
    if isinstance(argument, dict):
        return any(_needs_gradient(each) for each in argument.values())
    return False


def _strip(argument: Any, values: list[torch.Tensor]) -> Any:
    """The argument with every tensor replaced by a Slot; containers are copied, so later changes to them do no harm."""
    if isinstance(argument, torch.Tensor):
        for index, value in enumerate(values):
            if value is argument:  # functions ask `key is query`: one tensor stays one tensor
                return Slot(index)
        values.append(argument)
        return Slot(len(values) - 1)
    kind = type(argument)
    if kind in (list, tuple):
        return kind(_strip(each, values) for each in argument)
    if kind is dict:
        return {key: _strip(each, values) for key, each in argument.items()}
    return argument


def _count_references(cells: list[Cell]) -> list[int]:
    """References to each cell: the list's own, what counting takes, and those of handles, recipes and whoever else knows it."""
    return [sys.getrefcount(cell) for cell in cells]


_UNREAD_REFERENCES = _count_references([Cell(None, 0, torch.device("cpu"), 0)])[0]  # type: ignore[arg-type]

_SKIP = ("/torch/", "/memfit/")


def user_line(depth: int = 1) -> str:
    """'file:line' of the nearest frame of the user's program, from `depth` frames above the caller on; '' if there is none."""
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None:
        name = frame.f_code.co_filename
        if not any(part in name for part in _SKIP):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
