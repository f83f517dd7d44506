"""Replaying: evicted content comes back by running the calls it was made by, in their first order.

They run in grad mode on fresh leaves under a hook that swallows what is saved, so the same kernels are chosen and what a call saves
inside can be had as well.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from memfit.core.errors import CertificateError
from memfit.engine.ambient import random_state, surroundings
from memfit.engine.cell import Call, Cell, Slot, view_of
from memfit.engine.fingerprint import fingerprint
from memfit.engine.need import drop_need, tensors_in

if TYPE_CHECKING:
    from memfit.engine.observing import Counts


def materialise(cell: Cell, verify: bool, counts: Counts) -> int:
    """Replay what the cell's content is made from; afterwards `cell.storage` holds it. Returns the number of replayed calls.

    verify: also compare generators and external sources before and after each call; what was compared is added to `counts`.
    Raises CertificateError where a comparison fails.
    """
    assert cell.call is not None
    assert cell.need > 0
    assert cell.storage is None
    calls: dict[Call, None] = {}
    num_readers: Counter[Cell] = Counter()
    stack = [cell.call]
    while stack:
        call = stack.pop()
        if call in calls:
            continue
        calls[call] = None
        for source in call.inputs:
            if source.storage is None:
                if source.call is None:
                    raise CertificateError(
                        f"memfit cannot restore the output of {call.place}: one of its inputs was overwritten in a way "
                        "it did not see. The step was stopped before a wrong gradient. Run again with `--verify always` "
                        "or exclude the place by planning with a larger budget, and please report it."
                    )
                stack.append(source.call)
                if source.transient and source is not cell:
                    num_readers[source] += 1
    made: set[Cell] = set()
    interception = _Interception()
    passing = _Passing(cell, num_readers)
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(interception.pack, _never_unpacked):
        for call in sorted(calls, key=lambda each: (each.seq, each.makes)):  # a call's noise before its product
            _run(call, made, passing, interception, _Outside(call) if verify else None, counts)
    assert cell.storage is not None
    return len(calls)


class _Passing:
    """The transient cells that a restore passes: their content, until the last of its calls that read it has run."""

    def __init__(self, target: Cell, num_readers: Counter[Cell]) -> None:
        """num_readers: by transient cell that is passed, the calls of the restore that read it."""
        self._target = target
        self._storages: dict[Cell, torch.UntypedStorage] = {}
        self._num_readers = num_readers

    def passes(self, cell: Cell) -> bool:
        """Whether this restore keeps the cell for nobody else."""
        return cell.transient and cell is not self._target

    def wants(self, cell: Cell) -> bool:
        """Whether the replay that makes the cell is to hand it over."""
        return not self.passes(cell) or cell in self._num_readers

    def put(self, cell: Cell, storage: torch.UntypedStorage) -> None:
        self._storages[cell] = storage

    def content_of(self, cell: Cell) -> torch.UntypedStorage:
        return cell.storage if cell.storage is not None else self._storages[cell]

    def note_run(self, call: Call) -> None:
        """The call has read its sources."""
        for cell in call.inputs if self._storages else ():
            if cell in self._storages:
                self._num_readers[cell] -= 1
                if not self._num_readers[cell]:
                    del self._storages[cell]


def _run(
    call: Call, made: set[Cell], passing: _Passing, interception: _Interception, before: _Outside | None, counts: Counts
) -> None:
    """Replay one call and hand its results to the cells that need them. before: what it must leave as it is, if that is to be compared."""
    wanted: dict[str, Cell] = {}
    internal: set[str] = set()
    for position, ref in call.outputs.items():
        each = ref()
        if each is not None and each.need > 0 and each.storage is None and passing.wants(each):
            wanted[position] = each
            if position.startswith("in"):
                internal.add(position)
    num_internal = 0 if call.makes == "in" else len(internal)
    is_last_run = call.num_wanted == sum(not passing.passes(each) for each in wanted.values())
    arguments, written = _arguments(call, made if is_last_run else set(), passing, want_internal=num_internal > 0)
    want_outputs = num_internal < len(wanted)
    saved = interception.begin(internal, may_stop=call.stops_early and not want_outputs)
    _replay(call, arguments, want_outputs, saved)
    if before is not None:
        before.compare(counts)
    if written is not None and "mut0" in wanted:
        saved["mut0"] = written.untyped_storage()
    for position, each in wanted.items():
        storage = saved.get(position)
        if storage is None or storage.nbytes() != each.nbytes:
            found = "nothing" if storage is None else f"{storage.nbytes()} bytes"
            raise CertificateError(
                f"replaying {call.place} gave {found} where {each.nbytes} bytes were saved ({position}): the call does not "
                "repeat itself. The step was stopped before a wrong gradient; please report the place."
            )
        if each.fingerprint is not None and fingerprint(storage) != each.fingerprint:
            counts.num_mismatched += 1
            counts.mismatched_places.append(call.place)
            raise CertificateError(
                f"the restored content of {call.place} ({position}) differs from what was evicted: the call does not repeat "
                "itself bit for bit. The step was stopped before a wrong gradient; please report the place."
            )
        if passing.passes(each):
            passing.put(each, storage)
            continue
        each.storage = storage
        made.add(each)
        call.num_wanted -= 1
    if call.num_wanted == 0:
        for source in call.inputs:
            drop_need(source)
    passing.note_run(call)


class _Outside:
    """What a replay must leave as it is: the generators, and what the call reads or would have written outside the tape
    (parameters, inputs, a batch norm's running statistics)."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._devices = tuple({v.cell.device.index for v in call.values if v.cell.device.type == "cuda"})
        self._state = random_state(self._devices)
        self._sources = {
            value.cell: (storage, fingerprint(storage))
            for value in call.values
            if value.cell.call is None
            and (storage := value.cell.ref() if value.scratch else value.cell.living_storage()) is not None
        }

    def compare(self, counts: Counts) -> None:
        """Compare with what is there now, and count. Raises CertificateError where something differs."""
        counts.num_generator_checks += 1
        if self._state != random_state(self._devices):
            counts.num_generators_moved += 1
            raise CertificateError(f"replaying {self._call.place} moved the random generator; the step was stopped.")
        for cell, (storage, number) in self._sources.items():
            if cell not in counts.sources:
                counts.sources.add(cell)
                counts.num_sources_checked += 1
            if fingerprint(storage) != number:
                counts.num_sources_changed += 1
                raise CertificateError(
                    f"replaying {self._call.place} wrote to one of its inputs ({cell.nbytes} bytes), which plain PyTorch does not "
                    "do a second time. The step was stopped before it could do harm; please report the place."
                )


def _arguments(
    call: Call, made: set[Cell], passing: _Passing, want_internal: bool
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Tensors for the call's values, and the private tensor it will overwrite, if it overwrites one: one of `made`, if nobody else needs
    that, else a copy.

    Inputs are fresh leaves that require gradients where the originals did, so that the same kernels are chosen and the same
    tensors are saved as in the first run.
    """
    written_cell = call.values[call.writes].cell if call.writes is not None else None
    private: torch.UntypedStorage | None = None
    tensors = []
    for index, value in enumerate(call.values):
        if value.scratch:
            dtype, _, size, _ = value.geometry
            tensors.append(torch.zeros(size, dtype=dtype, device=value.cell.device))
            continue
        storage = passing.content_of(value.cell)
        if value.cell.probe is not None and value.cell.probe._version != value.cell.probe_version:
            raise CertificateError(
                f"an input of {call.place} was overwritten after the call in a way memfit was not told of (by compiled code, say), so "
                "what it computed cannot be had again. The step was stopped before a wrong gradient. Keep the input unchanged until "
                "backward, or exclude the place by planning with a larger budget."
            )
        if value.cell is written_cell:
            if private is None:
                is_last_reader = value.cell in made and value.cell.need == 1 and not value.cell.pinned
                private = storage if is_last_reader else storage.clone()
            storage = private
        tensor = value.tensor(storage)
        if value.requires_grad:
            if index != call.writes:
                tensor.requires_grad_()
            elif want_internal:
                with torch.enable_grad():
                    tensor = _Interior.apply(torch.empty(0, requires_grad=True), tensor)
        tensors.append(tensor)
    return tensors, tensors[call.writes] if call.writes is not None else None


class _Stop(BaseException):
    """Raised from the recording hook once every cast copy wanted has been saved: the call itself need not run.

    No error, so no Exception: a replayed function that catches its own errors must let it pass.
    """


class _Interception:
    """The hook that is told what replayed calls save: it picks out the internal tensors wanted, and holds nothing for anybody."""

    def __init__(self) -> None:
        self._found: dict[str, torch.UntypedStorage] = {}
        self._missing: set[str] = set()
        self._may_stop = False
        self._num_saved = 0

    def begin(self, missing: set[str], may_stop: bool) -> dict[str, torch.UntypedStorage]:
        """Another call: the dictionary that its internal tensors at these positions ('in...') will be put in.

        may_stop: nothing else is wanted of the call, and it need not go on once they are there.
        """
        self._found, self._missing, self._may_stop, self._num_saved = {}, missing, may_stop, 0
        return self._found

    def pack(self, tensor: torch.Tensor) -> None:
        if not self._missing:
            return
        position = f"in{self._num_saved}"
        self._num_saved += 1
        if position in self._missing:
            self._missing.discard(position)
            self._found[position] = tensor.untyped_storage()
            if not self._missing and self._may_stop:
                raise _Stop


def _replay(call: Call, tensors: list[torch.Tensor], want_outputs: bool, found: dict[str, torch.UntypedStorage]) -> None:
    """Run the call and add the storages of its results ('out...'), if wanted, to those of its internal tensors."""
    with surroundings(call.random_state, call.autocast, call.attention_flags):
        try:
            result = call.func(*_fill(call.args, tensors), **_fill(call.kwargs, tensors))
        except _Stop:
            return
    if want_outputs:
        for number, tensor in enumerate(tensors_in(result)):
            found.setdefault(f"{call.makes}{number}", tensor.untyped_storage())


def _fill(template: Any, tensors: list[torch.Tensor]) -> Any:
    """The template with tensors[i] for each Slot(i). (A nested function would be a cycle that holds the tensors.)"""
    if type(template) is Slot:
        return tensors[template]
    if type(template) in (list, tuple):
        return type(template)(_fill(each, tensors) for each in template)
    if type(template) is dict:
        return {key: _fill(each, tensors) for key, each in template.items()}
    return template


def _never_unpacked(_: None) -> torch.Tensor:
    raise AssertionError("a replayed call's graph is never run backward")


class _Interior(torch.autograd.Function):
    """The given tensor as an interior node of a graph: a leaf that requires a gradient must not be overwritten in place."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        return view_of(tensor.untyped_storage(), (tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None]:
        raise AssertionError("a replayed call's graph is never run backward")
