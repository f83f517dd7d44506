"""Cell, Value, Call, Handle: the tape's data.

A Cell is the content of one storage between two writes. A Value is a tensor as a call read it: a geometry on a cell. A Call is a
recipe: a function with its arguments as values. A Handle stands in autograd's graph where a saved tensor stood.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from memfit.engine.packing import packed_bytes

if TYPE_CHECKING:
    from memfit.engine.ambient import Autocast, RandomState
    from memfit.engine.tape import Tape

Geometry = tuple[torch.dtype, Any, torch.Size, tuple[int, ...]]  # dtype, storage offset, size, stride (in elements)


class StorageRef(weakref.ref):
    """A weak reference to a storage that remembers the key under which the tape filed it.

    Keyed by `_cdata`, which is reused after a free: the callback removes the entry the moment the storage dies, and only if the
    entry is still this one.
    """

    __slots__ = ("key",)
    key: int


class Cell:
    """The content of one storage between two writes.

    call, position: the recipe; call is None for external content (parameters, inputs, unrecorded work).
    storage: the content, held strongly; None when the tape does not hold it (handles or the program still may).
    need: pending handles on it plus wanted calls that read it (see engine.need).
    keep: the plan keeps this cell, so a need may take hold of it while it lives.
    evict: the plan evicts it: its handles are pending from the start.
    transient: a replay that passes it on the way to another cell keeps it for nobody else: it is computed for each reader anew.
    exposed: the program got at the memory itself (`.numpy()`) and may write there unseen.
    written: the storage has been overwritten since; `ref` no longer leads to this content.
    pinned: held until backward begins, needed or not.
    """

    call: Call | None = None
    position = ""
    previous: Cell | None = None
    storage: torch.UntypedStorage | None = None
    need = 0
    keep = evict = transient = exposed = written = pinned = False
    handles: tuple[weakref.ref[Handle], ...] = ()  # filled while measuring or guarding only
    pending: tuple[weakref.ref[Handle], ...] = ()  # evicted handles, some of them restored since
    fingerprint: int | None = None
    probe: torch.Tensor | None = None  # tells of writes the tape is not told of (external sources only)
    probe_version = 0
    # Defaults of the class and no __slots__: most cells never need most of these, and setting them took half a microsecond each.

    def __init__(self, ref: StorageRef, nbytes: int, device: torch.device, version: int) -> None:
        self.ref = ref
        self.nbytes = nbytes
        self.device = device
        self.version = version

    def living_storage(self) -> torch.UntypedStorage | None:
        """The content wherever it lives, or None if it is gone or was overwritten."""
        if self.storage is not None:
            return self.storage
        return None if self.written else self.ref()

    @property
    def is_keepable(self) -> bool:
        """Whether a need may take hold of the living storage instead of recomputing it."""
        return self.call is None or self.keep

    @property
    def key(self) -> str:
        """The cell's identity across steps, as plans write it ('' for external cells)."""
        return f"{self.call.place}|{self.position}" if self.call is not None else ""


class PackedCell(Cell):
    """The bits of a dropout's noise: a source that comes to life when something needs it while the noise is there."""

    def __init__(self, tape: Tape, noise: Cell, num_elements: int, dtype: torch.dtype) -> None:
        super().__init__(noise.ref, packed_bytes(num_elements), noise.device, 0)
        self.tape = tape
        self.noise = weakref.ref(noise)  # which leads here by its recipe
        self.num_elements = num_elements
        self.dtype = dtype
        self.position = "bits0"
        self.keep = True

    def living_storage(self) -> torch.UntypedStorage | None:
        """The bits, packed now if need be."""
        if self.storage is not None:
            return self.storage
        noise = self.noise()
        storage = noise.living_storage() if noise is not None else None
        return self.tape.pack_noise(storage, self.num_elements, self.dtype) if storage is not None else None

    @property
    def geometry(self) -> Geometry:
        return torch.uint8, 0, torch.Size([self.nbytes]), (1,)


class Value:
    """A tensor argument: a geometry on a cell. `scratch` values are write-only statistics, replaced by zeros in a replay."""

    __slots__ = ("cell", "geometry", "requires_grad", "scratch")

    def __init__(self, cell: Cell, geometry: Geometry, requires_grad: bool) -> None:
        self.cell = cell
        self.geometry = geometry
        self.requires_grad = requires_grad
        self.scratch = False

    def tensor(self, storage: torch.UntypedStorage) -> torch.Tensor:
        return view_of(storage, self.geometry)


class Slot(int):
    """Marks the place of values[i] in a call's argument template."""


At = tuple[int, str, int, int, str]  # section, module path, invocation, ordinal, function


class Call:
    """A recorded tensor function call.

    args, kwargs: templates with Slot(i) where values[i] goes. inputs: the distinct cells a replay reads.
    makes: 'out' where the results are cells out0, out1 …; for parts (see parts.py) 'in' for what makes a call's internal tensors
        and nothing else, 'inner' for the whole call run for its internal tensors, 'bits' for what makes those from which one is made. They are
        replayed in the order of the alphabet.
    stops_early: the internal tensors are arguments brought into form, saved before the work begins, so that a replay for them alone may
        stop there.
    writes: index of the value the call overwrites in place, or None. outputs: cells by position.
    may_evict: False where the plan keeps all that the call makes.
    in_place: see core.trace.Call, filled while measuring. is_overwriting: it runs in place because a plan says so, not the program.
    num_wanted: how many of its cells are needed and not held (the call is to be replayed while this is positive).
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = MappingProxyType({})
    values: Sequence[Value] = ()
    inputs: tuple[Cell, ...] = ()
    writes: int | None = None
    random_state: RandomState | None = None
    autocast: Autocast = ()
    attention_flags: tuple[bool, ...] | None = None
    num_wanted = num_saved = 0
    may_evict = True
    makes = "out"
    stops_early = False
    in_place = ""
    is_overwriting = False

    def __init__(self, func: Callable[..., Any], at: At, location: str, seq: int) -> None:
        self.func = func
        self.at = at
        self.location = location
        self.seq = seq
        self.outputs: dict[str, weakref.ref[Cell]] = {}

    @property
    def place(self) -> str:
        """The call's identity across steps (see engine.places)."""
        section, path, invocation, ordinal, name = self.at
        return f"{section}|{path}#{invocation}/{ordinal}:{name}"

    @property
    def module(self) -> str:
        """The path of the module it ran in."""
        return self.at[1]

    def part(self) -> Call:
        """Another recipe at the same place, as yet with no outputs."""
        part = Call(self.func, self.at, self.location, self.seq)
        part.args, part.kwargs, part.values, part.inputs = self.args, self.kwargs, self.values, self.inputs
        part.random_state, part.autocast, part.attention_flags = self.random_state, self.autocast, self.attention_flags
        part.stops_early = self.stops_early
        return part


class Handle:
    """What autograd holds for one saved tensor.

    cell: may change once, from the storage's cell when it was saved to the one after the saving call wrote it.

    alias: the tensor while it is held (a detached alias: returning the packed tensor itself would tie an output to its own node).
    geometry: of the tensor, once it has been evicted.
    probe, version: the version counter, and where it stood when the tensor was saved; autograd compares them only where no hooks
        are, so it is done here. The probe is the first alias; when that is evicted it loses its bytes and keeps the counter.
    is_handed_out: backward may be computing with the alias, so its bytes must stay its own.
    """

    __slots__ = ("__weakref__", "alias", "cell", "geometry", "is_handed_out", "probe", "tape", "version")

    def __init__(self, tape: Tape, cell: Cell, tensor: torch.Tensor) -> None:
        self.tape = tape
        self.cell: Cell = cell
        self.probe = tensor.detach()
        self.alias: torch.Tensor | None = self.probe
        self.version = self.probe._version
        self.geometry: Geometry | None = None
        self.is_handed_out = False

    def let_go(self) -> None:
        """Hold the bytes no longer."""
        alias = self.alias
        assert alias is not None
        self.geometry = geometry_of(alias)
        self.alias = None
        if alias is self.probe and self.is_handed_out:
            self.probe = probe_of(alias)
        elif alias is self.probe:
            alias.data = _no_bytes(alias.dtype, alias.device)

    def __del__(self) -> None:
        if self.alias is None or self.tape.observer is not None:
            self.tape.on_drop(self)


def probe_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without bytes that shares the tensor's version counter."""
    probe = tensor.detach()
    probe.data = _no_bytes(tensor.dtype, tensor.device)
    return probe


@cache
def _no_bytes(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=device)


def geometry_of(tensor: torch.Tensor) -> Geometry:
    return tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()


def view_of(storage: torch.UntypedStorage, geometry: Geometry) -> torch.Tensor:
    """The tensor of this geometry on the storage; it shares the bytes."""
    dtype, offset, size, stride = geometry
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, stride)
