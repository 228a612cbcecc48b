"""The contents of metrics.json, and the settings in effect that it names."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision

from cifar_zero.config import command_line
from cifar_zero.config.settings import make_settings
from cifar_zero.core.atomic import write_json
from cifar_zero.training import results
from cifar_zero.training.callbacks.engine import EngineInfo
from cifar_zero.training.resolve import make_run
from cifar_zero.training.results import MEASURED

NOT_HERE = {"perf/mfu", "perf/tokens_per_second", "reduce_bucket_size", "allgather_bucket_size"}
"""Metrics that are None in a run on the CPU without --bench_steps and without DeepSpeed."""


def test_metrics_of_a_run(fit: Callable[..., Any], tmp_path: Path) -> None:
    flags = ["--batch_size", "8", "--accumulate", "2", "--log_interval", "4", "--devices", "1", "--accelerator", "cpu"]
    run = fit(make_run(command_line.parse(flags)), 40)
    run.trainer.test(run.module, datamodule=run.datamodule, verbose=False)
    logged = {name: value.item() for name, value in run.trainer.callback_metrics.items()}
    metrics = results.collect(run.trainer, run.module, run.datamodule, run.module.settings)
    assert list(metrics["versions"]) == ["torch", "lightning", "deepspeed", "torchmetrics", "python"]
    assert (metrics["epochs"], metrics["steps"], metrics["micro_batch_size"]) == (2.0, 10, 4)
    assert (metrics["world_size"], metrics["accelerator"], metrics["dataset"]) == (1, "cpu", "synthetic")
    assert metrics["test/acc"] == pytest.approx(logged["test/acc"])
    assert metrics["test/acc_per_class"]["cat"] == pytest.approx(logged["test/acc_class/cat"])
    assert metrics["train/loss"] == pytest.approx(run.points("train/loss")[10])
    assert metrics["val/acc"] == pytest.approx(list(run.points("val/acc").values())[-1])
    assert {key for key in MEASURED if metrics[key] is None} == NOT_HERE
    write_json(tmp_path / "metrics.json", metrics)  # JSON can represent all of it


def test_steps_that_the_gradient_scaler_skips_are_counted(fit: Callable[..., Any]) -> None:
    """float16 as on a GPU: the scaler halves its scale whenever it skips a step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    run = fit(make_settings(epochs=1, batch_size=8), 80, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    totals = run.observer(EngineInfo).totals_of_run
    assert (totals["compute_dtype"], totals["parameter_dtype"]) == ("float16", "float32")
    assert 0 < totals["skipped_steps"] == 24 - math.log2(scaler.get_scale()) < 10
