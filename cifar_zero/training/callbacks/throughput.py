"""Measures speed and progress of a run: time per optimizer step, time spent waiting for data, images per second and
FLOPs per second. FLOPs are counted on torch's meta device, so the count does not depend on whether the strategy shards,
casts or offloads the model.

The model FLOPs utilisation (MFU) is relative to the dense peak of the GPU, which PEAKS lists. Lightning's table (2.6.6,
lightning/fabric/utilities/throughput.py) has figures with sparsity for the H100 NVL and the H200, twice what a dense
model can reach (Lightning's issue 21677), and lacks the name "NVIDIA H200" and the tensor cores of GeForce cards.
"""

import os
import re
import time
from datetime import timedelta
from typing import Any, NamedTuple

import psutil
import torch
from lightning.fabric.utilities.throughput import measure_flops
from lightning.pytorch import LightningModule, Trainer

from cifar_zero.build_model import create_meta_model, create_model
from cifar_zero.config.recipe import Recipe
from cifar_zero.config.settings import Settings
from cifar_zero.core import exits
from cifar_zero.core.console import say
from cifar_zero.models import IMAGE_SHAPE, MODELS
from cifar_zero.models.user_model import UserModel
from cifar_zero.training.callbacks.curves import IntervalCallback, TrainingCurves, log_scalars


class Throughput(IntervalCallback):
    """Writes the perf/* curves, and keeps the perf/* values of the whole run for metrics.json. docs/runs.md defines
    perf/data_time_ms, perf/tflops and perf/mfu (PaLM, Chowdhery et al. 2022, appendix B).

    The measured time includes waiting for a batch. It excludes validation, the writing of checkpoints, the start of an
    epoch, and the first --warmup_steps steps, which are at most half of the run, except in a benchmark.

    Args:
        flops_per_step: FLOPs of one optimizer step, over all ranks.
    """

    def __init__(self, settings: Settings, flops_per_step: int):
        self._config = settings
        self._flops_per_step = flops_per_step
        # The perf/* values of metrics.json, rates over all timed steps. perf/fit_seconds is the wall-clock time of the
        # whole fit. perf/seconds_to_first_step runs from the start of the command to the end of the first step.
        self.totals_of_run: dict[str, float] = {}
        self.newest_rates: dict[str, float] = {}  # rates at the newest point; empty during the warm-up
        self.peak_flops: float | None = None  # FLOP/s that all devices together can reach, if known
        self._device = torch.device("cpu")
        self._fit_started = 0.0
        self._first_timed_step = 0
        self._clock_started: float | None = None  # None while the clock is paused
        self._batch_ended = 0.0
        self._seconds = self._data_seconds = 0.0  # time of the timed steps
        self._point = (0, 0.0, 0.0)  # step, `_seconds` and `_data_seconds` at the newest point

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._fit_started = time.perf_counter()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._device = pl_module.device
        name = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "cpu"
        if peak := peak_flops(name, self._config.placement.precision):
            self.peak_flops = peak * trainer.world_size
        warmup_steps = self._config.output.warmup_steps
        if not self._config.recipe.bench_steps:
            warmup_steps = min(warmup_steps, int(trainer.estimated_stepping_batches - trainer.global_step) // 2)
        self._first_timed_step = trainer.global_step + warmup_steps
        self._point = (self._first_timed_step, 0.0, 0.0)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Adds the time that was spent waiting for this batch. At the first batch after the warm-up or after a pause,
        starts the clock instead."""
        if self._clock_started is not None:
            self._data_seconds += time.perf_counter() - self._batch_ended
        elif trainer.global_step >= self._first_timed_step:
            self._clock_started = self._now()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        key = "perf/seconds_to_first_step"
        if key not in self.totals_of_run and trainer.global_step > self._logged_step:
            started = float(os.environ.get(exits.STARTED) or psutil.Process().create_time())
            self.totals_of_run[key] = time.time() - started
        super().on_train_batch_end(trainer, pl_module)
        self._batch_ended = time.perf_counter()

    def _pause(self, *args: Any, **kwargs: Any) -> None:
        if self._clock_started is not None:
            self._seconds += self._now() - self._clock_started
            self._clock_started = None

    # These hooks are followed by a validation, a checkpoint, or the start of the next epoch's loader.
    on_validation_start = on_save_checkpoint = on_train_epoch_end = _pause

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.totals_of_run["perf/fit_seconds"] = time.perf_counter() - self._fit_started

    def _log(self, trainer: Trainer) -> None:
        was_running = self._clock_started is not None
        self._pause()
        step, seconds, data_seconds = self._point
        if trainer.global_step > step:
            self.newest_rates = self.rates(
                trainer.global_step - step, self._seconds - seconds, self._data_seconds - data_seconds
            )
            log_scalars(trainer, self.newest_rates)
            timed_steps = trainer.global_step - self._first_timed_step
            self.totals_of_run |= self.rates(timed_steps, self._seconds, self._data_seconds)
            self._point = (trainer.global_step, self._seconds, self._data_seconds)
        if was_running:
            self._clock_started = self._now()

    def _now(self) -> float:
        """Waits until all work that is queued on the device is done, and returns the time in seconds."""
        torch.get_device_module(self._device).synchronize(self._device)  # returns at once on the CPU
        return time.perf_counter()

    def rates(self, steps: int, seconds: float, data_seconds: float) -> dict[str, float]:
        """Returns the perf/* metrics of a number of optimizer steps, which took `seconds`, of which `data_seconds` were
        spent waiting for data. Only transformers have tokens per second, and there is an MFU only if `peak_flops` is
        known."""
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


FORMATS = {
    "train/epoch": "epoch {:.2f}",
    "train/loss": "Loss: {:.4f}",
    "train/learning_rate": "Learning rate: {:.4g}",
    "perf/step_time_ms": "Time: {:.4g}ms",
    "perf/tflops": "TFLOPS: {:.3g}",
    "perf/images_per_second": "Images/s: {:.0f}",
    "perf/tokens_per_second": "Tokens/s: {:.0f}",
}
"""Format of each part of a progress line, keyed by the tag of the curve whose value it shows."""


class ProgressLines(IntervalCallback):
    """Prints each point of the curves as a line on rank 0, in the format of DeepSpeedExamples
    (training/DeepSpeed-SuperOffload/finetune_zero3.py), and a line after each validation. `curves` and `throughput`
    must come before this callback in the Trainer's list."""

    def __init__(self, curves: TrainingCurves, throughput: Throughput):
        self._curves, self._throughput = curves, throughput

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        metrics = trainer.callback_metrics
        if trainer.is_global_zero and not trainer.sanity_checking:
            epoch = trainer.current_epoch + 1
            say(f"epoch {epoch}  val/loss {metrics['val/loss']:.3f}  val/acc {metrics['val/acc']:.2%}")

    def _log(self, trainer: Trainer) -> None:
        if not trainer.is_global_zero:
            return
        values = self._curves.newest | self._throughput.newest_rates
        parts = [f"Step {trainer.global_step}/{trainer.estimated_stepping_batches}"]
        for tag, form in FORMATS.items():
            if tag in values:
                parts.append(form.format(values[tag]))
        if "perf/step_time_ms" in values:
            steps = trainer.estimated_stepping_batches - trainer.global_step
            parts.append(f"{timedelta(seconds=int(steps * values['perf/step_time_ms'] / 1e3))} left")
        say(" | ".join(parts))


def training_flops(recipe: Recipe, num_classes: int, batch_size: int, side: int = IMAGE_SHAPE[1]) -> int:
    """Returns the number of FLOPs in a forward and backward pass of a batch of images of `side` x `side` pixels. A
    multiply-add counts as two. Only matrix products and convolutions count, as in torch's FlopCounterMode, and what
    activation checkpointing recomputes does not. A user's model that needs values is built and run on the CPU."""

    def count(net: torch.nn.Module) -> int:
        images = torch.zeros(batch_size, IMAGE_SHAPE[0], side, side)
        return measure_flops(net, lambda: net(images), torch.Tensor.sum)

    with torch.autograd.set_detect_anomaly(False):  # anomaly detection would check values, which do not exist
        try:
            with torch.device("meta"):
                return count(create_meta_model(recipe, num_classes))
        except (RuntimeError, NotImplementedError):
            if not issubclass(MODELS[recipe.model.name], UserModel):
                raise
            return count(create_model(recipe, num_classes))  # the computation of a user's model may depend on values


class Peak(NamedTuple):
    """The peak FLOP/s of one GPU without sparsity. A multiply-add counts as two operations."""

    float32: float  # outside the tensor cores
    tfloat32: float | None  # None before Ampere, when tensor cores had neither TF32 nor bfloat16
    half: float  # float16 with accumulation in float32, which torch uses, and bfloat16


# If a data sheet gives a figure only with sparsity, half of it is used. Patterns are searched in the name that
# torch.cuda.get_device_name returns. \b separates the A10 from the A100, the L4 from the L40S, the H200 from the GH200.
PEAKS = {
    # NVIDIA T4 data sheet (t4-tensor-core-datasheet-951643)
    r"\bT4$": Peak(8.1e12, None, 65e12),
    # NVIDIA A10 data sheet (a10-datasheet)
    r"\bA10$": Peak(31.2e12, 62.5e12, 125e12),
    # NVIDIA A100 data sheet (nvidia-a100-datasheet-us-nvidia-1758950-r4-web); SXM and PCIe alike
    r"\bA100\b": Peak(19.5e12, 156e12, 312e12),
    # NVIDIA Ampere GA102 architecture white paper, version 2, RTX 3090 next to the Titan RTX
    r"\bGeForce RTX 3090$": Peak(35.6e12, 35.6e12, 71e12),
    # NVIDIA Ada architecture white paper, version 2.1, appendix A
    r"\bGeForce RTX 4090$": Peak(82.6e12, 82.6e12, 165.2e12),
    # NVIDIA L4 data sheet: 120, 242 and 242 with sparsity
    r"\bL4$": Peak(30.3e12, 60e12, 121e12),
    # NVIDIA L40S data sheet (l40s-datasheet)
    r"\bL40S$": Peak(91.6e12, 183e12, 362.05e12),
    # NVIDIA H100 data sheet (h100-datasheet-24306): SXM 989, 1,979 and 1,979 with sparsity; NVL 835, 1,671 and 1,671.
    # PCIe, in an earlier edition: 756, 1,513 and 1,513
    r"\bH100\b.* HBM3$": Peak(67e12, 494.5e12, 989.5e12),
    r"\bH100 PCIe$": Peak(51e12, 378e12, 756.5e12),
    r"\bH100 NVL$": Peak(60e12, 417.5e12, 835.5e12),
    # NVIDIA H200 data sheet (hpc-datasheet-sc23-h200-datasheet-3002446): SXM and NVL as the H100's
    r"\bH200$": Peak(67e12, 494.5e12, 989.5e12),
    r"\bH200 NVL$": Peak(60e12, 417.5e12, 835.5e12),
    # NVIDIA Blackwell data sheet, a GPU of the HGX B200: 2,200, 4,500 and 4,500 with sparsity
    r"\bB200$": Peak(75e12, 1100e12, 2250e12),
}
"""The peaks of NVIDIA's GPUs, keyed by a regular expression for the device's name. Other GPUs, and slices of a GPU
(MIG), have no known peak."""


def peak_flops(device_name: str, precision: str) -> float | None:
    """Returns the dense peak of one GPU in FLOP/s, or None if it is unknown. `device_name` is the name that
    torch.cuda.get_device_name returns. For the precision 32-true, it is the peak of TF32 if
    torch.get_float32_matmul_precision() allows TF32. This setting does not apply to convolutions, for which cuDNN uses
    TF32 unless torch.backends.cudnn.allow_tf32 is off."""
    peak = next((peak for pattern, peak in PEAKS.items() if re.search(pattern, device_name)), None)
    if peak is None or " MIG " in device_name:
        return None
    if precision.startswith("bf16") and peak.tfloat32 is None:
        return None
    if "16" in precision:
        return peak.half
    if torch.get_float32_matmul_precision() == "highest":
        return peak.float32
    return peak.tfloat32 or peak.float32
