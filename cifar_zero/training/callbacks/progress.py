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
"""Seconds between two drawings of the bar on a terminal."""

PLAIN_INTERVAL_S = 10.0
"""Least seconds between two lines where the output is not a terminal."""


class Progress(ProgressBar):
    """Shows epoch, step, loss, images per second and the time left; rank 0 alone.

    Between two drawings a training step costs one look at the clock.

    Args:
        config: of the run.
        curves: whose newest loss is shown.
        console: where to; the standard error by default.
    """

    def __init__(self, config: Config, curves: TrainingCurves, console: Console | None = None):
        super().__init__()
        self._console = console or Console(stderr=True, highlight=False)
        self._curves = curves
        self._batch_size = config.batch_size
        self._log_interval = config.log_interval
        self._plain_step = 0
        self._enabled = True
        self._next_drawing = self._next_line = 0.0
        self._bar = self._new_bar()
        self._training: bars.TaskID | None = None
        self._evaluation: bars.TaskID | None = None

    def disable(self) -> None:
        """Shows nothing from now on."""
        self._enabled = False

    def enable(self) -> None:
        """Shows again."""
        self._enabled = True

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints above the bar."""
        if self._enabled:
            self._console.print(*args, markup=False, soft_wrap=True)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Opens the line of the training."""
        if not self._enabled:
            return
        total = trainer.estimated_stepping_batches
        self._show()
        self._training = self._bar.add_task(
            _epoch(trainer), total=total if 0 < total < math.inf else None, completed=trainer.global_step, detail=""
        )
        self._plain_step = trainer.global_step
        self._next_line = time.monotonic() + PLAIN_INTERVAL_S

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Draws the training anew where it is time to."""
        if self._enabled and time.monotonic() >= self._next_drawing:
            self._draw(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leaves the last state of the bar standing."""
        if self._enabled:
            self._draw(trainer)
            self._hide()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Opens the line of a validation."""
        self._open("validation", sum(trainer.num_val_batches))

    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Moves the line of a validation on."""
        self._advance()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Takes the line of a validation away, and prints its result."""
        self._close()
        metrics = trainer.callback_metrics
        if self._enabled and "val/acc" in metrics and not trainer.sanity_checking:
            self.print(f"{_epoch(trainer)}  val/loss {metrics['val/loss']:.3f}  val/acc {metrics['val/acc']:.2%}")

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Opens the line of a test."""
        if self._enabled:
            self._show()
        self._open("test", sum(trainer.num_test_batches))

    def on_test_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Moves the line of a test on."""
        self._advance()

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Takes the line of a test away."""
        self._close()
        self._hide()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leaves the terminal as it was."""
        self._hide()

    def _show(self) -> None:
        self._bar = self._new_bar()
        if self._console.is_terminal:  # elsewhere it only keeps the counts and the time
            self._bar.start()

    def _hide(self) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def _new_bar(self) -> bars.Progress:
        columns = [
            bars.TextColumn("{task.description}"),
            bars.BarColumn(bar_width=24),
            bars.MofNCompleteColumn(),
            bars.TextColumn("{task.fields[detail]}"),
            bars.TimeElapsedColumn(),
            bars.TimeRemainingColumn(),
            bars.TextColumn("left"),
        ]
        # Drawn by us: a thread that draws would take the interpreter from the training at any moment.
        return bars.Progress(*columns, console=self._console, auto_refresh=False)

    def _draw(self, trainer: Trainer) -> None:
        assert self._training is not None
        now = time.monotonic()
        self._next_drawing = now + BAR_INTERVAL_S
        task = self._bar.tasks[0]
        self._bar.update(self._training, completed=trainer.global_step, description=_epoch(trainer))
        loss = self._curves.last_loss
        speed = "" if task.speed is None else f"{task.speed * self._batch_size:,.0f} images/s"
        detail = "  ".join(filter(None, ("" if loss is None else f"loss {loss:.3f}", speed)))
        self._bar.update(self._training, detail=detail, refresh=True)
        if self._console.is_terminal or now < self._next_line:
            return
        if trainer.global_step // self._log_interval > self._plain_step // self._log_interval:
            self._plain_step, self._next_line = trainer.global_step, now + PLAIN_INTERVAL_S
            total = "" if task.total is None else f"/{task.total:.0f}"
            left = "" if task.time_remaining is None else f"{timedelta(seconds=int(task.time_remaining))} left"
            line = (_epoch(trainer), f"step {trainer.global_step}{total}", detail, left)
            self.print("  ".join(filter(None, line)))

    def _open(self, name: str, batches: int | float) -> None:
        if self._enabled and batches:
            self._evaluation = self._bar.add_task(name, total=batches if batches < math.inf else None, detail="")

    def _advance(self) -> None:
        if self._evaluation is not None:
            self._bar.update(self._evaluation, advance=1, refresh=True)

    def _close(self) -> None:
        if self._evaluation is not None:
            self._bar.remove_task(self._evaluation)
            self._bar.refresh()
            self._evaluation = None


def _epoch(trainer: Trainer) -> str:
    epoch, total = trainer.current_epoch + 1, trainer.max_epochs
    if total is None or total < 1:
        return f"epoch {epoch}"
    return f"epoch {min(epoch, total)}/{total}"  # after the last epoch Lightning counts one more
