"""The parts of a small model's costs add up, and each setting does what its name says."""

from __future__ import annotations

import small_models
from small_models import SMALL, TINY, Costs, draw


def test_a_plan_records_evicts_and_replays_and_every_part_is_measured() -> None:
    costs = small_models.measure(TINY["ViT"], num_rounds=1)
    assert costs.num_recorded >= costs.num_replayed > 0
    assert costs.num_evicted > 0
    assert costs.plain_seconds > 0


def test_the_parts_are_told_as_shares_of_the_plain_step() -> None:
    row = Costs(SMALL.name, 1 << 20, 4, 7, 5, 0.05, 0.001, 0.0005, 0.002)
    document = small_models.describe_machine(())
    text = draw(document, [row])
    assert "| 50.00 | +2.0% | +1.0% | +4.0% | 4 | 7 | 5 |" in text
    assert f"{SMALL.name}: +3.0% for recording what its plan needs, within the 5% aimed at." in text
    late = draw(document, [Costs(SMALL.name, 1 << 20, 4, 7, 5, 0.05, 0.002, 0.001, 0)])
    assert "+6.0% for recording what its plan needs, more than the 5% aimed at." in late
