"""Tests what EngineInfo counts in a fit, and the sizes that the hooks of a plain strategy return to it.
tests/commands/test_train.py reads its other values in the metrics.json of a run."""

import math
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.plugins.precision import MixedPrecision

from cifar_zero.config.settings import make_settings
from cifar_zero.strategies.hooks import Hooks
from cifar_zero.training.callbacks.engine import EngineInfo


def test_steps_that_the_gradient_scaler_skips_are_counted(fit: Callable[..., Any]):
    """The run uses float16 as on a GPU. The scaler halves its scale whenever it skips a step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    plugins = [MixedPrecision("16-mixed", "cpu", scaler)]
    run = fit(make_settings(epochs=1, batch_size=8), 80, plugins=plugins, precision=None)
    totals = run.observer(EngineInfo).totals_of_run
    assert (totals["compute_dtype"], totals["parameter_dtype"]) == ("float16", "float32")
    assert 0 < totals["skipped_steps"] == 24 - math.log2(scaler.get_scale()) < 10


def test_memory_that_tensors_share_counts_once():
    layer = torch.nn.Linear(8, 8, bias=False)
    layer.tied = layer.weight.data.view(64)  # pyright: ignore
    optimizer = torch.optim.SGD(layer.parameters(), momentum=0.9)
    optimizer.state[layer.weight]["alias"] = layer.tied
    optimizer.state[layer.weight]["momentum_buffer"] = torch.zeros(8, 8)
    assert Hooks().state_bytes(layer, optimizer) == (256, 0, 256)
