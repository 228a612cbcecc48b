"""Faults planted into the record of a training: each is found at its first step, with its tensor."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cifar_zero.comparison.recorded import trials
from cifar_zero.comparison.recorded.cases import Case, Job
from cifar_zero.comparison.recorded.judging import first_difference, first_fault, learned
from cifar_zero.comparison.recorded.record import Record, load, record_file
from cifar_zero.comparison.report import write_junit
from cifar_zero.comparison.result import Variant
from tests.support.sgd_record import STEPS, trained

FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "gradients halved": ({"gradient": lambda step, name, value: value / 2}, "step 1: gradient of"),
    "a gradient missing": (
        {"gradient": lambda step, name, value: 0 * value if name == "b" and step >= 3 else value},
        "step 3: gradient of b off by 100 %",
    ),
    "weight decay on a norm": (
        {"update": lambda step, name, value: value - 1e-3 if name == "norm" else value},
        "step 1: update of norm",
    ),
    "a stale state": (
        {"update": lambda step, name, value: 0.9 * value if name == "a" and step >= 4 else value},
        "step 4: update of a",
    ),
    "other initial weights": (
        {"initial": lambda step, name, value: value + 0.01 if name == "a" else value},
        "step 1: initial a",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_at_its_step(fault: str):
    change, expected = FAULTS[fault]
    reference, perturbed, ours = trained(), trained(distance=1e-5), trained(0.0, **change)
    found = first_fault(ours, reference, [perturbed], "32-true")
    assert found is not None
    assert str(found).startswith(expected)


def test_a_constant_ratio_is_told_from_missing_gradients():
    reference, perturbed = trained(), trained(distance=1e-5)
    halved = first_fault(trained(gradient=lambda step, name, value: value / 2), reference, [perturbed], "32-true")
    assert halved is not None
    assert halved.pattern.startswith("the gradients of 3 of 3 tensors are 0.5 of the reference's")
    mixed = first_fault(trained(gradient=lambda step, name, value: value.flip(0)), reference, [perturbed], "32-true")
    assert mixed is not None
    assert "no common factor" in mixed.pattern


@pytest.mark.parametrize("must_learn", [True, False])
def test_a_reference_that_diverges_judges_nothing(must_learn: bool, tmp_path: Path):
    """Every comparison with NaN is false."""
    reference = trained()
    reference.losses[2:] = [math.nan] * (STEPS - 2)
    variant = judged(tmp_path, trained(), reference, must_learn)
    assert not variant.passed
    assert variant.unjudged == "the reference's loss or gradient is NaN or infinite at step 3"


def judged(folder: Path, ours: Record, reference: Record, must_learn: bool) -> Variant:
    """Returns a case with the verdict on its records."""
    case = Case("one", "ddp", 1, "32-true", ours=Job(1, ("ours",)), reference=Job(1, ()), must_learn=must_learn)
    perturbed = trained(distance=1e-5) if reference.losses else reference
    for number, job in enumerate(case.jobs):
        record = ours if job == case.ours else reference if job == case.reference else perturbed
        torch.save(asdict(record), record_file(folder, number))
    load.cache_clear()
    return trials._judged(case, case.jobs, folder, {}, [])


@pytest.mark.parametrize("must_learn", [True, False])
def test_a_training_without_steps_does_not_pass(must_learn: bool, tmp_path: Path):
    variant = judged(tmp_path, trained(), Record(), must_learn)
    assert (variant.passed, variant.unjudged) == (False, "the reference made no optimizer step")
    variant = judged(tmp_path, Record(), trained(), must_learn)
    assert not variant.passed
    assert "step 1: loss: one of the trainings has fewer steps" in variant.outcome


@pytest.mark.parametrize("must_learn", [True, False])
def test_a_gradient_that_is_nan_in_the_reference_passes_nothing(must_learn: bool, tmp_path: Path):
    """At the last step, after which no loss shows it."""
    reference, ours = trained(), trained()
    for record in (reference, ours):
        record.gradients[-1]["a"][0, 0] = math.nan
    assert not judged(tmp_path, ours, reference, must_learn).passed
    ours.gradients[-1]["b"] *= 2
    found = first_fault(ours, reference, [trained(distance=1e-5)], "16-mixed")
    assert str(found).startswith(f"step {STEPS}: gradient of b off by")


def test_a_training_that_is_longer_than_its_reference_is_found():
    reference, ours = trained(), trained()
    reference.losses.pop()
    assert str(first_fault(ours, reference, [], "32-true")).startswith(f"step {STEPS}: loss: one of the trainings has")


def test_a_lost_parameter_group_is_found():
    reference, ours = trained(), trained()
    reference.rates = [[rate, 2 * rate] for (rate,) in reference.rates]
    assert str(first_fault(ours, reference, [], "32-true")).startswith("step 1: learning rate: another number of")


def test_a_late_learning_rate_is_found():
    reference, ours = trained(), trained()
    ours.rates = [ours.rates[0], *ours.rates[:-1]]
    found = first_fault(ours, reference, [trained(distance=1e-5)], "32-true")
    assert found is not None
    assert found.value.name == "learning rate"
    assert found.step == 2


def test_rounding_is_no_fault():
    reference = trained()
    ours = trained(distance=1e-6)
    ours.weights[0] = reference.weights[0]
    assert first_difference(ours, reference) is not None
    assert first_fault(ours, reference, [trained(distance=1e-5)], "32-true") is None
    assert first_difference(trained(), reference) is None


def test_the_update_of_an_uncertain_gradient_is_not_judged():
    reference, perturbed, ours = trained(), trained(), trained()
    for record, sign in ((reference, 1), (perturbed, 1), (ours, -1)):  # an element near 0, of which Adam takes the sign
        record.gradients[0]["a"][0, 0] = sign * 1e-9
        for after in record.weights[1:]:
            after["a"] = after["a"].clone()
            after["a"][0, 0] += sign * 0.01
    assert first_fault(ours, reference, [perturbed], "32-true") is None
    for after in ours.weights[1:]:
        after["a"][0, 1] += 0.01
    assert str(first_fault(ours, reference, [perturbed], "32-true")).startswith("step 1: update of a")


def test_an_update_that_momentum_cancels_may_differ_as_the_one_before():
    reference, perturbed, ours = trained(), trained(), trained()
    for record, share in ((reference, 0.0), (perturbed, 0.05), (ours, 0.03)):
        record.gradients[1]["a"][0, 0] *= 1 + share
        first, second = (weights["a"][0, 0].item() for weights in record.weights[:2])
        for after in record.weights[2:]:
            after["a"] = after["a"].clone()
            after["a"][0, 0] = second + (share * (second - first) if record is ours else 0)
    assert first_fault(ours, reference, [perturbed], "32-true") is None
    ours.weights[2]["a"][0, 0] += 0.5
    assert str(first_fault(ours, reference, [perturbed], "32-true")).startswith("step 2: update of a")


def test_two_broken_trainings_that_agree_do_not_pass():
    flat = Record(losses=[1.0] * 8)
    assert "did not fall" in learned(flat, flat)
    falling = Record(losses=[2.0, 1.8, 1.6, 1.4, 1.2, 1.0, 0.8, 0.6])
    assert "the loss fell by 0.000" in learned(flat, falling)
    assert learned(falling, falling) == ""


def test_each_case_has_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The time of its own training goes into comparison.json and JUnit."""
    case = Case("one", "ddp", 1, "32-true", ours=Job(1, ("ours",)), reference=Job(1, ()))
    for number, _ in enumerate(case.jobs):
        torch.save(asdict(trained()), record_file(tmp_path, number))
    monkeypatch.setattr(trials.run_process, "start", lambda *_: nullcontext(SimpleNamespace(poll=lambda: 0)))
    comparison = trials.try_all([case], tmp_path, [], "", "", {})
    assert comparison.variants[0].seconds > 0
    comparison.variants[0].seconds = 1.5
    write_junit(comparison, tmp_path / "junit.xml")
    assert 'time="1.500"' in (tmp_path / "junit.xml").read_text()
