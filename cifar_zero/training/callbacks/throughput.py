"""How fast a run trains: time per optimizer step, its share of waiting for data, images and FLOPs per second."""

import os
import time
from typing import Any

import psutil
import torch
from lightning.pytorch import LightningModule, Trainer

from cifar_zero.config.settings import Settings
from cifar_zero.core import exits
from cifar_zero.models import MODELS
from cifar_zero.training.callbacks.curves import IntervalCallback, log_scalars
from cifar_zero.training.callbacks.flops import peak_flops


class Throughput(IntervalCallback):
    """Writes the perf/* curves, and keeps the totals of the run.

    The clock runs inside the epochs: waiting for a batch counts; validation, the writing of checkpoints, the start of
    an epoch and the first --warmup_steps do not (at most half of the run, except in a benchmark).

    docs/outputs.md says what perf/data_time_ms, perf/tflops and perf/mfu are (PaLM, Chowdhery et al. 2022, appendix B).
    """

    def __init__(self, settings: Settings, flops_per_step: int):
        self._config = settings
        self._flops_per_step = flops_per_step
        self.newest_rates: dict[str, float] = {}  # of the newest point; empty during the warm-up
        self.peak_flops: float | None = None  # FLOP/s that all devices together can reach, if known
        self._device = torch.device("cpu")
        self._fit_started = self._fit_seconds = 0.0
        self._seconds_to_first_step: float | None = None
        self._first_step = self._first_timed_step = 0
        self._clock_started: float | None = None  # None while the clock stands still
        self._batch_ended = 0.0
        self._seconds = self._data_seconds = 0.0  # of all timed steps
        self._point_step, self._point_seconds, self._point_data_seconds = 0, 0.0, 0.0  # until the newest point

    @property
    def totals_of_run(self) -> dict[str, float | None]:
        """perf/* of metrics.json, over all timed steps, if a step was timed. perf/fit_seconds is the wall-clock time of
        the whole fit; perf/seconds_to_first_step runs from the start of the command to the end of the first optimizer
        step."""
        totals: dict[str, float | None] = {
            "perf/seconds_to_first_step": self._seconds_to_first_step,
            "perf/fit_seconds": self._fit_seconds,
        }
        steps = self._point_step - self._first_timed_step
        if steps > 0:
            totals |= self.rates(self._point_seconds, self._point_data_seconds, steps)
        return totals

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._fit_started = time.perf_counter()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._device = pl_module.device
        if peak := peak_flops(self._device, self._config.placement.precision):
            self.peak_flops = peak * trainer.world_size
        self._first_step = trainer.global_step
        steps = trainer.estimated_stepping_batches - self._first_step
        warmup_steps = self._config.output.warmup_steps
        if steps > 0 and not self._config.recipe.bench_steps:
            warmup_steps = int(min(warmup_steps, steps / 2))
        self._first_timed_step = self._point_step = self._first_step + warmup_steps

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Adds the wait for this batch; after the warm-up and after each pause it starts the clock instead."""
        if self._clock_started is not None:
            self._data_seconds += time.perf_counter() - self._batch_ended
        elif trainer.global_step >= self._first_timed_step:
            self._clock_started = self._now()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Notes the end of the first step; writes a point if one is due."""
        if self._seconds_to_first_step is None and trainer.global_step > self._first_step:
            started = float(os.environ.get(exits.STARTED) or psutil.Process().create_time())
            self._seconds_to_first_step = time.time() - started
        super().on_train_batch_end(trainer, pl_module)
        self._batch_ended = time.perf_counter()

    def _pause(self, *args: Any, **kwargs: Any) -> None:
        if self._clock_started is not None:
            self._seconds += self._now() - self._clock_started
            self._clock_started = None

    # A validation, a checkpoint, or the start of the next epoch's loader follows.
    on_validation_start = on_save_checkpoint = on_train_epoch_end = _pause

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._fit_seconds = time.perf_counter() - self._fit_started

    def _log(self, trainer: Trainer) -> None:
        was_running = self._clock_started is not None
        self._pause()
        steps = trainer.global_step - self._point_step
        if steps > 0:
            data_seconds = self._data_seconds - self._point_data_seconds
            self.newest_rates = self.rates(self._seconds - self._point_seconds, data_seconds, steps)
            log_scalars(trainer, self.newest_rates)
            self._point_step, self._point_seconds = trainer.global_step, self._seconds
            self._point_data_seconds = self._data_seconds
        if was_running:
            self._clock_started = self._now()

    def _now(self) -> float:
        """Returns the time at which all work queued on the device is done."""
        torch.get_device_module(self._device).synchronize(self._device)  # nothing to wait for on the CPU
        return time.perf_counter()

    def rates(self, seconds: float, data_seconds: float, steps: int) -> dict[str, float]:
        """Returns perf/* of `steps` optimizer steps that took `seconds`, of which `data_seconds` waiting for data;
        tokens only of transformers, the MFU only where the peak is known."""
        images_per_second = self._config.recipe.batch_size * steps / seconds
        flops_per_second = self._flops_per_step * steps / seconds
        rates = {
            "perf/step_time_ms": 1e3 * seconds / steps,
            "perf/data_time_ms": 1e3 * data_seconds / steps,
            "perf/images_per_second": images_per_second,
            "perf/tflops": flops_per_second / 1e12,
        }
        if tokens := MODELS[self._config.recipe.model.name].tokens_per_image:
            rates["perf/tokens_per_second"] = tokens * images_per_second
        if self.peak_flops is not None:
            rates["perf/mfu"] = flops_per_second / self.peak_flops
        return rates
