from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from cifar_module import CIFARModule
from cifar_zero.config.settings import make_settings
from cifar_zero.core import exits
from cifar_zero.training.callbacks.throughput import Throughput


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
