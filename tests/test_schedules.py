"""Schedules against their references."""

from typing import Literal

import pytest
import torch

from cifar_module import StepSchedule
from schedules import Constant, WarmupLR


def rates(schedule, steps: int, base_lr: float = 0.001) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=base_lr)
    scheduler = StepSchedule(optimizer, schedule)
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


def test_constant():
    assert rates(Constant(), 3, base_lr=0.25) == [0.25] * 3


@pytest.mark.parametrize("warmup_type", ["log", "linear"])
def test_warmup_is_deepspeeds_to_the_last_bit(warmup_type: Literal["log", "linear"]):
    from deepspeed.runtime.lr_schedules import WarmupLR as Reference

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.001)
    reference = Reference(optimizer, 0.0001, 0.001, 1000, warmup_type)
    expected = []
    for _ in range(2000):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        reference.step()
    assert rates(WarmupLR(0.0001, 1000, warmup_type), 2000) == expected
