from __future__ import annotations

import math

import pytest

from comparison.agreement import FACTOR, FLOOR, UNITS, Pair, bound, judge, unit_of_rounding, worst
from comparison.result import Curve, Verdict

UNIT = UNITS["32"]
LOSSES = [2.3, 2.2, 2.0, 1.9, 1.7]


def pair(*moved: float, weights: float | None = 0.0) -> Pair:
    """A run whose losses are off the reference's by so much at each step."""
    return Pair(curve(LOSSES), curve([loss + by for loss, by in zip(LOSSES, moved, strict=True)]), weights, 0.5)


def curve(losses: list[float]) -> Curve:
    return Curve(list(range(1, len(losses) + 1)), losses)


DRIFT = pair(1e-6, 3e-6, 2e-6, 2e-6, 8e-6, weights=1e-5)
"""What rounding did to a second run of the reference."""


def test_equal_bits_need_no_bound() -> None:
    same = pair(0, 0, 0, 0, 0)
    assert judge(same, bound(same, None, UNIT)).kind == "bit-identical"


def test_weights_alone_can_part() -> None:
    """A run whose losses are equal has updated its weights in another way in the last step."""
    parted = pair(0, 0, 0, 0, 0, weights=1.0)
    verdict = judge(parted, bound(parted, DRIFT, UNIT))
    assert (verdict.kind, verdict.first_parting, verdict.first_difference) == ("different", None, None)


def test_what_a_second_run_shows_is_rounding() -> None:
    found = pair(0, 1e-6, 2e-6, 1e-6, 4e-6, weights=9e-6)
    verdict = judge(found, bound(found, DRIFT, UNIT))
    assert (verdict.kind, verdict.first_difference, verdict.first_parting) == ("within rounding", 2, None)
    assert verdict.loss_difference == pytest.approx(4e-6)
    assert verdict.weight_bound == pytest.approx(FACTOR * 1e-5 + FLOOR * UNIT * 0.5)


def test_the_bound_is_that_of_the_step() -> None:
    """What is rounding after five steps is none after one; what comes after four may come after two."""
    allowed = bound(DRIFT, DRIFT, UNIT).losses
    assert allowed[2] == pytest.approx(allowed[4], rel=0.1)
    assert allowed[1] == pytest.approx(FACTOR * 3e-6 + FLOOR * UNIT * LOSSES[1])
    early = pair(0, allowed[1] * 1.1, 0, 0, 0)
    verdict = judge(early, bound(early, DRIFT, UNIT))
    assert (verdict.kind, verdict.first_difference, verdict.first_parting) == ("different", 2, 2)
    late = pair(0, 0, 0, 0, allowed[1] * 1.1)
    assert judge(late, bound(late, DRIFT, UNIT)).kind == "within rounding"


def test_without_a_second_run_the_format_decides() -> None:
    little, much = pair(0, 0, 1e-6, 0, 0), pair(0, 0, 1e-2, 0, 0)
    assert judge(little, bound(little, None, UNIT)).kind == "within rounding"
    assert judge(much, bound(much, None, UNIT)).first_parting == 3
    assert judge(much, bound(much, None, UNITS["bf16"])).kind == "within rounding"


def test_no_number_is_no_rounding() -> None:
    broken = Pair(curve(LOSSES), curve([*LOSSES[:3], math.nan, math.nan]), math.nan, 0.5)
    verdict = judge(broken, bound(broken, DRIFT, UNIT))
    assert (verdict.kind, verdict.first_parting, verdict.loss_difference) == ("different", 4, None)


def test_a_run_that_ended_early_is_different() -> None:
    short = Pair(curve(LOSSES), curve(LOSSES[:3]), 0.0, 0.5)
    assert judge(short, bound(short, DRIFT, UNIT)).kind == "different"


def test_the_worst_seed_counts() -> None:
    rounding = Verdict("within rounding", loss_difference=1.0, loss_bound=2.0)
    more = Verdict("within rounding", loss_difference=1.0, loss_bound=1.5)
    assert worst([rounding, Verdict("bit-identical"), more]) is more
    assert worst([Verdict("different"), rounding]).kind == "different"


def test_units_are_those_of_torch() -> None:
    import torch

    for precision, dtype in (("32-true", torch.float32), ("bf16-mixed", torch.bfloat16), ("16-mixed", torch.float16)):
        assert unit_of_rounding(precision, "cpu") == torch.finfo(dtype).eps
    assert unit_of_rounding("32-true", "gpu") == 2**-10
