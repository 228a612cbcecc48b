"""Tests what counts as judged, as a fault and as agreement."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from cifar_zero.step_check.findings import Findings, explain_factor
from cifar_zero.step_check.replay import Replay
from cifar_zero.step_check.verdict import Finding, Kind, Outcome, Verdict


def verdict(*findings: Finding) -> Verdict:
    made = Verdict([1])
    made.add(findings)
    return made


def found(kind: Kind, off: float, allowed: float = 1e-6, elements: int = 100) -> Finding:
    return Finding(1, kind, "net.fc1.weight", off, allowed, elements)


@pytest.mark.parametrize(
    ("findings", "outcome"),
    [
        ([found("gradient", 0.0), found("update", 0.0)], "bit-identical"),
        ([found("gradient", 1e-7), found("update", 0.0)], "within rounding"),
        ([found("gradient", 1e-7), found("update", 2e-6)], "different"),
        ([found("gradient", math.nan), found("update", 0.0)], "different"),
        ([found("gradient", 0.0), found("update", 0.0), found("weight", 1e-30, 0.0)], "different"),
        ([found("gradient", 0.9, 0.6), found("update", 0.0)], "different"),
        ([found("gradient", 0.1, 0.6), found("update", 0.0)], "not judged"),
        ([found("gradient", 0.0)], "not judged"),
        ([], "not judged"),
    ],
)
def test_what_was_not_judged_is_never_agreement(findings: list[Finding], outcome: Outcome):
    assert verdict(*findings).outcome == outcome


def test_less_than_95_percent_of_the_elements_is_not_judged():
    blunt = found("gradient", 0.1, allowed=0.6, elements=6)
    made = verdict(found("gradient", 1e-7, elements=94), blunt, found("update", 0.0))
    assert made.judged == 0.94
    assert made.outcome == "not judged"
    assert "only 94 % of the gradients and updates could be judged" in str(made)
    made = verdict(found("gradient", 1e-7, elements=20_000), blunt, found("update", 0.0))
    assert made.outcome == "within rounding"
    assert "; 99.9 % of the gradients and updates could be judged, not the gradient of net.fc1.weight" in str(made)


def test_a_line_says_what_was_judged_and_the_smallest_fault_that_would_be_seen():
    made = verdict(found("gradient", 1e-7), found("gradient", 2e-4, 4e-4), found("update", 0.0))
    made.note("updates on a disk")
    assert str(made) == (
        "1 step checked, 300 values; largest shares of a bound: gradient 50 %, all others 0 %; "
        "a scale error of 0.0001 % would be seen; not checked: updates on a disk"
    )


def compared(rounding: float = 0.0, dtype: torch.dtype = torch.bfloat16, **gradients: tuple[float, float]) -> Verdict:
    """Returns the verdict on gradients, given as the strategy's value and the value in the replay in `dtype`. The
    replay in float64 differs by the share `rounding`."""
    made = verdict(found("update", 0.0))
    strategy, correct = (
        {name: torch.full((100,), pair[side], dtype=torch.float64) for name, pair in gradients.items()}
        for side in (0, 1)
    )
    summed = {name: gradient.norm() for name, gradient in correct.items()}
    low = Replay(torch.zeros(1), correct, summed, {}, set(), torch.zeros(1))
    exact = replace(low, gradients={name: gradient * (1 + rounding) for name, gradient in correct.items()})
    findings = Findings(1, made)
    findings.compare_gradients(strategy, low, exact, dict.fromkeys(correct, dtype))
    made.add(findings.all)
    return made


@pytest.mark.parametrize(("size", "outcome"), [(1e-3, "different"), (1e-6, "not judged")])
def test_a_lost_gradient_is_found_or_does_not_count_as_judged(size: float, outcome: Outcome):
    """The gradient of a head is much smaller than the other gradient."""
    made = compared(body=(1.0, 1.0), head=(0.0, size))
    assert made.outcome == outcome
    if outcome == "not judged":
        assert "only 50 % of the gradients and updates could be judged, not the gradient of head, which is" in str(made)


def test_a_gradient_of_zeros_shows_no_scale_error():
    made = compared(0.01, torch.float32, body=(1.001, 1.0), zeros=(0.0, 0.0))
    assert (made.judged, made.outcome) == (1.0, "within rounding")
    assert "a scale error of 3 % would be seen" in str(made)
    assert compared(0.01, torch.float32, body=(1.001, 1.0), zeros=(0.01, 0.0)).outcome == "different"


def test_a_factor_near_1_explains_nothing():
    (fault,) = compared(body=(1.05, 1.0)).faults
    assert fault.pattern == "it is 1.05 times the correct value"
    assert explain_factor("", torch.full((3,), 1.001), torch.ones(3)) == ""


@pytest.mark.parametrize(("off", "outcome"), [(6e-8, "within rounding"), (6e-6, "different")])
def test_the_bound_of_a_sum_whose_summands_cancel_follows_from_the_summands(off: float, outcome: Outcome):
    """Two ranks have the gradients 1 and -0.999. The replay has no rounding error, by chance."""
    made = verdict(found("update", 0.0))
    mean = {"scale": torch.tensor([0.0005], dtype=torch.float64)}
    replay = Replay(torch.zeros(1), mean, {"scale": torch.tensor(1.0)}, {}, set(), torch.zeros(1))
    findings = Findings(1, made)
    findings.compare_gradients({"scale": mean["scale"] + off}, replay, replay, {"scale": torch.float32})
    made.add(findings.all)
    assert made.outcome == outcome
