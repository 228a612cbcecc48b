from __future__ import annotations

from typing import Any

import pytest

from comparison.causes import causes
from tests.comparison.made_up import made_up

ZERO: dict[str, Any] = {"zero_optimization": {"stage": 2, "overlap_comm": False}, "communication_data_type": "float32"}
OVERLAPPING = {**ZERO, "zero_optimization": {"stage": 1, "overlap_comm": True}}
OFFLOADED = {**ZERO, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"deepspeed": OVERLAPPING}, "overlap_comm"),
        ({"deepspeed": ZERO, "settings": {"gradient_clip_val": 1.0}}, "Clipping"),
        ({"deepspeed": {**ZERO, "communication_data_type": "bfloat16"}}, "in bfloat16"),
        ({"deepspeed": OFFLOADED, "settings": {"optimizer": {"name": "adam"}}}, "offloaded optimizer"),
        ({"deepspeed": ZERO, "precision": "bf16-mixed"}, "Mixed precision"),
        ({"accumulate": 4}, "4 micro-batches a step against 1"),
        ({"world_size": 1}, "1 ranks against 2"),
        ({"skipped_steps": 3}, "skipped 3 steps"),
        ({"rates": (0.1, 0.3)}, "not equal at step 2"),
    ],
)
def test_a_cause_is_named_where_it_applies(changes: dict[str, Any], word: str) -> None:
    found = causes(made_up(rates=(0.1, 0.2)), made_up(**{"rates": (0.1, 0.2), **changes}), normalises=False)
    assert len(found) == 1
    assert word in found[0]


def test_accumulation_under_zero_2_is_in_another_order() -> None:
    both: dict[str, Any] = {"accumulate": 4}
    (cause,) = causes(made_up(**both), made_up(deepspeed=ZERO, **both), normalises=False)
    assert "stage 2 adds gradients up over the ranks before" in cause


def test_a_cause_may_lie_in_the_reference_or_in_both() -> None:
    (cause,) = causes(made_up(deepspeed=OVERLAPPING), made_up(), normalises=False)
    assert cause.startswith("In the reference: overlap_comm")
    (cause,) = causes(made_up(deepspeed=OVERLAPPING), made_up(deepspeed=OVERLAPPING), normalises=False)
    assert cause.startswith("In both runs: overlap_comm")


def test_batch_norms_see_micro_batches() -> None:
    reference, other = made_up(), made_up(micro_batch_size=4)
    assert causes(reference, other, normalises=False) == []
    (cause,) = causes(reference, other, normalises=True)
    assert "no rounding" in cause


def test_nothing_is_named_without_a_reason() -> None:
    assert causes(made_up(), made_up(deepspeed=ZERO), normalises=True) == []
