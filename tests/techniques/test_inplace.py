"""Calls in place: which functions may, when one may not and why, the bytes, and training that stays what it was bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memfit
import oracle
import workloads
from engine.loops import LOOPS
from engine.programs import FORWARDS
from equality import Program, Run, differences, make, plain, snapshot
from memfit.core.inplace import COPIED, ROUNDED, apart, edit, find_idle, find_sites, propose, weigh
from memfit.core.replay import replay
from memfit.core.trace import BEGIN
from memfit.engine.overwriting import in_place_form
from memfit.engine.tape import Tape
from memfit.runtime.session import Session
from memfit.techniques import inplace
from techniques.in_place import applied, everywhere, move_for, on_a_python_understood, sites_of, trace_of

pytestmark = pytest.mark.usefixtures(
    "one_thread"
)  # else each measured step goes through what earlier tests left: most of the time here


SPECIAL = [
    0.0,
    -0.0,
    1e-45,
    -1e-45,
    1e-40,
    -1e-40,
    0.5,
    1.0,
    -1.0,
    3.0,
    -3.0,
    6.0,
    20.0,
    float("inf"),
    -float("inf"),
    float("nan"),
]
OTHER = torch.linspace(0.1, 3, 1040).view(-1, 16)
MASK = OTHER > 1

# ---- the family --------------------------------------------------------------------------------------------------------

SAME: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "relu of functional": (F.relu, (), {"inplace": False}),
    "relu of torch": (torch.relu, (), {}),
    "relu of the tensor": (torch.Tensor.relu, (), {}),
    "sigmoid": (torch.sigmoid, (), {}),
    "tanh": (torch.Tensor.tanh, (), {}),
    "exp": (torch.exp, (), {}),
    "exp2": (torch.exp2, (), {}),
    "expm1": (torch.Tensor.expm1, (), {}),
    "sqrt": (torch.sqrt, (), {}),
    "rsqrt": (torch.rsqrt, (), {}),
    "reciprocal": (torch.reciprocal, (), {}),
    "neg": (torch.neg, (), {}),
    "leaky_relu": (F.leaky_relu, (0.2,), {}),
    "leaky_relu, steep": (F.leaky_relu, (), {"negative_slope": 1.7}),
    "dropout": (F.dropout, (0.3,), {"training": True}),
    "dropout in evaluation": (F.dropout, (0.3,), {"training": False}),
    "alpha_dropout": (F.alpha_dropout, (0.3,), {"training": True}),
    "feature_alpha_dropout": (F.feature_alpha_dropout, (0.3,), {"training": True}),
    "dropout1d": (F.dropout1d, (0.3,), {}),
    "add": (torch.Tensor.add, (OTHER,), {"alpha": 2}),
    "add a number": (torch.add, (1.5,), {}),
    "sub": (torch.Tensor.sub, (OTHER,), {}),
    "mul": (torch.Tensor.mul, (OTHER,), {}),
    "mul by a row": (torch.mul, (OTHER[0],), {}),
    "mul by a mask": (torch.mul, (MASK,), {}),
    "div": (torch.Tensor.div, (OTHER,), {}),
    "div by a number": (torch.true_divide, (3.0,), {}),
    "masked_fill": (torch.Tensor.masked_fill, (MASK, -10000.0), {}),
}


def run_and_look(call: Callable[[torch.Tensor], torch.Tensor]) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Result, gradient and random state of the call on special numbers, and what it saved: 'input', 'result', or bytes of another."""
    torch.manual_seed(5)
    leaf = torch.cat([torch.tensor(SPECIAL), torch.randn(1024) * 3]).view(-1, 16).requires_grad_()
    x = leaf * 1
    before, saved = x.untyped_storage().data_ptr(), []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.untyped_storage())
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = call(x)
    after = result.untyped_storage().data_ptr()
    names = [
        "result" if each.data_ptr() == after else "input" if each.data_ptr() == before else f"{each.nbytes()} bytes"
        for each in saved
    ]
    state = torch.get_rng_state()
    result.backward(torch.linspace(-2, 2, result.numel()).view(result.shape))
    found = {"result": result.detach(), "gradient": leaf.grad, "random state": state}
    return {name: each.contiguous().view(torch.uint8) for name, each in found.items()}, names


def both_ways(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[str], list[str], list[str]]:
    """What the call and its in-place form save, and in what they differ."""

    def run_in_place(x: torch.Tensor) -> torch.Tensor:
        form = in_place_form(func, (x, *args), kwargs)
        assert form is not None
        result = form[0](*form[1], **form[2])
        assert result.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        return result

    expected, saved = run_and_look(lambda x: func(x, *args, **kwargs))
    found, saved_in_place = run_and_look(run_in_place)
    return saved, saved_in_place, [name for name in expected if not torch.equal(expected[name], found[name])]


@pytest.mark.parametrize("name", SAME)
def test_a_function_in_place_gives_the_same_bits_and_saves_no_copy_of_its_input(name: str) -> None:
    saved, saved_in_place, differing = both_ways(*SAME[name])
    assert differing == []
    assert saved_in_place == [each if each != "input" else "result" for each in saved]
    assert ("input" in saved) is name.startswith("leaky_relu")


@pytest.mark.parametrize("func", [F.elu, F.selu, F.celu])
def test_the_elus_in_place_have_another_gradient_in_the_last_bits_so_they_never_are(func: Callable[..., Any]) -> None:
    saved, saved_in_place, differing = both_ways(func, (), {})
    assert (saved, saved_in_place) == (["input"], ["result"])
    assert differing == ["gradient"]


@pytest.mark.parametrize("func", [F.relu6, F.hardtanh, F.silu, F.mish, F.hardswish, F.hardsigmoid])
def test_these_in_place_save_a_copy_of_their_input_so_nothing_would_be_won(func: Callable[..., Any]) -> None:
    saved, saved_in_place, differing = both_ways(func, (), {})
    assert (saved, saved_in_place) == (["input"], ["4160 bytes"])
    assert differing == []


def test_a_call_that_is_in_place_already_and_one_without_such_a_form_have_none() -> None:
    x = torch.ones(2)
    assert in_place_form(F.relu, (x,), {"inplace": True}) is None
    assert in_place_form(torch.Tensor.relu_, (x,), {}) is None
    assert in_place_form(torch.softmax, (x, 0), {}) is None
    assert in_place_form(torch.add, (1, x), {}) is None


# ---- places ------------------------------------------------------------------------------------------------------------

N, WIDTH = 64, 32


class Net(nn.Module):
    """`forward` is given; `step_number` counts the steps."""

    def __init__(self, forward: Callable[[Net, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.relu, self.watched, self.norm = nn.ReLU(), nn.ReLU(), nn.BatchNorm1d(WIDTH)
        self.watched.register_forward_hook(lambda module, args, output: None)
        self.program, self.kept, self.step_number = forward, [], 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.program(self, x)


def training(forward: Callable[[Net, torch.Tensor], torch.Tensor]) -> Program:
    def make_run() -> Run:
        net = Net(forward)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)

        def step(_: int) -> torch.Tensor:
            net.step_number += 1
            optimizer.zero_grad()
            loss = net(torch.randn(N, WIDTH)).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Run(step, net, [optimizer], lambda: {"kept": [each.sum().item() for each in net.kept]})

    return make_run


def rebound(net: Net, x: torch.Tensor) -> torch.Tensor:
    x = net.one(x)
    x = net.relu(x)
    return net.two(x)


def on_a_temporary(net: Net, x: torch.Tensor) -> torch.Tensor:
    return net.two(F.relu(net.one(x)))


def of_a_sum(net: Net, x: torch.Tensor) -> torch.Tensor:
    out = net.one(x)
    out = out + x
    return net.two(out)


def saved_by_another(net: Net, x: torch.Tensor) -> torch.Tensor:
    h = net.one(x)
    y = net.two(h)
    return y + torch.relu(h)


def read_again(net: Net, x: torch.Tensor) -> torch.Tensor:
    h = net.one(x)
    return net.two(torch.relu(h)) + h


def named_and_read_again(net: Net, x: torch.Tensor) -> torch.Tensor:
    h = net.one(x)
    y = torch.relu(h)
    print(end=str(h)[:0])
    return net.two(y)


def kept_in_a_list(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.kept[:] = [net.one(x)]
    return net.two(torch.relu(net.kept[0]))


def handed_on_by_c_code(net: Net, x: torch.Tensor) -> torch.Tensor:
    """The tuple is the call's own arguments, so there are as many references as if the list did not hold one."""
    net.kept[:] = [net.one(x)]
    results = list(itertools.starmap(net.relu, [(net.kept[0],)]))
    return net.two(results[0])


def kept_in_an_array(net: Net, x: torch.Tensor) -> torch.Tensor:
    """The operator is applied to what the array holds, which is not counted once more for it."""
    array = np.empty(1, dtype=object)
    array[0] = net.one(x)
    results = array + 1.0
    print(end=str(array[0])[:0])
    net.kept[:] = [array[0]]
    return net.two(results[0])


def kept_in_an_array_for_a_function(net: Net, x: torch.Tensor) -> torch.Tensor:
    array = np.empty(1, dtype=object)
    array[0] = net.one(x)
    results = np.add(array, 1.0)
    net.kept[:] = [array[0]]
    return net.two(results[0])


class OfAnArray(torch.autograd.Function):
    """Computes in NumPy and returns a tensor on the array's memory."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kept: list[Any]) -> torch.Tensor:
        kept[:] = [x.detach().numpy() - 0.5]
        return torch.from_numpy(kept[0])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def on_the_memory_of_an_array(net: Net, x: torch.Tensor) -> torch.Tensor:
    h = OfAnArray.apply(net.one(x), net.kept)
    return net.two(torch.relu(h))


def kept_as_a_view(net: Net, x: torch.Tensor) -> torch.Tensor:
    h = net.one(x)
    net.kept[:] = [h.detach().view(-1)]
    return net.two(torch.relu(h))


def seen_by_a_hook(net: Net, x: torch.Tensor) -> torch.Tensor:
    return net.two(net.watched(net.one(x)))


def of_a_view(net: Net, x: torch.Tensor) -> torch.Tensor:
    return net.two(torch.relu(net.one(x).view(WIDTH, N).t()))


def of_a_leaf(net: Net, x: torch.Tensor) -> torch.Tensor:
    return net.two(torch.relu(x.requires_grad_()))


def of_data(net: Net, x: torch.Tensor) -> torch.Tensor:
    return net.two(x * net.one.weight[0])


def with_a_gradient_of_its_own(net: Net, x: torch.Tensor) -> torch.Tensor:
    return net.two(net.one(x) * net.three.weight[0])


def with_a_larger_result(net: Net, x: torch.Tensor) -> torch.Tensor:
    return net.two(net.one(x[:1]) + x)


def watched_for_its_gradient(net: Net, x: torch.Tensor) -> torch.Tensor:
    h = net.one(x)
    h.register_hook(lambda gradient: gradient * 2)
    return net.two(torch.relu(h))


def of_what_relu_saved(net: Net, x: torch.Tensor) -> torch.Tensor:
    return net.two(F.dropout(torch.relu(net.one(x)), 0.5))


def rounded(net: Net, x: torch.Tensor) -> torch.Tensor:
    return net.two(F.elu(net.one(x)))


def copied(net: Net, x: torch.Tensor) -> torch.Tensor:
    return net.two(F.hardtanh(net.one(x)))


def traded(net: Net, x: torch.Tensor) -> torch.Tensor:
    return net.two(F.leaky_relu(net.one(x)).exp())


def added_after_the_activation(net: Net, x: torch.Tensor) -> torch.Tensor:
    residual = x
    out = net.relu(net.one(x))
    out = out + residual
    return net.two(out)


def added_before_the_activation(net: Net, x: torch.Tensor) -> torch.Tensor:
    identity = x
    out = net.norm(net.one(x))
    out = out + identity
    return net.two(net.relu(out))


def a_branch_that_begins_with_its_activation(net: Net, x: torch.Tensor) -> torch.Tensor:
    x = net.one(x)
    return net.two(net.relu(x)) + x


SAFE_PLACES = [(rebound, "relu"), (on_a_temporary, "relu"), (of_a_sum, "add")]
SAFE_PLACES += [(added_before_the_activation, "add"), (added_before_the_activation, "relu")]
UNSAFE_PLACES: list[tuple[Callable[[Net, torch.Tensor], torch.Tensor], str, str]] = [
    (saved_by_another, "relu", "would raise 'modified by an inplace operation': linear of Net.two, FILE:LINE saved its input for backward"),
    (read_again, "relu", "its input is read again by add of Net, FILE:LINE"),
    (named_and_read_again, "relu", "`h` of named_and_read_again, FILE:LINE may read it again"),
    (kept_in_a_list, "relu", "something that no frame shows may read it again"),
    (handed_on_by_c_code, "relu", "something that no frame shows may read it again"),
    (kept_in_an_array, "add", "something that no frame shows may read it again"),
    (kept_in_an_array_for_a_function, "add", "something that no frame shows may read it again"),
    (on_the_memory_of_an_array, "relu", "the memory of its input is not PyTorch's own (NumPy's, or shared)"),
    (kept_as_a_view, "relu", "a view of its input lives, or autograd saved it for backward"),
    (seen_by_a_hook, "relu", "a hook of ReLU may read it again"),
    (of_a_view, "relu", "its input is a view"),
    (of_a_leaf, "relu", "its input is a leaf"),
    (of_data, "mul", "the gradient of its other argument reads the input"),
    (with_a_gradient_of_its_own, "mul", "the gradient of its other argument reads the input"),
    (with_a_larger_result, "add", "its result is larger than its input"),
    (watched_for_its_gradient, "relu", "somebody watches its input (a hook on it, an attribute, a weak reference)"),
    (
        of_what_relu_saved, "dropout",
        "would raise 'modified by an inplace operation': relu of Net, FILE:LINE saved its input for backward",
    ),
    (
        added_after_the_activation, "add",
        "would raise 'modified by an inplace operation': relu of Net.relu, FILE:LINE saved its input for backward",
    ),
    (a_branch_that_begins_with_its_activation, "relu", "its input is read again by add of Net, FILE:LINE"),
    (rounded, "elu", ROUNDED),
    (copied, "hardtanh", COPIED),
    (traded, "leaky_relu", "in place it would save its result instead of its input, so nothing would be won"),
]  # fmt: skip


@on_a_python_understood
@pytest.mark.parametrize(("forward", "function"), SAFE_PLACES)
def test_a_safe_place_is_proposed_and_training_in_place_equals_plain_training(
    forward: Callable[[Net, torch.Tensor], torch.Tensor], function: str
) -> None:
    program = training(forward)
    trace = trace_of(program)
    site = sites_of(trace)[function]
    assert (site.reason, site.nbytes) == ("", N * WIDTH * 4)
    found, tape = applied(program, move_for(trace, [site.call]))
    assert differences(plain(program), found) == []
    assert (tape.counts.num_overwritten, tape.counts.num_not_overwritten) == (3, 0)


@on_a_python_understood
@pytest.mark.parametrize(("forward", "function", "reason"), UNSAFE_PLACES)
def test_an_unsafe_place_is_not_proposed_the_reason_is_told_and_forced_it_runs_out_of_place(
    forward: Callable[[Net, torch.Tensor], torch.Tensor], function: str, reason: str
) -> None:
    program = training(forward)
    trace = trace_of(program)
    site = sites_of(trace)[function]
    told = site.reason.replace(__file__, "FILE")
    assert told.partition("FILE:")[0] == reason.partition("FILE:")[0]
    assert told.endswith(reason.rpartition("LINE")[2])
    assert site.call not in propose(trace)
    if forward is traded:  # safe all the same
        return
    found, tape = applied(program, move_for(trace, [site.call]))
    assert differences(plain(program), found) == []
    assert (tape.counts.num_overwritten, tape.counts.num_not_overwritten) == (0, 3)


@on_a_python_understood
def test_a_later_step_that_keeps_the_input_runs_out_of_place_and_equals_plain_training() -> None:
    def forward(net: Net, x: torch.Tensor) -> torch.Tensor:
        h = net.one(x)
        if net.step_number == 2:
            net.kept.append(h)
        y = net.relu(h)
        if net.step_number == 3:
            y = y + h
        return net.two(y)

    program = training(forward)
    calls = [site.call for site in find_sites(trace_of(program)) if site.reason.startswith("`h` of forward")]
    assert len(calls) == 1  # one path of the program reads it, so it is not proposed in the first place

    def keep(net: Net, x: torch.Tensor) -> torch.Tensor:
        x = net.one(x)
        if net.step_number == 2:
            net.kept.append(x)
        x = net.relu(x)
        return net.two(x)

    program = training(keep)
    trace = trace_of(program)
    found, tape = applied(program, move_for(trace, propose(trace)), num_steps=4)
    assert differences(plain(program, 4), found) == []
    assert (tape.counts.num_overwritten, tape.counts.num_not_overwritten) == (3, 1)


PROGRAMS = FORWARDS | LOOPS


@on_a_python_understood
@pytest.mark.parametrize(("number", "name"), list(enumerate(PROGRAMS)))
def test_a_trap_program_with_everything_in_place_that_may_be_equals_its_plain_self(number: int, name: str) -> None:
    """Half of them with every saved tensor evicted as well: what is in place is a source that was destroyed."""
    found, tape = everywhere(PROGRAMS[name], evict=number % 2 == 0, num_steps=1)
    assert differences(plain(PROGRAMS[name], 1), found) == []
    assert tape.counts.num_overwritten > 0


@on_a_python_understood
def test_undo_takes_the_calls_out_again_and_the_next_step_is_plain() -> None:
    program = training(rebound)
    move = move_for(trace := trace_of(program), propose(trace))
    run = make(program)
    tape = Tape()
    tape.enter()
    try:
        undo = inplace.apply(tape, [move])
        first = snapshot(run, run.step(0))
        tape.end_step()
        undo()
        assert tape.policy is None
        second = snapshot(run, run.step(1))
    finally:
        tape.exit()
    assert differences(plain(program, 2), [first, second]) == []
    assert tape.counts.num_overwritten == 1


# ---- bytes -------------------------------------------------------------------------------------------------------------

MAP = 16 * 8 * 256 * 4  # bytes of a map of Stack: 128 KiB


def stack(activation: Callable[[], nn.Module]) -> Program:
    """Eight times convolution, norm and activation, as the generators of 2019 have them."""

    def make_run() -> Run:
        layers = [layer for _ in range(8) for layer in (nn.Conv1d(8, 8, 1), nn.BatchNorm1d(8), activation())]
        model = nn.Sequential(*layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(16, 8, 256)

        def step(_: int) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Run(step, model, [optimizer])

    return make_run


def measured_peak(program: Program, calls: list[int] | None, trace: Any) -> int:
    """The allocator's own peak of the second step, above what was there when it began."""
    run, tape = make(program), Tape()
    tape.enter()
    inplace.apply(tape, [move_for(trace, calls)] if calls else [])
    try:
        run.step(0)
        tape.end_step()
        _, memory = oracle.measure_step(lambda: run.step(1), oracle.record_shared)
    finally:
        tape.exit()
    return memory.peak_bytes - memory.baseline_bytes


@on_a_python_understood
def test_leaky_relu_in_place_holds_one_map_a_layer_less_and_relu_none() -> None:
    program = stack(lambda: nn.LeakyReLU(0.2))
    trace = trace_of(program, 2)
    assert len(propose(trace)) == 8
    worth = weigh(trace, edit(trace, propose(trace)))
    assert worth.held_bytes == 8 * MAP
    measured_bytes = measured_peak(program, None, trace) - measured_peak(program, propose(trace), trace)
    assert worth.peak_bytes == pytest.approx(
        measured_bytes, abs=MAP // 2
    )  # of 3.6 MiB: the measured peak moves by some KiB from run to run
    assert measured_bytes >= 7 * MAP

    program = stack(nn.ReLU)
    trace = trace_of(program, 2)
    assert len(propose(trace)) == 8
    worth = weigh(trace, edit(trace, propose(trace)))
    measured_bytes = measured_peak(program, None, trace) - measured_peak(program, propose(trace), trace)
    assert (worth.held_bytes, worth.peak_bytes) == (0, 0)
    assert measured_bytes == pytest.approx(0, abs=MAP // 16)


@on_a_python_understood
def test_a_plan_takes_what_is_free_first_and_its_peak_is_the_measured_one() -> None:
    program = stack(lambda: nn.LeakyReLU(0.2))
    peak = replay(trace_of(program, 2)).peak_bytes
    run = make(program)
    with memfit.fit(run.model, run.optimizers[0], budget=peak - 4 * MAP) as session:
        found = [snapshot(run, run.step(number)) for number in range(5)]
    assert {move.technique for move in session.plan.moves} == {"inplace"}
    assert sum(move.saved_bytes for move in session.plan.moves) in (4 * MAP, 5 * MAP)
    assert session.plan.extra_seconds == 0
    result = session.result()
    assert result.planned_peak_bytes == session.plan.predicted_peak_bytes <= peak - 4 * MAP
    assert differences(plain(program, 5), found) == []


@on_a_python_understood
def test_a_step_measured_under_the_plan_has_the_trace_of_the_plain_step() -> None:
    program = stack(lambda: nn.LeakyReLU(0.2))
    expected = trace_of(program, 2)
    run = make(program)
    with memfit.fit(run.model, run.optimizers[0], budget=replay(expected).peak_bytes - 5 * MAP) as session:
        for number in range(4):
            run.step(number)
    found = session.traces[-1]
    assert session._tape.counts.num_overwritten > 0
    assert replay(found).peak_bytes == replay(expected).peak_bytes
    assert [call.place for call in found.calls] == [call.place for call in expected.calls]
    assert propose(found) == propose(expected)
    cells = [
        [(cell.position, cell.previous, trace.storages[cell.storage].nbytes) for cell in trace.cells]
        for trace in (found, expected)
    ]
    assert cells[0] == cells[1]
    assert [(handle.cell, handle.call) for handle in found.handles] == [
        (handle.cell, handle.call) for handle in expected.handles
    ]


def bytes_when_calls_begin(program: Program, *, in_place: bool) -> dict[str, int]:
    """Of the third step, measured: by place of a call, what the program has alive when it begins. (What stands for a part of a call begins
    after it.)"""
    run = make(program)
    with Session(None, None) as session:
        run.step(0)
        run.step(1)
        if in_place:
            trace = session.traces[-1]
            inplace.apply(session._tape, [move_for(trace, propose(trace))])
        run.step(2)
    trace = session.traces[-1]
    found: dict[str, int] = {}
    for (operation, operand), live_bytes in zip(trace.events, replay(trace).live_bytes, strict=True):
        if operation == BEGIN:
            found.setdefault(trace.calls[operand].place, live_bytes)
    return found


def held_by_a_local_while_others_run(net: Net, x: torch.Tensor) -> torch.Tensor:
    """h ends with the function, and not with the call that overwrites it."""

    def inner(h: torch.Tensor) -> torch.Tensor:
        h = net.one(h)
        return net.norm(h + x).exp().sin()

    return net.two(inner(x).exp())


TRACED = PROGRAMS | {
    forward.__name__: training(forward) for forward, _ in [*SAFE_PLACES, (held_by_a_local_while_others_run, "")]
}
del TRACED["a_chain_of_two_thousand_calls"], TRACED["optimizers_that_step_inside_backward"]  # long; begins anywhere


@on_a_python_understood
@pytest.mark.parametrize("name", TRACED)
def test_what_is_alive_in_a_step_measured_in_place_is_what_is_alive_in_the_plain_one(name: str) -> None:
    expected, found = (bytes_when_calls_begin(TRACED[name], in_place=each) for each in (False, True))
    assert found == expected


@on_a_python_understood
def test_taking_a_call_apart_undoes_the_edit_to_the_byte() -> None:
    trace = trace_of(stack(lambda: nn.LeakyReLU(0.2)), 2)
    call = propose(trace)[3]
    edited = edit(trace, [call])
    again = apart(edited, call)
    assert replay(edited).peak_bytes < replay(trace).peak_bytes
    assert replay(again).peak_bytes == replay(trace).peak_bytes
    assert weigh(trace, again).held_bytes == 0


def test_the_programs_own_calls_in_place_that_save_nothing_are_told() -> None:
    """ReLU's result is saved anyway and its input would be gone; of LeakyReLU a map is saved."""
    trace = trace_of(stack(lambda: nn.ReLU(inplace=True)), 2)
    assert {trace.calls[call].function for call in find_idle(trace)} == {"relu"}
    assert len(find_idle(trace)) == 8
    assert find_idle(trace_of(stack(lambda: nn.LeakyReLU(0.2, inplace=True)), 2)) == []


# ---- with recompute ----------------------------------------------------------------------------------------------------


def small(name: str, monkeypatch: pytest.MonkeyPatch, out_of_place: Callable[[], nn.Module] | None) -> Program:
    """W3 or W4 at reduced size; out_of_place: what stands for its in-place ReLUs."""
    sizes = {
        "W3": {"W3_BATCH": 16, "W3_SIDE": 16, "W3_WIDTHS": (8, 16), "W3_BLOCKS": 1},
        "W4": {"W4_BATCH": 4, "W4_SIDE": 32, "W4_BASE": 8, "W4_DEPTH": 1},
    }
    for size, value in sizes[name].items():
        monkeypatch.setattr(workloads, size, value)
    if out_of_place is not None:
        monkeypatch.setattr(nn, "ReLU", lambda inplace: out_of_place())

    def make_run() -> Run:
        setup = workloads.WORKLOADS[name].make()

        def step(_: int) -> torch.Tensor:
            setup.optimizer.zero_grad()
            loss = setup.forward_backward()
            setup.optimizer.step()
            return loss

        return Run(step, setup.model, [setup.optimizer])

    return make_run


@on_a_python_understood
@pytest.mark.parametrize(("name", "activation"), [("W3", None), ("W3", nn.LeakyReLU), ("W4", nn.ReLU), ("W4", nn.LeakyReLU)])
def test_in_place_and_recompute_hold_residual_and_u_nets_to_a_budget_bit_for_bit(
    name: str, activation: type[nn.Module] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = small(name, monkeypatch, activation)
    trace = trace_of(program, 2)
    budget = int(0.8 * replay(trace).peak_bytes)
    run = make(program)
    with memfit.fit(run.model, run.optimizers[0], budget=budget) as session:
        found = [snapshot(run, run.step(number)) for number in range(4)]
    assert differences(plain(program, 4), found) == []
    result = session.result()
    assert result.peak_bytes <= budget
    # workspaces of convolutions; how many of the peak's depends on the plan, and that on the seconds measured
    assert result.planned_peak_bytes == pytest.approx(session.plan.predicted_peak_bytes, rel=0.01)
    techniques = {move.technique for move in session.plan.moves}
    assert techniques <= {"inplace", "recompute"}
    assert ("inplace" in techniques) is (activation is nn.LeakyReLU)
    assert session._tape.counts.num_not_overwritten == 0
