"""The progress of a run on the standard error: a bar on a terminal, a line now and then in a log file."""

import math
import time
from datetime import timedelta
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from rich import progress as bars
from rich.console import Console

from cifar_zero.config.flags import Config
from cifar_zero.training.callbacks.curves import TrainingCurves

BAR_INTERVAL_S = 0.25
"""Seconds between two updates of the bar on a terminal."""

PLAIN_INTERVAL_S = 10.0
"""Least seconds between two lines if the output is not a terminal."""


class Progress(ProgressBar):
    """Shows epoch, step, loss, images per second and the time left, on rank 0.

    Between two updates a training step costs one look at the clock. Lightning's bars (2.6.6) are updated in every step,
    by a thread that takes the interpreter from the training, and write no lines into a log file.

    Args:
        config: of the run.
        curves: of the run, for the newest loss.
        console: where to print; the standard error by default.
    """

    def __init__(self, config: Config, curves: TrainingCurves, console: Console | None = None):
        super().__init__()
        self._console = console or Console(stderr=True, highlight=False)
        self._curves = curves
        self._batch_size = config.batch_size
        self._log_interval = config.log_interval
        self._enabled = True
        self._plain_step = 0
        self._next_update = self._next_line = 0.0
        self._bar = _new_bar(self._console)
        self._task: bars.Task | None = None

    def disable(self) -> None:
        """Hides the progress; Lightning calls it on all ranks but rank 0."""
        self._enabled = False

    def enable(self) -> None:
        """Shows the progress again."""
        self._enabled = True

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints above the bar."""
        if self._enabled:
            self._console.print(*args, markup=False, soft_wrap=True)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Shows the bar of the training."""
        self._open(_epoch(trainer), trainer.estimated_stepping_batches, trainer.global_step)
        self._plain_step = trainer.global_step
        self._next_line = time.monotonic() + PLAIN_INTERVAL_S

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Updates the bar of the training if it is time to."""
        if time.monotonic() >= self._next_update:
            self._update(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leaves the final bar on the terminal."""
        self._update(trainer)
        self._close()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prints the result of a validation."""
        metrics = trainer.callback_metrics
        if "val/acc" in metrics and not trainer.sanity_checking:
            self.print(f"{_epoch(trainer)}  val/loss {metrics['val/loss']:.3f}  val/acc {metrics['val/acc']:.2%}")

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Shows the bar of the test."""
        self._open("test", sum(trainer.num_test_batches))

    def on_test_batch_end(self, *_: Any) -> None:
        """Advances the bar of the test."""
        if self._task is not None:
            self._bar.update(self._task.id, advance=1, refresh=self._console.is_terminal)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leaves the final bar on the terminal."""
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leaves the terminal as it was."""
        self._close()

    def _open(self, description: str, total: float, completed: int = 0) -> None:
        """Replaces the bar by a new one; without a terminal it only keeps the count and the time."""
        if not self._enabled:
            return
        self._bar = _new_bar(self._console)
        known = 0 < total < math.inf
        self._bar.add_task(description, total=total if known else None, completed=completed, detail="")
        self._task = self._bar.tasks[0]
        if self._console.is_terminal:
            self._bar.start()

    def _close(self) -> None:
        if self._console.is_terminal:  # elsewhere rich would print an empty line
            self._bar.stop()

    def _update(self, trainer: Trainer) -> None:
        if self._task is None:
            return
        now = time.monotonic()
        self._next_update = now + BAR_INTERVAL_S
        task, loss = self._task, self._curves.last_loss
        self._bar.update(task.id, completed=trainer.global_step, description=_epoch(trainer))
        speed = "" if task.speed is None else f"{task.speed * self._batch_size:,.0f} images/s"
        detail = "  ".join(filter(None, ("" if loss is None else f"loss {loss:.3f}", speed)))
        self._bar.update(task.id, detail=detail, refresh=self._console.is_terminal)
        if self._console.is_terminal or now < self._next_line:
            return
        if trainer.global_step // self._log_interval > self._plain_step // self._log_interval:
            self._plain_step, self._next_line = trainer.global_step, now + PLAIN_INTERVAL_S
            total = "" if task.total is None else f"/{task.total:.0f}"
            left = "" if task.time_remaining is None else f"{timedelta(seconds=int(task.time_remaining))} left"
            line = (_epoch(trainer), f"step {trainer.global_step}{total}", detail, left)
            self.print("  ".join(filter(None, line)))


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
