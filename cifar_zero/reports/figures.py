"""Figures of a test and of the learning rate; arrays in, matplotlib figures out, drawn without display."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
    axes = figure.add_subplot()
    # With many classes each takes a small share of the mistakes, which a linear scale would not show.
    shares = _shares(counts)
    image = _draw_shares(axes, shares, 1.0 if labelled else 0.4, [f"{n:,}" for n in counts.flat] if labelled else [])
    if labelled:
        axes.set_xticks(range(len(class_names)), class_names, rotation=45, ha="right", rotation_mode="anchor")
        axes.set_yticks(range(len(class_names)), class_names)
    axes.set(xlabel="predicted", ylabel="true")
    accuracy = counts.trace() / max(counts.sum(), 1)
    axes.set_title(f"{counts.sum():,} test images, {accuracy:.2%} correct")
    _add_colorbar(figure, image, axes, "share of the true class")
    return figure


def expert_figure(counts: Sequence[NDArray[np.int64]], class_names: Sequence[str]) -> Figure:
    """Draws a panel for each mixture of experts: colours and numbers are shares of a class's tokens, by expert. The
    counts (classes, E) of a mixture are the tokens of each class that went to each of its E experts."""
    widths = [max(CELL_WIDTH * panel.shape[1], LEAST_WIDTH) for panel in counts]
    labelled = len(class_names) <= LABELLED_CLASSES
    readable = labelled and sum(widths) <= MOST_WIDTH
    height = CELL_HEIGHT * max(len(class_names), 4) if labelled else 4.0
    figure = Figure(figsize=(min(sum(widths), MOST_WIDTH) + 2, height + 1.2), layout="constrained")
    row = figure.subplots(1, len(counts), squeeze=False, width_ratios=widths)[0]
    for number, (axes, panel) in enumerate(zip(row, counts, strict=True)):
        shares = _shares(panel)
        image = _draw_shares(axes, shares, 0.5, [f"{100 * share:.0f}" for share in shares.flat] if readable else [])
        axes.set_aspect("auto")
        axes.set_title(f"mixture {number}: {panel.shape[1]} expert{'s' * (panel.shape[1] > 1)}", fontsize=10)
        axes.set_yticks([])
        if readable:
            axes.set_xticks(range(panel.shape[1]))
    if labelled:
        row[0].set_yticks(range(len(class_names)), class_names)
    figure.supxlabel("expert", fontsize=10)
    figure.suptitle("experts of each class, in the test")
    _add_colorbar(figure, image, row, "share of the class's tokens")
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


def _draw_shares(axes: Axes, shares: NDArray[np.float64], power: float, texts: Sequence[str]) -> AxesImage:
    """Draws shares (rows, columns) as colours, with a text in each cell that is not 0."""
    norm = PowerNorm(power, vmin=0, vmax=1)
    image = axes.imshow(shares, cmap="Blues", norm=norm, interpolation="nearest")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    for ((row, column), share), text in zip(np.ndenumerate(shares), texts, strict=False):
        if share:
            color = "white" if norm(share) > 0.55 else "black"
            axes.text(column, row, text, ha="center", va="center", color=color, fontsize=8)
    return image


def _add_colorbar(figure: Figure, image: AxesImage, axes: Any, label: str) -> None:
    colors = figure.colorbar(image, ax=axes, fraction=0.046, pad=0.03, format=lambda share, _: f"{share:.0%}")
    colors.set_label(label)
    colors.outline.set_visible(False)  # pyright: ignore[reportCallIssue]


def roc_figure(curves: Sequence[Curve], areas: NDArray[np.float64], class_names: Sequence[str]) -> Figure:
    """Draws the receiver operating characteristic of each class against the rest, and their mean. The curves are false
    positive rates, rising, and true positive rates of each class; the areas under them (classes,) are NaN for a class
    that has none and is not drawn."""
    title = f"ROC curves, macro AUROC {_mean(areas):.4f}"
    figure, axes = _class_curves(curves, areas, class_names, title)
    axes.plot([0, 1], [0, 1], color="black", linestyle=":", linewidth=1, label="chance")
    axes.set(xlabel="false positive rate", ylabel="true positive rate")
    _add_legend(figure, axes, "class (AUROC)")
    return figure


def precision_recall_figure(
    curves: Sequence[Curve], averages: NDArray[np.float64], class_names: Sequence[str]
) -> Figure:
    """Draws precision over recall of each class against the rest, and their mean. The curves are recalls, falling, and
    precisions of each class; average precisions (classes,) are NaN for a class that has none and is not drawn."""
    rising = [(recall[::-1], precision[::-1]) for recall, precision in curves]
    title = f"precision-recall curves, macro average precision {_mean(averages):.4f}"
    figure, axes = _class_curves(rising, averages, class_names, title)
    axes.set(xlabel="recall", ylabel="precision")
    _add_legend(figure, axes, "class (average precision)")
    return figure


def calibration_figure(totals: NDArray[np.float64], error: float) -> Figure:
    """Draws the reliability diagram of Guo et al. 2017 (https://arxiv.org/abs/1706.04599): accuracy by confidence, and
    below it how many images have that confidence. Totals (bins, 3) are the images of each bin of confidence, the sum of
    their confidences, and how many are correct. `error` is the expected calibration error."""
    images, confidence, right = totals.T
    filled, width = images > 0, 1 / len(totals)
    centres = (np.flatnonzero(filled) + 0.5) * width
    accuracy, mean_confidence = right[filled] / images[filled], confidence[filled] / images[filled]
    figure = Figure(layout="constrained")
    axes, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    bars = {"width": width, "edgecolor": "black", "linewidth": 0.6}
    axes.bar(centres, accuracy, color="tab:blue", label="accuracy", **bars)
    gap = {**bars, "color": "none", "edgecolor": "tab:red", "hatch": "////"}
    axes.bar(centres, mean_confidence - accuracy, bottom=accuracy, label="gap to the mean confidence", **gap)
    axes.plot([0, 1], [0, 1], color="black", linestyle=":", linewidth=1, label="perfect calibration")
    axes.set(xlim=(0, 1), ylim=(0, 1), ylabel="accuracy")
    means = f"mean confidence {confidence.sum() / images.sum():.2%}, accuracy {right.sum() / images.sum():.2%}"
    axes.set_title(f"calibration error (ECE) {error:.2%}: {means}", fontsize=10)
    axes.legend(loc="upper left", fontsize=8, frameon=False)
    below.bar(centres, images[filled], color="tab:gray", **bars)
    below.set(xlabel="confidence", ylabel="images")
    for panel in (axes, below):
        panel.spines[["top", "right"]].set_visible(False)
    return figure


def _class_curves(
    curves: Sequence[Curve], figures: NDArray[np.float64], class_names: Sequence[str], title: str
) -> tuple[Figure, Axes]:
    """Draws the curves, each with rising abscissae, of the classes with a figure, and their mean."""
    figure = Figure(figsize=(7.6, 4.8), layout="constrained")  # with room for the names of the classes
    axes = figure.add_subplot(xlim=(-0.01, 1.01), ylim=(-0.01, 1.01))
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    ordinates = [np.interp(GRID, *curve) for curve in curves]
    drawn: list[int] = np.flatnonzero(np.isfinite(figures)).tolist()
    named, others = drawn, []
    if len(drawn) > 2 * SHOWN:
        ranked = sorted(drawn, key=lambda label: -figures[label])
        named, others = [*ranked[:SHOWN], *ranked[-SHOWN:]], ranked[SHOWN:-SHOWN]
    for label in others:
        axes.plot(GRID, ordinates[label], color="tab:gray", linewidth=0.5, alpha=0.3)
    for place, label in enumerate(named):
        name = f"{class_names[label]} ({figures[label]:.3f})"
        axes.plot(GRID, ordinates[label], color=f"C{place}", linewidth=1.2, label=name)
        if others and place == SHOWN - 1:
            axes.plot([], [], color="tab:gray", linewidth=0.5, label=f"{len(others)} between")
    if drawn:
        mean = np.mean([ordinates[label] for label in drawn], axis=0)
        axes.plot(GRID, mean, color="black", linewidth=2, label=f"macro mean ({_mean(figures):.3f})")
    return figure, axes


def _add_legend(figure: Figure, axes: Axes, title: str) -> None:
    handles = axes.get_legend_handles_labels()
    figure.legend(*handles, loc="outside right center", fontsize=8, title=title, frameon=False)


def _mean(figures: NDArray[np.float64]) -> float:
    return float(np.nanmean(figures)) if np.isfinite(figures).any() else float("nan")


def draw_schedule(schedule: Choice, optimizer: Choice, steps: int, file: Path) -> None:
    """Draws the learning rate of each optimizer step into a PNG file. Raises UsageError: it cannot be written."""
    formula = with_total_steps(SCHEDULES[schedule.name](**schedule.options), lambda: steps)
    base_lr = OPTIMIZERS[optimizer.name](**optimizer.options).lr
    shown = range(0, steps, max(1, steps // POINTS))
    with _drawn(file, "optimizer step", "learning rate") as axes:
        axes.plot(shown, [formula.rate(step, base_lr) for step in shown])
        axes.set_ylim(bottom=0)
        axes.set_title(f"{schedule.name}, {optimizer.name} with {base_lr:g}, {steps:,} steps")


@contextmanager
def _drawn(file: Path, x_label: str, y_label: str) -> Iterator[Axes]:
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel=x_label, ylabel=y_label)
    axes.grid(alpha=0.3)
    yield axes
    try:
        figure.savefig(file, format="png", dpi=120)
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}") from error
