"""The learning rate that a range test suggests from its losses."""

import math

import pytest

from cifar_zero.training.callbacks.learning_rate import running_mean, steepest_fall

RATES = [1e-6 * 10 ** (6 * step / 199) for step in range(200)]
FALLING = [2.3 - 1.5 / (1 + (0.01 / rate) ** 2) for rate in RATES]
"""Losses that fall most steeply at 0.01, over a logarithmic axis."""


def test_the_steepest_fall_of_a_smooth_curve():
    """Without smoothing the suggestion is half a span before the steepest point; the running mean lags by about as
    much, so that it is near that point."""
    plain, smooth = (steepest_fall(RATES, losses) for losses in (FALLING, running_mean(FALLING)))
    assert plain == pytest.approx(0.01 * 10 ** (-6 * 5 / 199), rel=0.1)
    assert smooth == pytest.approx(0.01, rel=0.5)


def test_nothing_is_suggested_for_noise():
    noise = [2.3 + 0.02 * math.sin(17.0 * step) for step in range(200)]
    assert steepest_fall(RATES, running_mean(noise)) is None


@pytest.mark.parametrize("end", [math.nan, math.inf, 1e6])
def test_a_divergence_ends_the_curve(end: float):
    means = running_mean([*FALLING[:150], end, 1.0])
    assert len(means) == 150
    assert all(math.isfinite(mean) for mean in means)


@pytest.mark.parametrize("steps", [0, 5, 11, 15])
def test_too_few_steps_for_a_suggestion(steps: int):
    falling = [2.3 - 0.1 * step for step in range(steps)]
    assert steepest_fall(RATES, running_mean([*falling, math.nan])) is None
