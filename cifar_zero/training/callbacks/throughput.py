"""How fast a run trains: time per optimizer step, its share of waiting for data, images and FLOPs per second."""

import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import psutil
import torch
from lightning.pytorch import LightningModule, Trainer

from cifar_zero.config.settings import Settings
from cifar_zero.core import exits
from cifar_zero.models import MODELS
from cifar_zero.training.callbacks.curves import IntervalCallback, log_scalars
from cifar_zero.training.callbacks.flops import peak_flops


class Stopwatch:
    """Adds up the seconds between `start` and `stop`, which wait for the GPU; `lap` only queues a CUDA event."""

    def __init__(self, device: torch.device):
        self.seconds = 0.0
        self.running = False
        self._device = device
        self._since = 0.0
        self._lap_began: Any = None
        self._laps: list[tuple[Any, Any]] = []

    def start(self) -> None:
        self._since = self._now()
        self._lap_began = self._mark()
        self.running = True

    def stop(self) -> None:
        """Stops if it runs; an unfinished lap is dropped."""
        if self.running:
            self.seconds += self._now() - self._since
            self.running = False

    def lap(self) -> None:
        """Ends a lap and starts the next."""
        mark = self._mark()
        self._laps.append((self._lap_began, mark))
        self._lap_began = mark

    def lap_seconds(self) -> list[float]:
        """Returns the laps so far, in seconds of the device's own time; waits for the GPU."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            return [begin.elapsed_time(end) / 1e3 for begin, end in self._laps]
        return [end - begin for begin, end in self._laps]

    def _now(self) -> float:
        torch.get_device_module(self._device).synchronize(self._device)  # nothing to wait for on the CPU
        return time.perf_counter()

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class Throughput(IntervalCallback):
    """Writes the perf/* curves, and keeps the totals of the run.

    The clock runs inside the epochs: waiting for a batch counts; validation, the writing of checkpoints, the start of
    an epoch and the first --warmup_steps do not (at most half of the run, except in a benchmark).

    docs/outputs.md says what perf/data_time_ms, perf/tflops and perf/mfu are (PaLM, Chowdhery et al. 2022, appendix B).
    `on_point` is called with the values of each point; its time is not counted.
    """

    def __init__(
        self,
        settings: Settings,
        flops_per_step: int,
        recomputed_flops_per_step: int = 0,
        on_point: Callable[[Trainer, Mapping[str, float]], None] = lambda trainer, rates: None,
    ):
        self._config = settings
        self._on_point = on_point
        self._flops_per_step = flops_per_step
        self._recomputed_flops_per_step = recomputed_flops_per_step
        self.peak_flops: float | None = None  # FLOP/s that all devices together can reach, if known
        self._fit_started = self._fit_seconds = 0.0
        self._seconds_to_first_step: float | None = None
        self._first_step = self._first_timed_step = 0
        self._lap_step = self._timed_step = 0
        self._timed_seconds = self._timed_data_seconds = 0.0
        self._data_seconds = 0.0
        self._batch_ended = 0.0
        self._clock = Stopwatch(torch.device("cpu"))

    @property
    def totals(self) -> dict[str, float | None]:
        """perf/* of metrics.json, over all timed steps, if a step was timed. perf/fit_seconds is the wall-clock time of
        the whole fit; perf/seconds_to_first_step runs from the start of the command to the end of the first optimizer
        step. Only a benchmark has the shortest, median and longest step."""
        totals: dict[str, float | None] = {
            "perf/seconds_to_first_step": self._seconds_to_first_step,
            "perf/fit_seconds": self._fit_seconds,
        }
        steps = self._timed_step - self._first_timed_step
        if steps > 0:
            totals |= self.rates(self._clock.seconds, self._data_seconds, steps)
        if laps := self._clock.lap_seconds():
            totals["perf/step_time_min_ms"] = 1e3 * min(laps)
            totals["perf/step_time_median_ms"] = 1e3 * statistics.median(laps)
            totals["perf/step_time_max_ms"] = 1e3 * max(laps)
        return totals

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._fit_started = time.perf_counter()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        device = pl_module.device
        if peak := peak_flops(device, self._config.placement.precision):
            self.peak_flops = peak * trainer.world_size
        super().on_train_start(trainer, pl_module)
        self._clock = Stopwatch(device)
        self._first_step = trainer.global_step
        steps = trainer.estimated_stepping_batches - self._first_step
        warmup_steps = self._config.output.warmup_steps
        if steps > 0 and not self._config.recipe.bench_steps:
            warmup_steps = min(warmup_steps, steps // 2)
        self._first_timed_step = self._timed_step = self._lap_step = self._first_step + int(warmup_steps)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Adds the wait for this batch; after the warm-up and after each pause it starts the clock instead."""
        if self._clock.running:
            self._data_seconds += time.perf_counter() - self._batch_ended
        elif trainer.global_step >= self._first_timed_step:
            self._clock.start()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Notes the end of the first step, and of every step of a benchmark; writes a point if one is due."""
        step = trainer.global_step
        if self._seconds_to_first_step is None and step > self._first_step:
            started = float(os.environ.get(exits.STARTED) or psutil.Process().create_time())
            self._seconds_to_first_step = time.time() - started
        if self._config.recipe.bench_steps and step > self._lap_step:
            self._lap_step = step
            self._clock.lap()
        super().on_train_batch_end(trainer, pl_module)
        self._batch_ended = time.perf_counter()

    def _pause(self, *args: Any, **kwargs: Any) -> None:
        self._clock.stop()

    # A validation, a checkpoint, or the start of the next epoch's loader follows.
    on_validation_start = on_save_checkpoint = on_train_epoch_end = _pause

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._fit_seconds = time.perf_counter() - self._fit_started

    def _log(self, trainer: Trainer) -> None:
        running = self._clock.running
        self._clock.stop()
        steps = trainer.global_step - self._timed_step
        rates: dict[str, float] = {}
        if steps > 0:
            seconds = self._clock.seconds - self._timed_seconds
            rates = self.rates(seconds, self._data_seconds - self._timed_data_seconds, steps)
            log_scalars(trainer, rates)
            self._timed_step, self._timed_seconds = trainer.global_step, self._clock.seconds
            self._timed_data_seconds = self._data_seconds
        self._on_point(trainer, rates)
        if running:
            self._clock.start()

    def rates(self, seconds: float, data_seconds: float, steps: int) -> dict[str, float]:
        """Returns perf/* of `steps` optimizer steps that took `seconds`, of which `data_seconds` waiting for data;
        tokens only of transformers, the MFU only where the peak is known."""
        steps_per_second = steps / seconds
        images_per_second = self._config.recipe.batch_size * steps_per_second
        tokens = MODELS[self._config.recipe.model.name].tokens_per_image
        model_flops = self._flops_per_step * steps_per_second
        recomputed_flops = self._recomputed_flops_per_step * steps_per_second
        rates = {
            "perf/step_time_ms": 1e3 * seconds / steps,
            "perf/data_time_ms": 1e3 * data_seconds / steps,
            "perf/images_per_second": images_per_second,
            "perf/tflops": (model_flops + recomputed_flops) / 1e12,
        }
        if tokens:
            rates["perf/tokens_per_second"] = tokens * images_per_second
        if self.peak_flops is not None:
            rates["perf/mfu"] = model_flops / self.peak_flops
        return rates
