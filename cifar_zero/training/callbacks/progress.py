"""The progress of a run on the standard error: a bar on a terminal, a line now and then in a log file."""

import math
import time
from datetime import timedelta
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from rich import progress as bars
from rich.console import Console

from cifar_zero.training.callbacks.curves import TrainingCurves

BAR_INTERVAL_S = 0.25
"""Seconds between two updates of the bar on a terminal."""

PLAIN_INTERVAL_S = 10.0
"""Least seconds between two lines if the output is not a terminal."""


class Progress(Callback):
    """Shows epoch, step, loss, images per second and the time left, on rank 0.

    Between two updates a training step costs one look at the clock. Lightning's bars (2.6.6) are updated in every step,
    by a thread that takes the interpreter from the training, and write no lines into a log file.

    Args:
        batch_size: images of an optimizer step, over all ranks.
        curves: of the run, for the newest loss.
    """

    def __init__(self, batch_size: int, curves: TrainingCurves):
        self._console = Console(stderr=True, highlight=False)
        self._curves = curves
        self._batch_size = batch_size
        self._plain_step = 0
        self._next_update = self._next_line = 0.0
        self._bar = _new_bar(self._console)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Shows the bar of the training."""
        self._open(trainer, _epoch(trainer), trainer.estimated_stepping_batches, trainer.global_step)
        self._plain_step = trainer.global_step
        self._next_line = time.monotonic() + PLAIN_INTERVAL_S

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Updates the bar of the training if it is time to."""
        if time.monotonic() >= self._next_update:
            self._update(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Shows the last step."""
        self._update(trainer)
        self._close()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prints the result of a validation."""
        metrics = trainer.callback_metrics
        if "val/acc" in metrics and trainer.is_global_zero and not trainer.sanity_checking:
            self._print(f"{_epoch(trainer)}  val/loss {metrics['val/loss']:.3f}  val/acc {metrics['val/acc']:.2%}")

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Shows the bar of the test."""
        self._open(trainer, "test", sum(trainer.num_test_batches))

    def on_test_batch_end(self, *_: Any) -> None:
        """Advances the bar of the test."""
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
        """Leaves the final bar on the terminal."""
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
        speed = "" if task.speed is None else f"{task.speed * self._batch_size:,.0f} images/s"
        detail = "  ".join(filter(None, ("" if loss is None else f"loss {loss:.3f}", speed)))
        self._bar.update(task.id, detail=detail, refresh=self._console.is_terminal)
        if self._console.is_terminal or now < self._next_line:
            return
        if trainer.global_step // trainer.log_every_n_steps > self._plain_step // trainer.log_every_n_steps:
            self._plain_step, self._next_line = trainer.global_step, now + PLAIN_INTERVAL_S
            total = "" if task.total is None else f"/{task.total:.0f}"
            left = "" if task.time_remaining is None else f"{timedelta(seconds=int(task.time_remaining))} left"
            line = (_epoch(trainer), f"step {trainer.global_step}{total}", detail, left)
            self._print("  ".join(filter(None, line)))

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
    epoch, total = trainer.current_epoch + 1, trainer.max_epochs
    if total is None or total < 1:
        return f"epoch {epoch}"
    return f"epoch {min(epoch, total)}/{total}"  # after the last epoch Lightning counts one more
