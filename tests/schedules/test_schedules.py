"""Compares schedules with their references."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from deepspeed.runtime import lr_schedules as deepspeeds
from torch.optim import lr_scheduler as torchs

from cifar_module import StepSchedule
from cifar_zero.schedules import (
    SCHEDULES,
    Cosine,
    CosineRestarts,
    Exponential,
    Linear,
    OneCycle,
    RangeTest,
    Step,
    WarmupCosine,
    WarmupDecayLR,
    WarmupLinear,
    WarmupLR,
    with_total_steps,
)

BASE_LR = 0.001


def rates(make: Any, steps: int) -> list[float]:
    """Returns the learning rate of each step under the scheduler that `make` makes for an optimizer."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=BASE_LR)
    scheduler = make(optimizer)
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


def ours(schedule: Any, steps: int) -> list[float]:
    return rates(lambda optimizer: StepSchedule(optimizer, schedule), steps)


@pytest.mark.parametrize("kind", ["log", "linear"])
def test_deepspeeds_to_the_last_bit(kind: Any):
    def warmup(optimizer: Any) -> Any:
        return deepspeeds.WarmupLR(optimizer, 0.0001, BASE_LR, 1000, kind)

    def warmup_and_decay(optimizer: Any) -> Any:
        return deepspeeds.WarmupDecayLR(optimizer, 1900, 0.0001, BASE_LR, 700, kind)

    assert ours(WarmupLR(1000, kind, 0.0001), 2000) == rates(warmup, 2000)
    assert ours(WarmupDecayLR(700, kind, 0.0001, 1900), 2000) == rates(warmup_and_decay, 2000)


@pytest.mark.parametrize(
    ("schedule", "reference"),
    [
        (Linear(150, 0.5, 0.1), lambda optimizer: torchs.LinearLR(optimizer, 0.5, 0.1, 150)),
        (Exponential(0.97), lambda optimizer: torchs.ExponentialLR(optimizer, 0.97)),
        (Cosine(200, 0.0002), lambda optimizer: torchs.CosineAnnealingLR(optimizer, 200, 0.0002)),
        (CosineRestarts(40, 2, 0.0002), lambda optimizer: torchs.CosineAnnealingWarmRestarts(optimizer, 40, 2, 0.0002)),
        (Step(30, 0.2), lambda optimizer: torchs.StepLR(optimizer, 30, 0.2)),
        (OneCycle(total_steps=201), lambda optimizer: torchs.OneCycleLR(optimizer, BASE_LR, 201)),
        (
            OneCycle(201, 0.2, "linear", 10, 100),
            lambda optimizer: torchs.OneCycleLR(
                optimizer, BASE_LR, 201, pct_start=0.2, anneal_strategy="linear", div_factor=10, final_div_factor=100
            ),
        ),
        (
            WarmupLinear(180, 50),
            lambda optimizer: torchs.SequentialLR(
                optimizer,
                [torchs.LinearLR(optimizer, 1e-12, 1.0, 50), torchs.LinearLR(optimizer, 1.0, 0.0, 130)],
                [50],
            ),
        ),
        (
            WarmupCosine(200, 50, 0.0001),
            lambda optimizer: torchs.SequentialLR(
                optimizer,
                [torchs.LinearLR(optimizer, 1e-12, 1.0, 50), torchs.CosineAnnealingLR(optimizer, 150, 0.0001)],
                [50],
            ),
        ),
        (
            RangeTest(200, 1e-6, 1.0),
            lambda optimizer: torchs.ChainedScheduler(
                [torchs.ConstantLR(optimizer, 1e-6 / BASE_LR, 999), torchs.ExponentialLR(optimizer, 10 ** (6 / 199))]
            ),
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_torchs(schedule: Any, reference: Any):
    """200 rates agree up to rounding, because torch computes each rate from the rate before it."""
    assert ours(schedule, 200) == pytest.approx(rates(reference, 200), rel=1e-9, abs=1e-14)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_end_is_the_runs_own(name: str):
    """Without total_steps, a schedule ends with the run. Every schedule also has a rate after its end."""
    schedule: Any = with_total_steps(SCHEDULES[name](), lambda: 4000)
    assert getattr(schedule, "total_steps", 4000) == 4000
    assert all(0 <= schedule.rate(step, BASE_LR) <= 1 for step in (0, 1, 3999, 4000, 4001, 5000))
    if hasattr(schedule, "total_steps"):
        given: Any = with_total_steps(replace(schedule, total_steps=2000), lambda: 4000)
        assert given.total_steps == 2000
