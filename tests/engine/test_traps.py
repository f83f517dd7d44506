"""DESIGN.md section 2, trap by trap: whatever is evicted, and whenever, training equals plain eager bit for bit."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F

from engine.loops import LOOPS, UNSEEN
from engine.programs import FORWARDS, Model, training
from equality import HOWS, EvictingTape, differences, evicted, plain
from memfit.core.errors import CertificateError

PROGRAMS = FORWARDS | LOOPS
NUM_STEPS = {"a_chain_of_two_thousand_calls": 1}


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_trap_program_equals_its_plain_self_whatever_is_evicted_and_when(name: str, how: str) -> None:
    program, num_steps = PROGRAMS[name], NUM_STEPS.get(name, 2)
    found, tape = evicted(program, how, num_steps, seed=1)
    assert differences(plain(program, num_steps), found) == []
    assert tape.counts.num_kept_instead == 0
    sees_backward = name != "backward_in_another_thread"  # 'late' waits for a backward in the tape's thread
    assert (tape.counts.num_evicted > 0) is (how != "late" or sees_backward)


@pytest.mark.parametrize("how", ["now", "late"])
@pytest.mark.parametrize("name", UNSEEN)
def test_a_source_overwritten_behind_the_tapes_back_stops_the_step(name: str, how: str) -> None:
    with pytest.raises(
        CertificateError, match=r"(overwritten after the call|differs from what was evicted).*stopped before a wrong"
    ):
        evicted(UNSEEN[name], how)


@pytest.mark.parametrize("how", ["now", "half"])
def test_two_hundred_steps_keep_no_tensor_and_no_object(how: str) -> None:
    def forward(model: Model, x: torch.Tensor) -> torch.Tensor:
        for layer in model.layers:
            x = F.dropout(layer(x).relu_().softmax(-1), 0.1)
        return x

    run = training(lambda: Model(forward))()
    tape = EvictingTape(how)
    counts = []
    tape.enter()
    gc.collect()
    gc.disable()  # a cycle would show
    try:
        for number in range(200):
            run.step(number)
            tape.end_step()
            tape._kept.clear()
            if number in (50, 199):
                objects = gc.get_objects()
                counts.append((sum(issubclass(type(each), torch.Tensor) for each in objects), len(objects), len(tape.cells)))
                del objects
    finally:
        gc.enable()
        tape.exit()
    (tensors, objects, cells), (later_tensors, later_objects, later_cells) = counts
    assert (later_tensors, later_cells) == (tensors, cells)
    assert abs(later_objects - objects) < 50
