"""The contents of metrics.json, and the settings in effect that it names."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision

from cifar_zero.config import command_line
from cifar_zero.config.settings import DataConfig, make_settings
from cifar_zero.core.atomic import write_json
from cifar_zero.training import results
from cifar_zero.training.callbacks.engine import EngineInfo
from cifar_zero.training.loggers import log_results
from cifar_zero.training.results import IN_EFFECT, MEASURED

KEYS = [
    *("schema", "dataset", "num_train", "num_test", "model", "parameters", "trained_parameters"),
    *("strategy", "world_size", "num_nodes"),
    *("accelerator", "device_name", "precision", "seed", "batch_size", "micro_batch_size", "accumulate", "epochs"),
    *("steps", "train/loss", "val/acc", "test/loss", "test/acc", "test/acc_per_class", "test/acc_top5"),
    *("test/precision", "test/recall", "test/f1", "test/precision_weighted", "test/f1_weighted", "test/auroc"),
    *("test/average_precision", "test/calibration_error", "test/precision_per_class", "test/recall_per_class"),
    *("test/f1_per_class", "test/auroc_per_class", "test/average_precision_per_class", "perf/images_per_second"),
    *(
        "perf/tokens_per_second",
        "perf/step_time_ms",
    ),
    *("perf/data_time_ms", "perf/tflops", "perf/mfu", "perf/seconds_to_first_step", "perf/fit_seconds"),
    *("mem/peak_rank_bytes", "mem/model_state_rank_bytes"),
    *("mem/parameter_rank_bytes", "mem/gradient_rank_bytes", "mem/optimizer_rank_bytes"),
    *("compute_dtype", "parameter_dtype", "skipped_steps"),
    *("reduce_bucket_size", "allgather_bucket_size", "versions", "git_commit"),
]

NOT_HERE = {"perf/mfu", "perf/tokens_per_second", "reduce_bucket_size", "allgather_bucket_size"}
"""Metrics that are None in a run on the CPU without --bench_steps and without DeepSpeed."""


def test_metrics_of_a_run(fit: Callable[..., Any], tmp_path: Path) -> None:
    run = fit(command_line.parse(["--batch_size", "8", "--accumulate", "2", "--log_interval", "4"]), 40)
    run.trainer.test(run.module, datamodule=run.datamodule, verbose=False)
    logged = {name: value.item() for name, value in run.trainer.callback_metrics.items()}
    metrics = results.collect(run.trainer, run.module, run.datamodule, run.module.settings)
    assert list(metrics) == KEYS
    assert metrics["schema"] == 1
    assert list(metrics["versions"]) == ["torch", "lightning", "deepspeed", "torchmetrics", "python"]
    assert metrics["parameters"] == 62_006
    assert (metrics["epochs"], metrics["steps"], metrics["micro_batch_size"]) == (2.0, 10, 4)
    assert (metrics["world_size"], metrics["accelerator"], metrics["dataset"]) == (1, "cpu", "synthetic")
    assert metrics["test/acc"] == pytest.approx(logged["test/acc"])
    assert metrics["test/loss"] == pytest.approx(logged["test/loss"])
    assert metrics["test/acc_per_class"]["cat"] == pytest.approx(logged["test/acc_class/cat"])
    for figure in ("f1", "acc_top5", "auroc", "average_precision", "calibration_error"):
        assert metrics[f"test/{figure}"] == pytest.approx(logged[f"test/{figure}"])
    assert metrics["test/f1_per_class"]["cat"] == pytest.approx(logged["test/f1_class/cat"])
    assert metrics["train/loss"] == pytest.approx(run.points("train/loss")[10])
    assert metrics["val/acc"] == pytest.approx(list(run.points("val/acc").values())[-1])
    assert {key for key in MEASURED if metrics[key] is None} == NOT_HERE
    write_json(tmp_path / "metrics.json", metrics)  # JSON can represent all of it

    log_results(run.trainer, run.module.settings, metrics)
    hparams = run.read().events.summary_metadata["_hparams_/session_start_info"]
    assert b"baseline" in hparams.plugin_data.content
    assert b"momentum" in hparams.plugin_data.content
    assert run.events.Scalars("test/acc")[-1].value == pytest.approx(metrics["test/acc"])


def test_a_run_without_test_and_validation(fit: Callable[..., Any]) -> None:
    run = fit(make_settings(epochs=1, batch_size=8), 40, limit_val_batches=0)
    metrics = results.collect(run.trainer, run.module, run.datamodule, run.module.settings)
    untested = {"val/acc", *(key for key in MEASURED if key.startswith("test/"))}
    assert {key for key in MEASURED if metrics[key] is None} == NOT_HERE | untested


def test_a_fallback_is_named(fit: Callable[..., Any]) -> None:
    run = fit(make_settings(epochs=1, batch_size=8), 40)
    settings = run.module.settings.changed(data=DataConfig(source="auto")).with_images_of("digits")
    metrics = results.collect(run.trainer, run.module, run.datamodule, settings)
    assert list(metrics) == [*KEYS, "fallback"]
    assert "digits" in metrics["fallback"]


def test_plain_torch(fit: Callable[..., Any]) -> None:
    run = fit(make_settings(epochs=1, batch_size=8), 40)
    totals = run.observer(EngineInfo).totals_of_run
    in_effect = {key: totals[key] for key in IN_EFFECT if key in totals}
    assert in_effect == {"compute_dtype": "float32", "parameter_dtype": "float32", "skipped_steps": 0}
    assert not (run.folder / "deepspeed.json").exists()


def test_steps_that_the_gradient_scaler_skips_are_counted(fit: Callable[..., Any]) -> None:
    """float16 as on a GPU: the scaler halves its scale whenever it skips a step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    run = fit(make_settings(epochs=1, batch_size=8), 80, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    totals = run.observer(EngineInfo).totals_of_run
    assert (totals["compute_dtype"], totals["parameter_dtype"]) == ("float16", "float32")
    assert 0 < totals["skipped_steps"] == 24 - math.log2(scaler.get_scale()) < 10


def test_autocast_computes_in_another_dtype_than_the_parameters(fit: Callable[..., Any]) -> None:
    totals = fit(make_settings(epochs=1, batch_size=8), 40, precision="bf16-mixed").observer(EngineInfo).totals_of_run
    assert (totals["compute_dtype"], totals["parameter_dtype"]) == ("bfloat16", "float32")
