import math
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.plugins.precision import MixedPrecision

from cifar_zero.config.flags import Config
from cifar_zero.training.callbacks.effective import Effective

Fit = Callable[..., Any]


def test_plain_torch(fit: Fit) -> None:
    run = fit(Config(epochs=1, batch_size=8), 40)
    totals = run.observer(Effective).totals
    assert totals == {
        "compute_dtype": "float32",
        "parameter_dtype": "float32",
        "skipped_steps": 0,
        "reduce_bucket_size": None,
        "allgather_bucket_size": None,
    }
    assert not (run.folder / "deepspeed.json").exists()


def test_steps_that_the_gradient_scaler_skips_are_counted(fit: Fit) -> None:
    """float16 as on a GPU: the scaler halves its scale whenever it skips a step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    run = fit(Config(epochs=1, batch_size=8), 80, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    totals = run.observer(Effective).totals
    assert (totals["compute_dtype"], totals["parameter_dtype"]) == ("float16", "float32")
    assert 0 < totals["skipped_steps"] == 24 - math.log2(scaler.get_scale()) < 10


def test_autocast_computes_in_another_dtype_than_the_parameters(fit: Fit) -> None:
    totals = fit(Config(epochs=1, batch_size=8), 40, precision="bf16-mixed").observer(Effective).totals
    assert (totals["compute_dtype"], totals["parameter_dtype"]) == ("bfloat16", "float32")
