"""Tests what counts as judged, as a fault and as agreement."""

from __future__ import annotations

import math

import pytest
import torch

from cifar_zero.step_check.findings import Findings
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
    assert verdict(found("gradient", 1e-7, elements=200), blunt, found("update", 0.0)).outcome == "within rounding"


def test_a_line_says_what_was_judged_and_the_smallest_fault_that_would_be_seen():
    made = verdict(found("gradient", 1e-7), found("gradient", 2e-4, 4e-4), found("update", 0.0))
    made.note("updates on a disk")
    assert str(made) == (
        "1 step checked, 300 values; largest shares of a bound: gradient 50 %, all others 0 %; "
        "a scale error of 0.0001 % would be seen; not checked: updates on a disk"
    )


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
