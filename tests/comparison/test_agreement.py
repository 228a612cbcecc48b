from __future__ import annotations

import math
from dataclasses import replace

import pytest

from cifar_zero.comparison.agreement import BROKEN, EPS, FACTOR, FLOOR, Apart, Pair, bound, eps_of, judge, worst
from cifar_zero.comparison.result import Run, Verdict
from tests.comparison.made_up import made_up

UNIT = EPS["32"]
LOSSES = [2.3, 2.2, 2.0, 1.9, 1.7]


def pair(*moved: float, weights: float | None = 0.0) -> Pair:
    """Returns the reference and a run whose loss at each step differs from it by `moved`."""
    other = curve([loss + by for loss, by in zip(LOSSES, moved, strict=True)])
    return Pair(curve(LOSSES), other, None if weights is None else {"w": Apart(weights, 0.5)})


def curve(losses: list[float], first: int = 1) -> Run:
    return made_up(tuple(losses), first=first)


DRIFT = pair(1e-6, 3e-6, 2e-6, 2e-6, 8e-6, weights=1e-5)
"""The drift of a perturbed run of the reference, caused by rounding."""


def test_equal_bits_need_no_bound() -> None:
    same = pair(0, 0, 0, 0, 0)
    assert judge(same, bound(same, None)).kind == "bit-identical"


def test_different_weights_alone_make_runs_different() -> None:
    """Two runs with equal losses updated their weights differently in the last step."""
    parted = pair(0, 0, 0, 0, 0, weights=1.0)
    verdict = judge(parted, bound(parted, DRIFT))
    assert (verdict.kind, verdict.first_parting, verdict.first_difference) == ("different", None, None)


def test_the_drift_of_a_perturbed_run_counts_as_rounding() -> None:
    found = pair(0, 1e-6, 2e-6, 1e-6, 4e-6, weights=9e-6)
    verdict = judge(found, bound(found, DRIFT))
    assert (verdict.kind, verdict.first_difference, verdict.first_parting) == ("within rounding", 2, None)
    assert verdict.loss_difference == pytest.approx(4e-6)
    assert verdict.weight_bound == pytest.approx(FACTOR * 1e-5 + FLOOR * UNIT * 0.5)


def test_each_step_has_its_own_bound() -> None:
    """A drift that is rounding after five steps is too large after one; a bound uses the drift up to twice its step."""
    allowed = bound(DRIFT, DRIFT).losses
    assert allowed[2] == pytest.approx(allowed[4], rel=0.1)
    assert allowed[1] == pytest.approx(FACTOR * 3e-6 + FLOOR * UNIT * LOSSES[1])
    early = pair(0, allowed[1] * 1.1, 0, 0, 0)
    verdict = judge(early, bound(early, DRIFT))
    assert (verdict.kind, verdict.first_difference, verdict.first_parting) == ("different", 2, 2)
    late = pair(0, 0, 0, 0, allowed[1] * 1.1)
    assert judge(late, bound(late, DRIFT)).kind == "within rounding"


def test_without_a_perturbed_run_only_gross_faults_are_judged() -> None:
    little, gross = pair(0, 0, 1e-6, 0, 0), pair(0, 0, 10.0, 0, 0)
    assert bound(little, None).undecided == 1
    assert judge(gross, bound(gross, None)).first_parting == 3


def test_a_coarser_format_adds_one_eps_to_the_bound() -> None:
    """The perturbed run, in float32, does not show bfloat16's rounding; weights are then not judged."""
    found = replace(pair(0, 0, 1e-2, 0, 0, weights=0.1), eps=EPS["bf16"])
    allowed = bound(found, DRIFT)
    assert allowed.losses[0] == pytest.approx(FACTOR * 3e-6 + 2**-7 * LOSSES[0])
    assert (judge(found, allowed).kind, allowed.weights) == ("within rounding", None)


def test_nan_is_never_rounding() -> None:
    weights = {"w": Apart(math.inf, 0.5)}
    broken = Pair(curve(LOSSES), curve([*LOSSES[:3], math.nan, math.nan]), weights)
    verdict = judge(broken, bound(broken, DRIFT))
    assert (verdict.kind, verdict.first_parting, verdict.loss_difference) == ("different", 4, None)


def test_a_run_that_ended_early_is_different() -> None:
    short = Pair(curve(LOSSES), curve(LOSSES[:3]), {})
    verdict = judge(short, bound(short, DRIFT))
    assert (verdict.kind, verdict.first_difference, verdict.first_parting) == ("different", None, 4)
    assert verdict.remark == "one run ended earlier"


def test_a_run_that_began_later_is_judged_from_its_first_step() -> None:
    resumed = Pair(curve(LOSSES), curve([*LOSSES[2:4], LOSSES[4] + 1e-6], first=3), {"w": Apart(1e-6, 0.5)})
    verdict = judge(resumed, bound(resumed, DRIFT))
    assert (verdict.kind, verdict.first_difference, verdict.first_parting) == ("within rounding", 5, None)
    far = Pair(curve(LOSSES), curve([*LOSSES[2:4], 2.0], first=3), {"w": Apart(1e-6, 0.5)})
    assert judge(far, bound(far, DRIFT)).first_parting == 5


def test_a_perturbed_run_counts_at_the_steps_that_it_has() -> None:
    """A perturbed run that began later says nothing about the steps before."""
    second = Pair(curve(LOSSES), curve([LOSSES[3], LOSSES[4] + 1e-6], first=4), {})
    allowed = bound(DRIFT, second).losses
    assert allowed[1] == pytest.approx(FLOOR * UNIT * LOSSES[1])
    assert allowed[2] == pytest.approx(FACTOR * 1e-6, rel=0.6)


def long(*others: tuple[int, float], weights: float = 0.0) -> Pair:
    """Returns 500 steps of loss 2.3 and a run that differs from a step on; `others` are steps and differences."""
    other = [2.3 + sum(by for step, by in others if number >= step) for number in range(1, 501)]
    return Pair(curve([2.3] * 500), curve(other), {"w": Apart(weights, 0.5)})


SATURATED = long((1, 1e-6), (201, 0.3), weights=1.0)
"""A perturbed run whose drift is saturated: rounding has sent the training elsewhere."""


@pytest.mark.parametrize("by", [1.0, 2.2])
def test_saturated_drift_is_not_judged(by: float) -> None:
    late = long((301, by), weights=2.0)
    allowed = bound(late, SATURATED)
    verdict = judge(late, allowed)
    assert (verdict.kind, allowed.undecided, allowed.weights) == ("within rounding", 101, None)
    assert verdict.loss_difference == 0.0, "of the steps that were judged"


def test_a_fault_is_found_before_saturation_and_a_gross_one_after_it() -> None:
    early, gross = long((50, 1e-3)), long((301, 2.4))
    assert judge(early, bound(early, SATURATED)).first_parting == 50
    assert judge(gross, bound(gross, SATURATED)).first_parting == 301
    nan = long((301, math.nan))
    assert judge(nan, bound(nan, SATURATED)).first_parting == 301


def test_a_drift_that_is_nan_decides_nothing() -> None:
    allowed = bound(long((301, 1.0)), long((1, 1e-6), (201, math.nan), weights=math.inf))
    assert allowed.undecided == 101
    assert all(map(math.isfinite, allowed.losses))


def test_each_tensor_has_its_own_bound() -> None:
    """A large drift in one layer does not excuse one in another."""
    second = Pair(curve(LOSSES), DRIFT.other, {"first": Apart(1e-2, 0.5), "last": Apart(1e-6, 0.5)})
    other = Pair(curve(LOSSES), DRIFT.other, {"first": Apart(2e-2, 0.5), "last": Apart(1e-3, 0.5)})
    verdict = judge(other, bound(other, second))
    assert (verdict.kind, verdict.first_parting, verdict.weight_difference) == ("different", None, 1e-3)


@pytest.mark.parametrize("second", [None, DRIFT])
@pytest.mark.parametrize("moved", [0.0, 1e-7])
def test_broken_weights_always_fail(second: Pair | None, moved: float) -> None:
    broken = pair(0, 0, 0, 0, moved, weights=math.inf)
    verdict = judge(broken, bound(broken, second))
    assert (verdict.kind, verdict.weight_difference, verdict.remark) == ("different", None, BROKEN)


def test_the_figures_are_those_of_the_first_step_beyond_its_bound() -> None:
    """A large late difference may be rounding, while a small early one is not."""
    drift = pair(1e-7, 1e-7, 1e-7, 1e-3, 1e-3)
    found = pair(1e-4, 0, 0, 0, 5e-3)
    verdict = judge(found, bound(found, drift))
    assert (verdict.kind, verdict.first_parting) == ("different", 1)
    assert verdict.loss_difference == pytest.approx(1e-4)


def test_the_worst_seed_counts() -> None:
    rounding = Verdict("within rounding", loss_difference=1.0, loss_bound=2.0)
    more = Verdict("within rounding", loss_difference=1.0, loss_bound=1.5)
    assert worst([rounding, Verdict("bit-identical"), more]) is more
    assert worst([Verdict("different"), rounding]).kind == "different"


def test_eps_are_those_of_torch() -> None:
    import torch

    for precision, dtype in (("32-true", torch.float32), ("bf16-mixed", torch.bfloat16), ("16-mixed", torch.float16)):
        assert eps_of(precision, "cpu", convolves=True) == torch.finfo(dtype).eps
    assert eps_of("32-true", "gpu", convolves=True) == 2**-10


def test_only_convolutions_are_in_tf32() -> None:
    """torch multiplies float32 matrices in full float32 by default."""
    assert eps_of("32-true", "gpu", convolves=False) == 2**-23
