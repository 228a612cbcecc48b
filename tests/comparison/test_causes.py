from __future__ import annotations

from typing import Any

import pytest

from cifar_zero.comparison import causes as known
from cifar_zero.comparison.agreement import Pair
from cifar_zero.comparison.result import Run, VerdictKind
from tests.comparison.made_up import made_up

ZERO: dict[str, Any] = {"zero_optimization": {"stage": 2, "overlap_comm": False}, "communication_data_type": "float32"}
OVERLAPPING = {**ZERO, "zero_optimization": {"stage": 1, "overlap_comm": True}}
OFFLOADED = {**ZERO, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}


def causes(reference: Run, other: Run, normalises: bool, kind: VerdictKind = "within rounding") -> list[str]:
    return known.causes(Pair(reference, other, None, normalises=normalises), kind)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"deepspeed": OVERLAPPING}, "overlap_comm"),
        ({"deepspeed": ZERO, "settings": {"gradient_clip_val": 1.0}}, "Clipping"),
        ({"deepspeed": {**ZERO, "communication_data_type": "bfloat16"}}, "lower precision"),
        ({"deepspeed": OFFLOADED, "settings": {"optimizer": {"name": "adam"}}}, "offloaded optimizer"),
        ({"deepspeed": ZERO, "precision": "bf16-mixed"}, "Mixed precision"),
        ({"accumulate": 4}, "number of micro-batches"),
        ({"world_size": 1}, "number of ranks"),
        ({"skipped_steps": 3}, "float16 skipped"),
        ({"rates": (0.1, 0.3)}, "learning rates differ"),
    ],
)
def test_a_cause_is_named_where_it_applies(changes: dict[str, Any], word: str) -> None:
    found = causes(made_up(rates=(0.1, 0.2)), made_up(**{"rates": (0.1, 0.2), **changes}), normalises=False)
    assert len(found) == 1
    assert word in found[0]


def test_accumulation_under_zero_2_sums_in_another_order() -> None:
    both: dict[str, Any] = {"accumulate": 4}
    (cause,) = causes(made_up(**both), made_up(deepspeed=ZERO, **both), normalises=False)
    assert "stages 2 and 3 sum gradients over the ranks before" in cause


def test_a_cause_may_lie_in_the_reference() -> None:
    (cause,) = causes(made_up(deepspeed=OVERLAPPING), made_up(), normalises=False)
    assert cause.startswith("overlap_comm")


def test_batch_norms_see_micro_batches() -> None:
    reference, other = made_up(), made_up(micro_batch_size=4)
    assert causes(reference, other, normalises=False) == []
    (cause,) = causes(reference, other, normalises=True)
    assert "Batch normalisation" in cause


def test_nothing_is_named_without_a_reason() -> None:
    assert causes(made_up(), made_up(deepspeed=ZERO), normalises=True) == []


def test_rounding_never_explains_a_difference() -> None:
    """The verdict "different" names only causes that change the maths; equal runs have no cause."""
    reference = made_up(rates=(0.1, 0.2))
    changes: dict[str, Any] = {"accumulate": 4, "skipped_steps": 3, "settings": {"gradient_clip_val": 1.0}}
    other = made_up(rates=(0.1, 0.3), deepspeed=OVERLAPPING, **changes)
    assert len(causes(reference, other, normalises=False)) == 5
    suspects = causes(reference, other, normalises=False, kind="different")
    assert [sentence.split()[0] for sentence in suspects] == ["overlap_comm", "float16", "The"]
    assert causes(reference, other, normalises=False, kind="bit-identical") == []
