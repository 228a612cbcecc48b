"""The progress of a run: Lightning's bar on a terminal, a line now and then in a log file."""

import sys
from datetime import timedelta
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar

from cifar_zero.core.console import say
from cifar_zero.training.callbacks.curves import IntervalCallback, TrainingCurves
from cifar_zero.training.callbacks.throughput import Throughput

RATES = {
    "perf/step_time_ms": "Time: {:.4g}ms",
    "perf/tflops": "TFLOPS: {:.3g}",
    "perf/images_per_second": "Images/s: {:.0f}",
    "perf/tokens_per_second": "Tokens/s: {:.0f}",
}
"""The parts of a line, by the tags of the curves."""


def is_terminal() -> bool:
    """Returns whether a bar can be drawn where Lightning draws it."""
    return sys.stdout.isatty()


class ProgressBar(TQDMProgressBar):
    """Lightning's bar, with the loss of the newest point of the curves and the accuracy of the newest validation."""

    def __init__(self, curves: TrainingCurves):
        super().__init__(refresh_rate=20)  # drawing it takes as long as a step of a small model
        self._curves = curves

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        shown: dict[str, Any] = {}
        if self._curves.last_loss is not None:
            shown["loss"] = f"{self._curves.last_loss:.3f}"
        if "val/acc" in trainer.callback_metrics:
            shown["val/acc"] = f"{trainer.callback_metrics['val/acc']:.2%}"
        return shown


class ProgressLines(IntervalCallback):
    """Prints the newest point of the curves, on rank 0, in the form of DeepSpeedExamples
    (training/DeepSpeed-SuperOffload/finetune_zero3.py). The callbacks of the curves must come before it."""

    def __init__(self, curves: TrainingCurves, throughput: Throughput):
        self._curves, self._throughput = curves, throughput

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        metrics = trainer.callback_metrics
        if trainer.is_global_zero:
            epoch = trainer.current_epoch + 1
            say(f"epoch {epoch}  val/loss {metrics['val/loss']:.3f}  val/acc {metrics['val/acc']:.2%}")

    def _log(self, trainer: Trainer) -> None:
        if not trainer.is_global_zero:
            return
        step, rates, total = trainer.global_step, self._throughput.newest_rates, trainer.estimated_stepping_batches
        is_known = 0 < total < float("inf")
        parts = [f"Step {step}/{total}" if is_known else f"Step {step}", f"epoch {self._curves.last_epoch:.2f}"]
        parts.append(f"Loss: {self._curves.last_loss:.4f}")
        if self._curves.last_learning_rate is not None:
            parts.append(f"Learning rate: {self._curves.last_learning_rate:.4g}")
        for tag, form in RATES.items():
            if tag in rates:
                parts.append(form.format(rates[tag]))
        if is_known and rates:
            seconds = (total - step) * rates["perf/step_time_ms"] / 1e3
            parts.append(f"{timedelta(seconds=int(seconds))} left")
        say(" | ".join(parts))
