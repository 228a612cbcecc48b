"""`train --plot_schedule`: the learning rate over the steps of a run."""

from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from matplotlib.figure import Figure

from cifar_zero.config.run import Run
from cifar_zero.config.settings import Settings
from cifar_zero.core.errors import UsageError
from cifar_zero.launch import rank_environment
from cifar_zero.optimizers import OPTIMIZERS
from cifar_zero.schedules import SCHEDULES, with_total_steps
from cifar_zero.training import DATAMODULE

POINTS = 2000  # most points of the curve: more than the figure has pixels


def plot_schedule(run: Run) -> int:
    """Draws the learning rate of each optimizer step into a PNG file, on rank 0; returns the exit code. Raises
    UsageError: the file cannot be written."""
    if rank_environment.global_rank() != 0:
        return 0
    file, schedule, optimizer = Path(run.output.plot_schedule), run.recipe.schedule, run.recipe.optimizer
    steps = run_steps(run, resolve_name(DATAMODULE)(run))
    formula = with_total_steps(SCHEDULES[schedule.name](**schedule.options), lambda: steps)
    base_lr = OPTIMIZERS[optimizer.name](**optimizer.options).lr
    shown = range(0, steps, max(1, steps // POINTS))
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="optimizer step", ylabel="learning rate")
    axes.set_title(f"{schedule.name}, {optimizer.name} with {base_lr:g}, {steps:,} steps")
    axes.plot(shown, [formula.rate(step, base_lr) for step in shown])
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, format="png", dpi=120)
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}") from error
    print(f"the learning rate of {schedule.name} is drawn in {file}")
    return 0


def run_steps(settings: Settings, datamodule: Any) -> int:
    """Returns the optimizer steps of a run that is not started: of all epochs, or --max_steps; as Lightning counts
    them (`Trainer.estimated_stepping_batches`). Decodes the images if that has not been done, to learn their number.
    """
    datamodule.setup()
    batches = len(datamodule.train_dataloader())
    limit = settings.recipe.trainer.get("overfit_batches") or settings.recipe.trainer.get("limit_train_batches", 1.0)
    batches = int(batches * limit) if isinstance(limit, float) else min(batches, limit)
    steps = settings.recipe.epochs * -(-batches // settings.placement.accumulate)
    if settings.recipe.max_steps == -1:
        return steps
    return min(steps, settings.recipe.max_steps)
