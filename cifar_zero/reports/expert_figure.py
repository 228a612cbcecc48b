"""Which experts of each mixture see which classes: arrays in, a matplotlib figure out; drawn without a display."""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from numpy.typing import NDArray

from cifar_zero.reports.figures import LABELLED_CLASSES

CELL_WIDTH, CELL_HEIGHT = 0.4, 0.32
"""Inches of an expert and of a class: room for three digits."""

LABELLED_EXPERTS = 32
"""Most experts whose shares can be read in a panel."""

LEAST_WIDTH, UNLABELLED_HEIGHT = 1.9, 4.0
"""Inches of a panel of few experts, whose title needs them, and of one of too many classes to be read."""

ROW_WIDTH = 14.0
"""Most inches of panels beside one another."""

COLORBAR_WIDTH = 0.15
"""Inches."""


def expert_figure(counts: Sequence[NDArray[np.int64]], class_names: Sequence[str]) -> Figure:
    """A panel for each mixture; colours and numbers are shares of a class's tokens, by the expert that takes them.

    Args:
        counts: of each mixture, (classes, E): tokens of each class that went to each of its E experts.
        class_names: by label.
    """
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    labelled = len(class_names) <= LABELLED_CLASSES
    height = CELL_HEIGHT * max(len(class_names), 4) if labelled else UNLABELLED_HEIGHT
    widths = _column_widths([panel.shape[1] for panel in counts])
    rows = math.ceil(len(counts) / len(widths))
    width, height_of_all = sum(widths) + 0.3 * len(widths) + 2.0, rows * (height + 0.7) + 0.5
    figure = Figure(figsize=(width, height_of_all), layout="constrained")
    grid = figure.subplots(rows, len(widths), squeeze=False, width_ratios=widths)
    for axes in grid.flat[len(counts) :]:
        axes.set_axis_off()
    # Of many experts each takes a small share, which a linear scale would not show.
    norm = PowerNorm(0.5, vmin=0, vmax=1)
    images = [_draw(axes, panel, norm, labelled) for axes, panel in zip(grid.flat, counts, strict=False)]
    for number, (axes, panel) in enumerate(zip(grid.flat, counts, strict=False)):
        axes.set_title(f"mixture {number}: {panel.shape[1]} expert{'s' * (panel.shape[1] > 1)}", fontsize=10)
    if labelled:
        for axes in grid[:, 0]:
            axes.set_yticks(range(len(class_names)), class_names)
    else:
        figure.supylabel("class", fontsize=10)
    figure.supxlabel("expert", fontsize=10)
    figure.suptitle("experts of each class, in the test")
    colors = figure.colorbar(
        images[0],
        ax=grid,
        fraction=COLORBAR_WIDTH / width,
        aspect=height_of_all / COLORBAR_WIDTH,
        pad=0.02,
        format=lambda share, _: f"{share:.0%}",
    )
    colors.set_label("share of the class's tokens")
    colors.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    return figure


def _column_widths(experts: Sequence[int]) -> list[float]:
    """Inches of each column of a grid of panels, with as few rows as go into ROW_WIDTH and these as full as can be."""
    panels = [min(max(CELL_WIDTH * number, LEAST_WIDTH), ROW_WIDTH) for number in experts]
    columns: list[float] = []
    for rows in range(1, len(panels) + 1):
        number = math.ceil(len(panels) / rows)
        columns = [max(panels[column::number]) for column in range(number)]
        if sum(columns) <= ROW_WIDTH:
            break
    return columns


def _draw(axes: Axes, counts: NDArray[np.int64], norm: Normalize, labelled: bool) -> AxesImage:
    # A class without test images has a row of zeros.
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    image = axes.imshow(shares, cmap="Blues", norm=norm, aspect="auto", interpolation="nearest")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_yticks([])
    if counts.shape[1] <= LABELLED_EXPERTS:
        axes.set_xticks(range(counts.shape[1]))
        if labelled:
            _write_percent(axes, shares, norm)
    return image


def _write_percent(axes: Axes, shares: NDArray[np.float64], norm: Normalize) -> None:
    """The per cent of each cell; nothing where there is nothing, so that a 0 is a little."""
    for (row, column), share in np.ndenumerate(shares):
        if share:
            color = "white" if norm(share) > 0.6 else "black"
            axes.text(column, row, f"{100 * share:.0f}", ha="center", va="center", color=color, fontsize=8)
