"""Plots of the learning rate: a schedule over a run's steps, and the loss over the rates of a range test."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cifar_zero.config.flags import Choice
from cifar_zero.core.errors import UsageError
from cifar_zero.optimizers import OPTIMIZERS
from cifar_zero.schedules import SCHEDULES, settled

POINTS = 2000
"""Most points of a curve: more than a figure has pixels."""


def draw_schedule(schedule: Choice, optimizer: Choice, steps: int, file: Path) -> None:
    """Draws the learning rate of each of a run's optimizer steps into a PNG file.

    Raises:
        UsageError: it cannot be written.
    """
    formula = settled(SCHEDULES[schedule.name](**schedule.options), lambda: steps)
    base_lr = OPTIMIZERS[optimizer.name](**optimizer.options).lr
    shown = range(0, steps, max(1, steps // POINTS))
    figure, axes = _figure("optimizer step", "learning rate")
    axes.plot(shown, [formula.rate(step, base_lr) for step in shown])
    axes.set_ylim(bottom=0)
    axes.set_title(f"{schedule.name}, {optimizer.name} with {base_lr:g}, {steps:,} steps")
    _save(figure, file)


def draw_range_test(
    rates: Sequence[float], losses: Sequence[float], smooth: Sequence[float], suggestion: float | None, file: Path
) -> None:
    """Draws losses, and their running mean, over learning rates into a PNG file.

    Rates and losses are of each step; `smooth` ends where the run diverges. `suggestion` is the rate to mark.

    Raises:
        UsageError: it cannot be written.
    """
    figure, axes = _figure("learning rate", "training loss")
    axes.plot(rates[: len(smooth)], losses[: len(smooth)], alpha=0.3, label="loss")
    axes.plot(rates[: len(smooth)], smooth, label="running mean")
    if suggestion is not None:
        axes.axvline(suggestion, color="black", linestyle=":", label=f"steepest fall: {suggestion:.2g}")
    axes.set_xscale("log")
    axes.legend()
    _save(figure, file)


def _figure(x_label: str, y_label: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel=x_label, ylabel=y_label)
    axes.grid(alpha=0.3)
    return figure, axes


def _save(figure: Figure, file: Path) -> None:
    try:
        figure.savefig(file, format="png", dpi=120)
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}") from error
