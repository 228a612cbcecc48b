"""The progress of a run on the standard error: a bar on a terminal, a line now and then in a log file."""

import math
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from rich import progress as bars
from rich.console import Console

from cifar_zero.reports.summary import flops_per_second
from cifar_zero.training.callbacks.curves import TrainingCurves

BAR_INTERVAL_S = 0.25  # seconds between two updates of the bar on a terminal

LINE: dict[str, Callable[[float], str]] = {
    "train/loss": "Loss: {:.4f}".format,
    "train/learning_rate": "Learning rate: {:.4g}".format,
    "perf/step_time_ms": "Time: {:.4g}ms".format,
    "perf/tflops": flops_per_second,
    "perf/images_per_second": "Images/s: {:.0f}".format,
    "perf/tokens_per_second": "Tokens/s: {:.0f}".format,
}
"""The parts of a line, by the tags of the curves."""


class Progress(Callback):
    """Shows epoch, step, loss, speed and the time left, as a bar, or in a log as a line every --log_interval.
    Lightning's bars (2.6.6) are updated in every step, by a thread that takes the interpreter from the training, and
    write no lines into a log file. `batch_size` counts the images of an optimizer step over all ranks."""

    def __init__(self, batch_size: int, curves: TrainingCurves):
        self._console = Console(stderr=True, highlight=False)
        self._curves = curves
        self._batch_size = batch_size
        self._next_update = 0.0
        self._bar = _new_bar(self._console)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._open(trainer, _epoch(trainer), trainer.estimated_stepping_batches, trainer.global_step)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if time.monotonic() >= self._next_update:
            self._update(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._update(trainer)
        self._close()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        metrics = trainer.callback_metrics
        if "val/acc" in metrics and trainer.is_global_zero and not trainer.sanity_checking:
            self._print(f"{_epoch(trainer)}  val/loss {metrics['val/loss']:.3f}  val/acc {metrics['val/acc']:.2%}")

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._open(trainer, "test", sum(trainer.num_test_batches))

    def on_test_batch_end(self, *_: Any) -> None:
        for task in self._bar.tasks:
            self._bar.update(task.id, advance=1, refresh=self._console.is_terminal)

    def _open(self, trainer: Trainer, description: str, total: float, completed: int = 0) -> None:
        """Replaces the bar by a new one; without a terminal it only keeps the count and the time."""
        if not trainer.is_global_zero:
            return
        self._bar = _new_bar(self._console)
        known = 0 < total < math.inf
        self._bar.add_task(description, total=total if known else None, completed=completed, detail="")
        if self._console.is_terminal:
            self._bar.start()

    def _close(self, *_: Any, **__: Any) -> None:
        if self._console.is_terminal:  # elsewhere rich would print an empty line
            self._bar.stop()

    on_test_end = on_exception = _close

    def _update(self, trainer: Any) -> None:
        if not self._bar.tasks:
            return
        now = time.monotonic()
        self._next_update = now + BAR_INTERVAL_S
        task, loss = self._bar.tasks[0], self._curves.last_loss
        self._bar.update(task.id, completed=trainer.global_step, description=_epoch(trainer))
        details: list[str] = []
        if loss is not None:
            details.append(f"loss {loss:.3f}")
        if task.speed is not None:
            details.append(f"{task.speed * self._batch_size:,.0f} images/s")
        self._bar.update(task.id, detail="  ".join(details), refresh=self._console.is_terminal)

    def line(self, trainer: Any, rates: Mapping[str, float]) -> None:
        """Prints the newest point of the curves, with `Throughput`'s rates, if there is no terminal; the form is that
        of DeepSpeedExamples (training/DeepSpeed-SuperOffload/finetune_zero3.py)."""
        if self._console.is_terminal or not self._bar.tasks:
            return
        self._update(trainer)
        task, curves = self._bar.tasks[0], self._curves
        values = {**rates, "train/loss": curves.last_loss, "train/learning_rate": curves.last_learning_rate}
        step = f"Step {trainer.global_step}"
        if task.total is not None:
            step += f"/{task.total:.0f}"
        parts = [step, _epoch(trainer)]
        for tag, form in LINE.items():
            value = values.get(tag)
            if value is not None:
                parts.append(form(value))
        if task.time_remaining is not None:
            parts.append(f"{timedelta(seconds=int(task.time_remaining))} left")
        self._print(" | ".join(parts))

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, soft_wrap=True)


def _new_bar(console: Console) -> bars.Progress:
    columns = [
        bars.TextColumn("{task.description}"),
        bars.BarColumn(bar_width=24),
        bars.MofNCompleteColumn(),
        bars.TextColumn("{task.fields[detail]}"),
        bars.TimeElapsedColumn(),
        bars.TimeRemainingColumn(),
        bars.TextColumn("left"),
    ]
    return bars.Progress(*columns, console=console, auto_refresh=False)


def _epoch(trainer: Trainer) -> str:
    # `current_epoch` counts an epoch that was stopped in its middle as done. Before the first one begins, ready is 0.
    epoch, total = max(trainer.fit_loop.epoch_progress.current.ready, 1), trainer.max_epochs
    return f"epoch {epoch}" if total is None or total < 1 else f"epoch {epoch}/{total}"
