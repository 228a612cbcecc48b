"""Figures of a test and of the learning rate; arrays in, matplotlib figures out, drawn without display."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from cifar_zero.config.recipe import Choice
from cifar_zero.core.errors import UsageError
from cifar_zero.optimizers import OPTIMIZERS
from cifar_zero.schedules import SCHEDULES, with_total_steps

POINTS = 2000  # most points of a learning rate's curve: more than a figure has pixels

MISTAKE_ROWS, MISTAKE_COLUMNS = 4, 6  # rows and columns of the grid of mistakes

LABELLED_CLASSES = 30  # most classes whose names and counts can be read in a figure


def confusion_figure(counts: NDArray[np.int64], class_names: Sequence[str]) -> Figure:
    """Draws the confusion matrix of counts (classes, classes), true by predicted: colours are shares of a row."""
    figure = Figure(figsize=(10, 9), layout="constrained")
    axes = figure.add_subplot(xlabel="predicted", ylabel="true")
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)  # a class without images has a row of zeros
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    if len(class_names) <= LABELLED_CLASSES:
        axes.set_xticks(range(len(class_names)), class_names, rotation=45, ha="right", rotation_mode="anchor")
        axes.set_yticks(range(len(class_names)), class_names)
        for row, column in np.argwhere(counts):
            colour = "white" if shares[row, column] > 0.5 else "black"
            axes.text(column, row, f"{counts[row, column]:,}", ha="center", va="center", fontsize=8, color=colour)
    axes.set_title(f"{counts.sum():,} test images, {counts.trace() / max(counts.sum(), 1):.2%} correct")
    figure.colorbar(image, ax=axes, label="share of the true class")
    return figure


def mistakes_figure(
    images: NDArray[np.uint8],
    true: NDArray[np.int64],
    predicted: NDArray[np.int64],
    confidence: NDArray[np.float32],
    class_names: Sequence[str],
) -> Figure:
    """Draws a grid of wrongly classified images (N, 3, H, W), RGB, in the order given; the first 24 are shown. Labels
    are (N,), and so is the confidence, the probability given to the predicted class."""
    figure = Figure(figsize=(1.75 * MISTAKE_COLUMNS, 2.1 * MISTAKE_ROWS + 0.4), layout="constrained")
    figure.suptitle("most confident mistakes: true → predicted" if len(images) else "no mistakes")
    cells = list(figure.subplots(MISTAKE_ROWS, MISTAKE_COLUMNS).flat)
    for axes in cells:
        axes.set_axis_off()
    for axes, image, label, guess, share in zip(cells, images, true, predicted, confidence, strict=False):
        axes.imshow(image.transpose(1, 2, 0), interpolation="nearest")
        # Rounded down: 100 % would claim a certainty that a softmax does not have.
        percent = min(int(100 * np.nan_to_num(share)), 99)
        axes.set_title(f"{class_names[label]} →\n{class_names[guess]} {percent} %", fontsize=9)
    return figure


def curve_figure(
    curves: Sequence[tuple[Tensor, Tensor]], metrics: Tensor, class_names: Sequence[str], title: str, labels: list[str]
) -> Figure:
    """Draws a curve of each class against the rest, abscissae and ordinates from 0 to 1, but for the classes whose
    metric (classes,), which the legend has, is NaN. `labels` are those of the axes."""
    figure = Figure(figsize=(7.6, 4.8), layout="constrained")  # with room for the names of the classes
    axes = figure.add_subplot(xlabel=labels[0], ylabel=labels[1])
    axes.set_title(f"{title} {metrics.nanmean():.4f}, mean over the classes", fontsize=10)
    axes.grid(alpha=0.3)
    for (x, y), metric, name in zip(curves, metrics.tolist(), class_names, strict=True):
        if np.isfinite(metric):
            axes.plot(x.cpu(), y.cpu(), linewidth=1.2, label=f"{name} ({metric:.3f})")
    if len(class_names) <= LABELLED_CLASSES:
        figure.legend(loc="outside right center", fontsize=8)
    return figure


def draw_schedule(schedule: Choice, optimizer: Choice, steps: int, file: Path) -> None:
    """Draws the learning rate of each optimizer step into a PNG file. Raises UsageError: it cannot be written."""
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
        figure.savefig(file, format="png", dpi=120)
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}") from error
