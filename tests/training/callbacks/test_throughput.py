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


@pytest.fixture
def _fake_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cifar_zero.training.callbacks.throughput.time", CLOCK)


@pytest.mark.usefixtures("_fake_time")
def test_the_clock_leaves_out_warm_up_validation_and_checkpoints(
    fit: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(exits.STARTED, str(CLOCK.seconds - 7))
    config = make_settings(epochs=2, batch_size=4, log_interval=9)
    checkpoints = ModelCheckpoint(tmp_path / "checkpoints", every_n_train_steps=5, save_top_k=-1)
    options = {"warmup_steps": 4, "module_class": Sleeper, "enable_checkpointing": True}
    started = CLOCK.seconds
    run = fit(config, 48, SlowDisk(), checkpoints, **options)
    assert run.points("perf/step_time_ms") == pytest.approx(dict.fromkeys((9, 18, 24), 1e3 * STEP_SECONDS))
    totals = run.observer(Throughput).totals_of_run
    assert totals["perf/step_time_ms"] == pytest.approx(1e3 * STEP_SECONDS)
    assert totals["perf/images_per_second"] == pytest.approx(4 / STEP_SECONDS)
    assert totals["perf/tflops"] == pytest.approx(12_818_880 / STEP_SECONDS / 1e12)
    assert totals["perf/fit_seconds"] == pytest.approx(CLOCK.seconds - started)
    assert totals["perf/seconds_to_first_step"] == pytest.approx(7 + 10 * STEP_SECONDS)
    assert totals["perf/data_time_ms"] == 0  # what the clock leaves out does not count as waiting for data either
    assert "perf/mfu" not in totals


DATA_SECONDS = 0.2


def slow(batch: Any) -> Any:
    """Takes DATA_SECONDS for each micro-batch of the loader."""
    CLOCK.sleep(DATA_SECONDS)
    return batch


@pytest.mark.usefixtures("_fake_time")
def test_the_wait_for_data_and_the_utilisation(fit: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A step has two micro-batches. The clock starts when the first micro-batch of the timed steps, or of an epoch, has
    been loaded."""
    monkeypatch.setattr(
        "cifar_zero.training.callbacks.throughput.peak_flops", lambda device, precision: 10 * 12_818_880
    )
    config = make_settings(epochs=2, batch_size=4, accumulate=2, log_interval=1)
    run = fit(config, 32, warmup_steps=4, module_class=Sleeper, change=slow)
    waits = {step: DATA_SECONDS * (1 if step in (5, 9) else 2) for step in range(5, 17)}
    steps = {step: 2 * STEP_SECONDS + wait for step, wait in waits.items()}
    assert run.points("perf/data_time_ms") == pytest.approx({step: 1e3 * wait for step, wait in waits.items()})
    assert run.points("perf/step_time_ms") == pytest.approx({step: 1e3 * seconds for step, seconds in steps.items()})
    assert run.points("perf/mfu") == pytest.approx({step: 0.1 / seconds for step, seconds in steps.items()})
    totals = run.observer(Throughput).totals_of_run
    assert totals["perf/data_time_ms"] == pytest.approx(1e3 * sum(waits.values()) / 12)
    assert totals["perf/step_time_ms"] == pytest.approx(1e3 * sum(steps.values()) / 12)
    assert totals["perf/mfu"] == pytest.approx(0.1 * 12 / sum(steps.values()))
