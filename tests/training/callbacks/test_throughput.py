"""Tests the times of a step, the lines that are printed, the FLOPs of a step, and the dense peak of GPUs."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from cifar_module import CIFARModule
from cifar_zero.config.recipe import Recipe
from cifar_zero.config.settings import make_settings
from cifar_zero.core import exits
from cifar_zero.training.callbacks.throughput import Throughput, peak_flops, training_flops


class Clock:
    """Replaces the time module. Time advances only in `sleep`, so that the expected figures are exact."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def time(self) -> float:
        return self.seconds

    perf_counter = time

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


STEP_SECONDS = 0.5
CLOCK = Clock()


class Sleeper(CIFARModule):
    """Takes STEP_SECONDS per micro-batch, ten times that in the first four steps, and 3 s per validation batch."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        CLOCK.sleep(STEP_SECONDS * (10 if self.trainer.global_step < 4 else 1))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        CLOCK.sleep(3.0)
        super().validation_step(batch, batch_idx)


class SlowDisk(Callback):
    """Makes writing a checkpoint take as long as ten steps. It comes after the other callbacks, as Lightning's
    ModelCheckpoint does."""

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
        CLOCK.sleep(10 * STEP_SECONDS)


DATA_SECONDS = 0.2


def slow(batch: Any) -> Any:
    """Takes DATA_SECONDS for each micro-batch of the loader."""
    CLOCK.sleep(DATA_SECONDS)
    return batch


def test_the_clock_leaves_out_warm_up_validation_and_checkpoints(
    fit: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A step has two micro-batches, and an epoch has eight steps. The clock starts when the first micro-batch of the
    timed steps, of an epoch, or after a checkpoint has been loaded."""
    step_flops, started = 12_818_880, CLOCK.seconds
    monkeypatch.setattr("cifar_zero.training.callbacks.throughput.time", CLOCK)
    monkeypatch.setattr(
        "cifar_zero.training.callbacks.throughput.peak_flops", lambda device, precision: 10 * step_flops
    )
    monkeypatch.setenv(exits.STARTED, str(started - 7))
    config = make_settings(epochs=2, batch_size=4, accumulate=2, log_interval=3)
    checkpoints = ModelCheckpoint(tmp_path / "checkpoints", every_n_train_steps=5, save_top_k=-1)
    options = {"warmup_steps": 4, "module_class": Sleeper, "change": slow, "enable_checkpointing": True}
    run = fit(config, 32, SlowDisk(), checkpoints, **options)
    loaded = {6: 1, 9: 5 / 3, 12: 5 / 3, 15: 2, 16: 1}  # mean number of micro-batches whose loading counts, by point
    waits = {point: DATA_SECONDS * count for point, count in loaded.items()}
    steps = {point: 2 * STEP_SECONDS + wait for point, wait in waits.items()}
    assert run.points("perf/data_time_ms") == pytest.approx({point: 1e3 * wait for point, wait in waits.items()})
    assert run.points("perf/step_time_ms") == pytest.approx({point: 1e3 * step for point, step in steps.items()})
    assert run.points("perf/mfu") == pytest.approx({point: 0.1 / step for point, step in steps.items()})
    totals, wait = run.observer(Throughput).totals_of_run, DATA_SECONDS * 19 / 12
    step = 2 * STEP_SECONDS + wait
    assert totals["perf/data_time_ms"] == pytest.approx(1e3 * wait)
    assert totals["perf/step_time_ms"] == pytest.approx(1e3 * step)
    assert totals["perf/images_per_second"] == pytest.approx(4 / step)
    assert totals["perf/tflops"] == pytest.approx(step_flops / step / 1e12)
    assert totals["perf/mfu"] == pytest.approx(0.1 / step)
    assert totals["perf/fit_seconds"] == pytest.approx(CLOCK.seconds - started)
    assert totals["perf/seconds_to_first_step"] == pytest.approx(7 + 2 * (DATA_SECONDS + 10 * STEP_SECONDS))


def test_lines_at_the_log_interval(fit: Callable[..., Any], capfd: pytest.CaptureFixture[str]):
    fit(make_settings(epochs=2, batch_size=4, log_interval=5), 40, warmup_steps=6)
    lines = capfd.readouterr().err.splitlines()
    steps = [line for line in lines if line.startswith("Step ")]
    assert [line.split(" | ")[0] for line in steps] == ["Step 5/20", "Step 10/20", "Step 15/20", "Step 20/20"]
    assert re.fullmatch(r"Step 5/20 \| epoch 0.50 \| Loss: \d\.\d{4} \| Learning rate: 0.001", steps[0])
    assert re.search(r"0.001 \| Time: [\d.]+ms \| TFLOPS: [\de.-]+ \| Images/s: \d+ \| 0:00:\d\d left", steps[1])
    assert steps[3].endswith(" | 0:00:00 left")
    assert [line for line in lines if "val/acc" in line][1].startswith("epoch 2  val/loss ")


@pytest.mark.parametrize(
    ("device_name", "precision", "allowed", "teraflops"),
    [
        ("NVIDIA H200 NVL", "bf16-mixed", "highest", 835.5),
        ("A100-PCIE-40GB", "bf16-mixed", "highest", 312),
        ("NVIDIA A100-SXM4-80GB", "32-true", "highest", 19.5),
        ("NVIDIA A100-SXM4-80GB", "32-true", "high", 156),  # TF32, where torch may use it
        ("Tesla T4", "32-true", "high", 8.1),  # which has no TF32
        ("Tesla T4", "bf16-mixed", "high", None),  # and no bfloat16
        ("NVIDIA L40", "bf16-mixed", "highest", None),
        ("NVIDIA GH200 480GB", "bf16-mixed", "highest", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "bf16-mixed", "highest", None),
        ("NVIDIA GeForce RTX 3090 Ti", "bf16-mixed", "highest", None),
    ],
)
def test_peaks_by_torchs_device_names(
    device_name: str, precision: str, allowed: str, teraflops: float | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: allowed)
    peak = peak_flops(device_name, precision)
    assert (peak and peak / 1e12) == teraflops


def test_flops_of_the_net_by_hand():
    conv1, conv2 = 28 * 28 * 6 * (3 * 5 * 5), 10 * 10 * 16 * (6 * 5 * 5)  # multiply-adds of one image
    linear = 400 * 120 + 120 * 84 + 84 * 10
    forward = conv1 + conv2 + linear
    backward = 2 * forward - conv1  # the gradient of the images is not needed
    assert training_flops(Recipe(), num_classes=10, batch_size=16) == 2 * 16 * (forward + backward)
