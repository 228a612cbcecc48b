"""Tests what EngineInfo counts in a fit. tests/commands/test_train.py reads its other values in the metrics.json of a
run."""

import math
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.plugins.precision import MixedPrecision

from cifar_zero.config.settings import make_settings
from cifar_zero.training.callbacks.engine import EngineInfo


def test_steps_that_the_gradient_scaler_skips_are_counted(fit: Callable[..., Any]) -> None:
    """The run uses float16 as on a GPU. The scaler halves its scale whenever it skips a step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    run = fit(make_settings(epochs=1, batch_size=8), 80, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    totals = run.observer(EngineInfo).totals_of_run
    assert (totals["compute_dtype"], totals["parameter_dtype"]) == ("float16", "float32")
    assert 0 < totals["skipped_steps"] == 24 - math.log2(scaler.get_scale()) < 10
