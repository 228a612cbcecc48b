"""ROC curves, precision-recall curves and the reliability diagram of a test: arrays in, matplotlib figures out."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

Curve = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Abscissae and ordinates, both (points,)."""

SHOWN = 5
"""With more than ten classes, this many of the best and of the worst have a colour and a name; the others are grey.
matplotlib's standard cycle has ten colours."""

GRID = np.linspace(0, 1, 501)
"""Abscissae at which the curves are drawn and their mean is taken."""

SIZE, WITH_LEGEND = (6.4, 4.8), (7.6, 4.8)
"""Inches of a figure: matplotlib's default, and with room for the names of the classes next to it."""


def roc_figure(curves: Sequence[Curve], areas: NDArray[np.float64], class_names: Sequence[str]) -> Figure:
    """Draws the receiver operating characteristic of each class against the rest, and their mean.

    Args:
        curves: false positive rates, rising, and true positive rates of each class.
        areas: (classes,) under the curves; NaN of a class that has none and is not drawn.
        class_names: by label.
    """
    title = f"ROC curves, macro AUROC {_mean(areas):.4f}"
    figure, axes = _class_curves(curves, areas, class_names, title)
    axes.plot([0, 1], [0, 1], color="black", linestyle=":", linewidth=1, label="chance")
    axes.set(xlabel="false positive rate", ylabel="true positive rate")
    _add_legend(figure, axes, "class (AUROC)")
    return figure


def precision_recall_figure(
    curves: Sequence[Curve], averages: NDArray[np.float64], class_names: Sequence[str]
) -> Figure:
    """Draws precision over recall of each class against the rest, and their mean.

    Args:
        curves: recalls, falling, and precisions of each class.
        averages: (classes,) average precisions; NaN of a class that has none and is not drawn.
        class_names: by label.
    """
    rising = [(recall[::-1], precision[::-1]) for recall, precision in curves]
    title = f"precision-recall curves, macro average precision {_mean(averages):.4f}"
    figure, axes = _class_curves(rising, averages, class_names, title)
    axes.set(xlabel="recall", ylabel="precision")
    _add_legend(figure, axes, "class (average precision)")
    return figure


def calibration_figure(totals: NDArray[np.float64], error: float) -> Figure:
    """Draws the reliability diagram of Guo et al. 2017 (https://arxiv.org/abs/1706.04599): accuracy by confidence, and
    below it how many images have that confidence.

    Args:
        totals: (bins, 3): images of each bin of confidence, the sum of their confidences, and how many are correct.
        error: the expected calibration error.
    """
    images, confidence, right = totals.T
    filled, width = images > 0, 1 / len(totals)
    centres = (np.flatnonzero(filled) + 0.5) * width
    accuracy, mean_confidence = right[filled] / images[filled], confidence[filled] / images[filled]
    figure = Figure(figsize=SIZE, layout="constrained")
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
    figure = Figure(figsize=WITH_LEGEND, layout="constrained")
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
