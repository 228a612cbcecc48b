"""Figures of a test that show images or counts by class: arrays in, matplotlib figures out; drawn without a display."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from numpy.typing import NDArray

MISTAKE_ROWS, MISTAKE_COLUMNS = 4, 6
"""Rows and columns of the grid of mistakes."""

LABELLED_CLASSES = 30
"""Most classes whose names and counts can be read in a figure."""

CELL_WIDTH, CELL_HEIGHT = 0.4, 0.32
"""Inches of an expert and of a class: room for three digits."""

LEAST_WIDTH, MOST_WIDTH = 1.9, 14.0
"""Inches of a mixture's panel, whose title needs them, and of all panels together."""


def confusion_figure(counts: NDArray[np.int64], class_names: Sequence[str]) -> Figure:
    """Draws the confusion matrix: colours are shares of each row, numbers are images.

    Args:
        counts: (classes, classes), true class by predicted class.
        class_names: by label.
    """
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
    """Draws a panel for each mixture of experts: colours and numbers are shares of a class's tokens, by expert.

    Args:
        counts: of each mixture, (classes, E): tokens of each class that went to each of its E experts.
        class_names: by label.
    """
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
    """Draws a grid of wrongly classified images, in the order given.

    Args:
        images: (N, 3, H, W), RGB; the first 24 are shown.
        true: (N,) labels.
        predicted: (N,) labels.
        confidence: (N,) probability given to the predicted class.
        class_names: by label.
    """
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
