"""Figures of a test: arrays in, matplotlib figures out; drawn without a display."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

MISTAKE_ROWS, MISTAKE_COLUMNS = 4, 6
"""Of the grid of mistakes."""

LABELLED_CLASSES = 30
"""Most classes whose names and counts can be read in a confusion matrix."""


def confusion_figure(counts: NDArray[np.int64], class_names: Sequence[str]) -> Figure:
    """The confusion matrix: colours are shares of each row, numbers are images.

    Args:
        counts: (classes, classes), true class by predicted class.
        class_names: by label.
    """
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    # A class without test images has a row of zeros.
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    labelled = len(class_names) <= LABELLED_CLASSES
    size = max(5.0, 0.62 * len(class_names)) if labelled else 9.0
    figure = Figure(figsize=(size + 1.2, size), layout="constrained")
    axes = figure.add_subplot()
    # Of many classes each takes a small share of the mistakes, which a linear scale would not show.
    image = axes.imshow(shares, cmap="Blues", norm=PowerNorm(1.0 if labelled else 0.4, vmin=0, vmax=1))
    if labelled:
        _write_counts(axes, counts, shares)
        axes.set_xticks(range(len(class_names)), class_names, rotation=45, ha="right", rotation_mode="anchor")
        axes.set_yticks(range(len(class_names)), class_names)
    axes.set_xlabel("predicted")
    axes.set_ylabel("true")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    accuracy = counts.trace() / max(counts.sum(), 1)
    axes.set_title(f"{counts.sum():,} test images, {accuracy:.2%} right")
    colors = figure.colorbar(image, ax=axes, fraction=0.046, pad=0.03, format=lambda share, _: f"{share:.0%}")
    colors.set_label("share of the true class")
    colors.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    return figure


def mistakes_figure(
    images: NDArray[np.uint8],
    true: NDArray[np.int64],
    predicted: NDArray[np.int64],
    confidence: NDArray[np.float32],
    class_names: Sequence[str],
) -> Figure:
    """A grid of wrongly classified images, in the order given.

    Args:
        images: (N, 3, H, W), RGB; the first 24 are shown.
        true: (N,) labels.
        predicted: (N,) labels.
        confidence: (N,) probability given to the predicted class.
        class_names: by label.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.75 * MISTAKE_COLUMNS, 2.1 * MISTAKE_ROWS + 0.4), layout="constrained")
    figure.suptitle("most confident mistakes: true → predicted" if len(images) else "no mistakes")
    cells = [cell for row in figure.subplots(MISTAKE_ROWS, MISTAKE_COLUMNS) for cell in row]
    for axes in cells:
        axes.set_axis_off()
    for axes, image, label, guess, share in zip(cells, images, true, predicted, confidence, strict=False):
        axes.imshow(image.transpose(1, 2, 0), interpolation="nearest")
        # Rounded down: 100 % would claim a certainty that a softmax does not have.
        percent = min(int(100 * np.nan_to_num(share)), 99)
        axes.set_title(f"{class_names[label]} →\n{class_names[guess]} {percent} %", fontsize=9)
    return figure


def _write_counts(axes: Axes, counts: NDArray[np.int64], shares: NDArray[np.float64]) -> None:
    for (row, column), count in np.ndenumerate(counts):
        if count:
            color = "white" if shares[row, column] > 0.5 else "black"
            axes.text(column, row, f"{count:,}", ha="center", va="center", color=color, fontsize=8)
