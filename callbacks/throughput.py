"""How fast a run trains: time per optimizer step, images and floating-point operations per second."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import psutil
import torch
from lightning.fabric.utilities.throughput import Throughput as Meter
from lightning.pytorch import Callback

from callbacks.counts import training_flops
from callbacks.interval import Interval, log_scalars

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from cifar_module import CIFARModule
    from config import Config

STARTED = "CIFAR_ZERO_STARTED"
"""Environment variable: when the command was started, in seconds since 1970; ranks inherit it from their launcher."""


def rates(seconds: float, steps: int, batch_size: int, flops_per_step: int) -> dict[str, float]:
    """perf/* of `steps` optimizer steps that took `seconds`.

    Args:
        seconds: of training alone.
        steps: at least one.
        batch_size: images per step, over all ranks.
        flops_per_step: over all ranks.
    """
    meter = Meter(window_size=2)
    meter.update(time=0.0, batches=0, samples=0, flops=0)
    meter.update(time=seconds, batches=steps, samples=steps * batch_size, flops=steps * flops_per_step)
    measured = meter.compute()
    return {
        "perf/step_time_ms": 1e3 / measured["device/batches_per_sec"],
        "perf/images_per_second": measured["device/samples_per_sec"],
        "perf/tflops": measured["device/flops_per_sec"] / 1e12,
    }


def process_started() -> float:
    """When the command was started, in seconds since 1970; a rank on its own: when its process was."""
    started = os.environ.get(STARTED)
    return float(started) if started else psutil.Process().create_time()


class Stopwatch:
    """Adds up the seconds between `start` and `stop`; with a GPU, of work done rather than of work queued."""

    def __init__(self, device: torch.device):
        self.seconds = 0.0
        self.running = False
        self._device = device
        self._since = 0.0

    def start(self) -> None:
        """Goes on."""
        self._since = self._now()
        self.running = True

    def stop(self) -> None:
        """Halts, if it runs."""
        if self.running:
            self.seconds += self._now() - self._since
            self.running = False

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


class Throughput(Callback):
    """Writes the perf/* curves and keeps the totals of the run.

    The clock runs inside the epochs: waiting for a batch counts; validation, the writing of checkpoints, the start of
    an epoch and the first `warmup_steps` do not.

    Args:
        config: of the run.
        warmup_steps: optimizer steps left out at the start; half of the run where that is shorter.
    """

    seconds_to_first_step: float | None = None
    """From the start of the command to the end of the first optimizer step."""

    fit_seconds: float = 0.0
    """Wall-clock time of the whole fit, with all that the clock leaves out."""

    def __init__(self, config: Config, warmup_steps: int = 10):
        self._interval = Interval(config.log_interval)
        self._batch_size = config.batch_size
        self._warmup_steps = warmup_steps
        self._flops_per_step = 0
        self._fit_started = 0.0
        self._first_step = self._first_timed_step = 0
        self._logged_step = 0
        self._logged_seconds = 0.0
        self._clock = Stopwatch(torch.device("cpu"))

    @property
    def totals(self) -> dict[str, float | None]:
        """perf/* of metrics.json: over all timed steps; None where no step was timed."""
        steps = self._logged_step - self._first_timed_step
        timed = rates(self._clock.seconds, steps, self._batch_size, self._flops_per_step) if steps > 0 else {}
        return {
            "perf/step_time_ms": timed.get("perf/step_time_ms"),
            "perf/images_per_second": timed.get("perf/images_per_second"),
            "perf/tflops": timed.get("perf/tflops"),
            "perf/seconds_to_first_step": self.seconds_to_first_step,
            "perf/fit_seconds": self.fit_seconds,
        }

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Starts the clock of the whole fit."""
        if stage == "fit":
            self._fit_started = time.perf_counter()

    def on_train_start(self, trainer: Trainer, pl_module: CIFARModule) -> None:  # pyright: ignore
        """Counts the FLOPs of a step and finds where the timed steps begin."""
        self._flops_per_step = training_flops(pl_module.model, pl_module.num_classes, self._batch_size)
        self._interval.start(trainer)
        self._clock = Stopwatch(pl_module.device)
        self._first_step = trainer.global_step
        steps = trainer.estimated_stepping_batches - self._first_step
        warmup_steps = min(self._warmup_steps, steps // 2) if steps > 0 else self._warmup_steps
        self._first_timed_step = self._logged_step = self._first_step + int(warmup_steps)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Starts the clock after the warm-up and after each pause."""
        if not self._clock.running and trainer.global_step >= self._first_timed_step:
            self._clock.start()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Notes the end of the first step, and writes the point that is due."""
        step = trainer.global_step
        if self.seconds_to_first_step is None and step > self._first_step:
            self.seconds_to_first_step = time.time() - process_started()
        if self._interval.due(step) and self._clock.running:
            self._log(trainer)
            self._clock.start()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Pauses."""
        self._clock.stop()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Pauses: Lightning is about to write a checkpoint."""
        self._clock.stop()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Pauses: the next epoch's loader starts."""
        self._clock.stop()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the last point of a run that was stopped early."""
        self._log(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stops the clock of the whole fit."""
        self.fit_seconds = time.perf_counter() - self._fit_started

    def _log(self, trainer: Trainer) -> None:
        self._clock.stop()
        steps = trainer.global_step - self._logged_step
        if steps <= 0:
            return
        seconds = self._clock.seconds - self._logged_seconds
        log_scalars(trainer, rates(seconds, steps, self._batch_size, self._flops_per_step))
        self._logged_step, self._logged_seconds = trainer.global_step, self._clock.seconds
