"""The identity batch_size = micro-batch x ranks x accumulate."""

from __future__ import annotations

import pytest

from cifar_zero.config.run import micro_batch_size
from cifar_zero.core.errors import UsageError


@pytest.mark.parametrize(("batch_size", "world_size", "accumulate", "expected"), [(4, 1, 1, 4), (16, 2, 4, 2)])
def test_the_micro_batch_follows(batch_size: int, world_size: int, accumulate: int, expected: int) -> None:
    assert micro_batch_size(batch_size, world_size, accumulate) == expected


@pytest.mark.parametrize(
    ("batch_size", "world_size", "accumulate", "message"),
    [
        (10, 2, 4, r"batch_size 10 = micro-batch x 2 ranks x --accumulate 4 .*: 8 or 16$"),
        (3, 1, 4, r"batch_size 3 = micro-batch x 1 rank x --accumulate 4 .*: 4$"),
    ],
)
def test_what_does_not_divide_is_refused(batch_size: int, world_size: int, accumulate: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        micro_batch_size(batch_size, world_size, accumulate)
