from types import SimpleNamespace
from typing import Any

import pytest

from cifar_zero.training.callbacks.interval import Interval


@pytest.mark.parametrize(
    ("start", "total", "expected"),
    [
        (0, 10, [4, 8, 10]),
        (0, 8, [4, 8]),
        (5, 10, [8, 10]),  # resumed
        (0, -1, [4, 8, 12]),  # unknown length
        (0, float("inf"), [4, 8, 12]),
    ],
)
def test_points_are_due_at_multiples_and_at_the_last_step(start: int, total: float, expected: list[int]) -> None:
    trainer: Any = SimpleNamespace(global_step=start, estimated_stepping_batches=total)
    interval = Interval(4)
    interval.start(trainer)
    last = int(total) if 0 < total < 100 else 13
    # Two micro-batches a step: the counter stands still after each step.
    due = [step for step in range(start, last + 1) for _ in range(2) if interval.due(step)]
    assert due == expected
