"""The ledger of births: every new storage, where it was made, and how many of each place are alive.

A dispatch mode sees the results of every operation; a weak reference on each storage tells when it dies, autograd's saved tensors and
gradients included. No tensor is held. Seen are one thread and the backward passes started from it. Storages from before it was entered,
and sparse or wrapped tensors, are not in it.

Cost: `benchmarks/growth_overhead.py`. Operations that only look at a storage (views) are a third of a training step's and pass by. Inside a
module's call no loop is a step (`loops`), so only the place is looked for, and not who called whom.
"""

from __future__ import annotations

import linecache
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.engine.cell import StorageRef
from memfit.engine.frames import read_locals
from memfit.engine.need import tensors_in
from memfit.engine.private import backward_number, only_views
from memfit.measurement.loops import BACKWARD, LoopFinder

_WRAPPERS = ("_fn", "inner")  # in torch/_dynamo/eval_frame.py and torch/_compile.py
_BACKWARDS = frozenset(each.__code__ for each in (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad))
PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class Site:
    """A place where storages are made: an instruction of the program's, on one device, in backward or not.

    alive: their births, oldest first. born_bytes: of all that were ever made.
    is_own_input: a storage made here was computed from one made here and is larger than it (`kept = torch.cat((kept, new))`).
    first: how many operations there had been when it came up. module: class name of the innermost module that ran, at the last birth.
    """

    __slots__ = (
        "alive",
        "born_bytes",
        "code",
        "device",
        "first",
        "in_backward",
        "is_own_input",
        "live_bytes",
        "module",
        "offset",
    )

    def __init__(self, code: CodeType, offset: int, device: str, in_backward: bool, first: int) -> None:
        self.code = code
        self.offset = offset
        self.device = device
        self.first = first
        self.in_backward = in_backward
        self.alive: dict[Birth, None] = {}
        self.live_bytes = 0
        self.born_bytes = 0
        self.is_own_input = False
        self.module = ""

    @property
    def place(self) -> tuple[str, int]:
        """File and line."""
        return place_of(self.code, self.offset)


class Birth(StorageRef):
    """A weak reference to a storage, with its site. written: the site of the last operation that wrote it in place, or of its birth."""

    __slots__ = ("nbytes", "site", "written")
    nbytes: int
    site: Site
    written: Site


class Ledger(TorchDispatchMode):
    """Records while it is entered.

    on_mark(rank): a backward pass has begun.
    """

    def __init__(self, finder: LoopFinder, on_mark: Callable[[int], None]) -> None:
        super().__init__()
        self.finder = finder
        self.live_bytes = 0
        self.born_bytes = 0
        self.peak_bytes = 0  # as of the last `take_high`
        self._high_bytes = 0
        self.sites: dict[Site, None] = {}  # with something alive
        self.backwards: dict[tuple[str, int], tuple[bool, bool]] = {}  # place of the call: (retain_graph, create_graph)
        self.is_on = False
        self.is_in_optimizer = False  # an optimizer steps: its operations belong to the line that called it
        self._on_mark = on_mark
        self._births: dict[int, Birth] = {}
        self._sites: dict[tuple[CodeType, int, str, bool], Site] = {}
        self._is_view: dict[Any, bool] = {}  # by operation
        self._modules: list[str] = []
        self._backward = -1
        self._place: tuple[CodeType, int] | None = None  # of the last operation
        self._thread = 0
        self._undo: list[Callable[[], None]] = []

    def start(self) -> None:
        self._thread = threading.get_ident()
        hooks = torch.nn.modules.module
        self._undo = [
            hooks.register_module_forward_pre_hook(self._before_module).remove,
            hooks.register_module_forward_hook(self._after_module, always_call=True).remove,
        ]
        self.is_on = True
        self.__enter__()

    def stop(self) -> None:
        """Take it off; what is alive stays on the books. Idempotent."""
        if self.is_on:
            self.is_on = False
            self.__exit__(None, None, None)
            while self._undo:
                self._undo.pop()()

    def take_high(self) -> int:
        """The most bytes alive since the last call."""
        high = max(self._high_bytes, self.live_bytes)
        self._high_bytes = self.live_bytes
        self.peak_bytes = max(self.peak_bytes, high)
        return high

    def birth_of(self, tensor: torch.Tensor) -> Birth | None:
        """The birth of the tensor's storage, if it is on the books."""
        return self._births.get(tensor.untyped_storage()._cdata) if has_storage(tensor) else None

    def birth_by_key(self, key: int) -> Birth | None:
        """The birth of a living storage, by its `_cdata`."""
        return self._births.get(key)

    def visit(self, frame: FrameType, key: Any) -> None:
        """The program is here now: the place of the operations to come, until one says more."""
        if threading.get_ident() == self._thread:
            self._place = self.finder.look(frame, key) or self._place

    def _before_module(self, module: torch.nn.Module, _: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        if not self._modules and self.is_on:
            self.finder.look(sys._getframe(1), module)
            self.finder.mark_module(module)
        self._modules.append(type(module).__name__)

    def _after_module(self, *_: Any) -> None:
        if self._modules and threading.get_ident() == self._thread:
            self._modules.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_view = self._is_view.get(func)
        if is_view is None:
            is_view = self._is_view[func] = only_views(func)
        if is_view or not self.is_on:
            return func(*args, **kwargs) if kwargs else func(*args)
        backward = backward_number()
        # No loop of the program goes around while it waits for a backward pass (perhaps in a device's thread) or an optimizer.
        if self.is_in_optimizer or (backward != -1 and backward == self._backward) or threading.get_ident() != self._thread:
            place = self._place
        else:
            caller = sys._getframe(1)
            while caller.f_code.co_name in _WRAPPERS and caller.f_back is not None:  # PyTorch's, around every mode's function
                caller = caller.f_back
            self._place = place = self.finder.find_place(caller) if self._modules else self.finder.look(caller, func)
        if backward != self._backward:
            self._begin_backward(backward)
        result = func(*args, **kwargs) if kwargs else func(*args)
        for tensor in (result,) if isinstance(result, torch.Tensor) else tensors_in(result):
            if type(tensor) not in PLAIN or tensor.layout is not torch.strided:
                continue
            storage = tensor.untyped_storage()
            birth = self._births.get(storage._cdata)
            if birth is None:
                if type(tensor) is torch.Tensor:  # a parameter comes back from what writes it, and is older than the watch
                    self._file(storage, place, backward != -1, args)
            elif args and tensor is args[0] and place is not None:  # in place
                birth.written = self._site(place, storage.device.type, backward != -1)
        return result

    def _file(self, storage: torch.UntypedStorage, place: tuple[CodeType, int] | None, in_backward: bool, args: Any) -> None:
        nbytes = storage.nbytes()
        if nbytes == 0 or place is None:
            return
        site = self._site(place, storage.device.type, in_backward)
        birth = Birth(storage, self._on_death)
        birth.key = storage._cdata
        birth.nbytes = nbytes
        birth.site = birth.written = site
        self._births[birth.key] = birth
        if site.alive and not site.is_own_input and next(reversed(site.alive)).nbytes < nbytes:
            site.is_own_input = any(
                (source := self.birth_of(each)) is not None and source.site is site for each in tensors_in(args)
            )
        site.alive[birth] = None
        site.live_bytes += nbytes
        site.born_bytes += nbytes
        site.module = self._modules[-1] if self._modules else ""
        self.sites[site] = None
        self.born_bytes += nbytes
        self.live_bytes += nbytes
        if self.live_bytes > self._high_bytes:
            self._high_bytes = self.live_bytes

    def _site(self, place: tuple[CodeType, int], device: str, in_backward: bool) -> Site:
        key = (*place, device, in_backward)
        site = self._sites.get(key)
        if site is None:
            site = self._sites[key] = Site(*key, self.finder.num_looks)
        return site

    def _on_death(self, birth: Any) -> None:
        if birth.key in self._births and self._births[birth.key] is birth:
            del self._births[birth.key]
        site = birth.site
        if birth in site.alive:
            del site.alive[birth]
            site.live_bytes -= birth.nbytes
            self.live_bytes -= birth.nbytes
            if not site.alive:
                self.sites.pop(site, None)

    def _begin_backward(self, number: int) -> None:
        """Another backward pass runs, or (-1) none any more. Notes whether its caller keeps the graph."""
        self._backward = number
        if number == -1 or self._place is None:
            return
        self._on_mark(BACKWARD)
        frame = sys._current_frames().get(self._thread)
        while frame is not None:
            if frame.f_code in _BACKWARDS:
                names = read_locals(frame)
                create = bool(names.get("create_graph"))
                if create or names.get("retain_graph"):
                    self.backwards[place_of(*self._place)] = (True, create)
                return
            frame = frame.f_back


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether it is a plain tensor with bytes of its own."""
    return type(tensor) in PLAIN and tensor.layout is torch.strided


def place_of(code: CodeType, offset: int) -> tuple[str, int]:
    """File and line of an instruction."""
    line = next((line for start, end, line in code.co_lines() if start <= offset < end and line), code.co_firstlineno)
    return code.co_filename, line


def line_text(path: str, line: int) -> str:
    """The text of a source line, stripped."""
    return linecache.getline(path, line).strip()
