"""Figures of a test and of the learning rate; arrays in, matplotlib figures out, drawn without display."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from numpy.typing import NDArray

from cifar_zero.config.recipe import Choice
from cifar_zero.core.errors import UsageError
from cifar_zero.optimizers import OPTIMIZERS
from cifar_zero.schedules import SCHEDULES, with_total_steps

Curve = tuple[NDArray[np.float64], NDArray[np.float64]]  # abscissae and ordinates, both (points,)

SHOWN = 5
"""With more than ten classes, this many of the best and of the worst have a colour and a name; the others are grey.
matplotlib's standard cycle has ten colours."""

GRID = np.linspace(0, 1, 501)  # abscissae at which the curves are drawn and their mean is taken

POINTS = 2000  # most points of a learning rate's curve: more than a figure has pixels

MISTAKE_ROWS, MISTAKE_COLUMNS = 4, 6  # rows and columns of the grid of mistakes

LABELLED_CLASSES = 30  # most classes whose names and counts can be read in a figure

CELL_WIDTH, CELL_HEIGHT = 0.4, 0.32  # inches of an expert and of a class: room for three digits

LEAST_WIDTH, MOST_WIDTH = 1.9, 14.0  # inches of a mixture's panel, whose title needs them, and of all panels together


def confusion_figure(counts: NDArray[np.int64], class_names: Sequence[str]) -> Figure:
    """Draws the confusion matrix of counts (classes, classes), true by predicted: colours are shares of a row."""
    labelled = len(class_names) <= LABELLED_CLASSES
    size = max(5.0, 0.62 * len(class_names)) if labelled else 9.0
    figure = Figure(figsize=(size + 1.2, size), layout="constrained")
    axes = figure.add_subplot(xlabel="predicted", ylabel="true")
    image = _draw_shares(axes, _shares(counts))
    if labelled:
        _write_into_cells(axes, counts)
        axes.set_xticks(range(len(class_names)), class_names, rotation=45, ha="right", rotation_mode="anchor")
        axes.set_yticks(range(len(class_names)), class_names)
    axes.set_title(f"{counts.sum():,} test images, {counts.trace() / max(counts.sum(), 1):.2%} correct")
    figure.colorbar(image, ax=axes, label="share of the true class")
    return figure


def expert_figure(counts: Sequence[NDArray[np.int64]], class_names: Sequence[str]) -> Figure:
    """Draws a panel for each mixture of experts: colours and numbers are shares of a class's tokens, by expert. The
    counts (classes, E) of a mixture are the tokens of each class that went to each of its E experts."""
    widths = [max(CELL_WIDTH * panel.shape[1], LEAST_WIDTH) for panel in counts]
    labelled = len(class_names) <= LABELLED_CLASSES
    height = CELL_HEIGHT * max(len(class_names), 4) if labelled else 4.0
    figure = Figure(figsize=(min(sum(widths), MOST_WIDTH) + 2, height + 1.2), layout="constrained")
    row = figure.subplots(1, len(counts), squeeze=False, width_ratios=widths)[0]
    for number, (axes, panel) in enumerate(zip(row, counts, strict=True)):
        shares = _shares(panel)
        image = _draw_shares(axes, shares)
        axes.set(title=f"mixture {number}: {panel.shape[1]} experts", xlabel="expert", yticks=[])
        if labelled and sum(widths) <= MOST_WIDTH:
            _write_into_cells(axes, (100 * shares).round(), shares > 0)
            axes.set_xticks(range(panel.shape[1]))
    if labelled:
        row[0].set_yticks(range(len(class_names)), class_names)
    figure.suptitle("experts of each class, in the test")
    figure.colorbar(image, ax=row, label="share of the class's tokens")
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


def _shares(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Returns each count as a share of its row; a class without test images has a row of zeros."""
    return counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)


def _draw_shares(axes: Axes, shares: NDArray[np.float64]) -> AxesImage:
    """Draws shares (rows, columns) as colours, on a scale that shows small ones too."""
    norm = PowerNorm(0.5, vmin=0, vmax=1)
    return axes.imshow(shares, cmap="Blues", norm=norm, interpolation="nearest", aspect="auto")


def _write_into_cells(axes: Axes, numbers: NDArray, shown: NDArray | None = None) -> None:
    """Writes the numbers (rows, columns) into the cells of an image, where `shown`, by default those that are not 0."""
    for row, column in np.argwhere(numbers if shown is None else shown):
        box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.6, "pad": 1}
        axes.text(column, row, f"{numbers[row, column]:,.0f}", ha="center", va="center", fontsize=8, bbox=box)


def roc_figure(curves: Sequence[Curve], areas: NDArray[np.float64], class_names: Sequence[str]) -> Figure:
    """Draws the receiver operating characteristic of each class against the rest, and their mean. The curves are false
    positive rates, rising, and true positive rates of each class; the areas under them (classes,) are NaN for a class
    that has none and is not drawn."""
    figure = _class_curves(curves, areas, class_names, "ROC curves, macro AUROC")
    axes = figure.axes[0]
    axes.plot([0, 1], [0, 1], "k:", linewidth=1, label="chance")
    axes.set(xlabel="false positive rate", ylabel="true positive rate")
    figure.legend(loc="outside right center", fontsize=8, title="class (AUROC)")
    return figure


def precision_recall_figure(
    curves: Sequence[Curve], averages: NDArray[np.float64], class_names: Sequence[str]
) -> Figure:
    """Draws precision over recall of each class against the rest, and their mean. The curves are recalls, falling, and
    precisions of each class; average precisions (classes,) are NaN for a class that has none and is not drawn."""
    rising = [(recall[::-1], precision[::-1]) for recall, precision in curves]
    figure = _class_curves(rising, averages, class_names, "precision-recall curves, macro average precision")
    figure.axes[0].set(xlabel="recall", ylabel="precision")
    figure.legend(loc="outside right center", fontsize=8, title="class (average precision)")
    return figure


def _class_curves(
    curves: Sequence[Curve], metrics: NDArray[np.float64], class_names: Sequence[str], title: str
) -> Figure:
    """Draws the curves, each with rising abscissae, of the classes with a metric, and their mean."""
    figure = Figure(figsize=(7.6, 4.8), layout="constrained")  # with room for the names of the classes
    axes = figure.add_subplot(xlim=(-0.01, 1.01), ylim=(-0.01, 1.01))
    axes.grid(alpha=0.3)
    named = np.flatnonzero(np.isfinite(metrics)).tolist()
    if not named:
        return figure
    ordinates = [np.interp(GRID, *curve) for curve in curves]
    mean, of_mean = metrics[named].mean(), np.mean([ordinates[label] for label in named], axis=0)
    axes.set_title(f"{title} {mean:.4f}", fontsize=10)
    if len(named) > 2 * SHOWN:
        ranked = sorted(named, key=lambda label: -metrics[label])
        named, others = [*ranked[:SHOWN], *ranked[-SHOWN:]], ranked[SHOWN:-SHOWN]
        lines = axes.plot(GRID, np.stack([ordinates[label] for label in others], axis=1), "gray", alpha=0.2)
        lines[0].set_label(f"{len(others)} between")
    for label in named:
        axes.plot(GRID, ordinates[label], linewidth=1.2, label=f"{class_names[label]} ({metrics[label]:.3f})")
    axes.plot(GRID, of_mean, "k", linewidth=2, label=f"macro mean ({mean:.3f})")
    return figure


def calibration_figure(totals: NDArray[np.float64], error: float) -> Figure:
    """Draws the reliability diagram of Guo et al. 2017 (https://arxiv.org/abs/1706.04599): accuracy by confidence, and
    below it how many images have that confidence. Totals (bins, 3) are the images of each bin of confidence, the sum of
    their confidences, and how many are correct. `error` is the expected calibration error."""
    width = 1 / len(totals)
    filled = totals[:, 0] > 0
    centres = (np.flatnonzero(filled) + 0.5) * width
    images, confidence, right = totals[filled].T
    accuracy, mean_confidence = right / images, confidence / images
    figure = Figure(layout="constrained")
    axes, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    axes.bar(centres, accuracy, width, edgecolor="black", label="accuracy")
    gap = {"color": "none", "edgecolor": "tab:red", "hatch": "////", "label": "gap to the mean confidence"}
    axes.bar(centres, mean_confidence - accuracy, width, accuracy, **gap)
    axes.plot([0, 1], [0, 1], "k:", linewidth=1, label="perfect calibration")
    axes.set(xlim=(0, 1), ylim=(0, 1), ylabel="accuracy")
    means = f"mean confidence {confidence.sum() / images.sum():.2%}, accuracy {right.sum() / images.sum():.2%}"
    axes.set_title(f"calibration error (ECE) {error:.2%}: {means}", fontsize=10)
    axes.legend(loc="upper left", fontsize=8)
    below.bar(centres, images, width, color="tab:gray", edgecolor="black")
    below.set(xlabel="confidence", ylabel="images")
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
