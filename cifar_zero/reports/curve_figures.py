"""ROC curves, precision-recall curves and the reliability diagram of a test: arrays in, matplotlib figures out."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

Curve = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Abscissae and ordinates, both (points,)."""

SHOWN = 5
"""Of more than twice as many classes the worst and the best so many have a colour and a name, as matplotlib's standard
cycle has ten colours; the others are grey."""

GRID = np.linspace(0, 1, 501)
"""Abscissae at which the macro average of the curves is taken, and each curve is drawn."""

SIZE, WITH_LEGEND = (6.4, 4.8), (7.6, 4.8)
"""Inches of a figure, matplotlib's own, and with room for the classes' names beside it."""


def roc_figure(curves: Sequence[Curve], areas: NDArray[np.float64], class_names: Sequence[str]) -> Figure:
    """Receiver operating characteristics, of each class against the rest, and their mean.

    Args:
        curves: false positive rates, rising, and true positive rates of each class.
        areas: (classes,) under the curves; NaN of a class that has none and is not drawn.
        class_names: by label.
    """
    figure, axes = _axes("false positive rate", "true positive rate")
    _draw_classes(axes, [_at_grid(*curve) for curve in curves], areas, class_names)
    axes.plot([0, 1], [0, 1], color="black", linestyle=":", linewidth=1, label="chance")
    _finish(figure, axes, f"ROC curves, macro AUROC {_mean(areas):.4f}", "class (AUROC)")
    return figure


def precision_recall_figure(
    curves: Sequence[Curve], averages: NDArray[np.float64], class_names: Sequence[str]
) -> Figure:
    """Precision against recall, of each class against the rest, and their mean.

    Args:
        curves: recalls, falling, and precisions of each class.
        averages: (classes,) average precisions; NaN of a class that has none and is not drawn.
        class_names: by label.
    """
    figure, axes = _axes("recall", "precision")
    at_grid = [_at_grid(recall[::-1], precision[::-1]) for recall, precision in curves]
    _draw_classes(axes, at_grid, averages, class_names)
    title = f"precision-recall curves, macro average precision {_mean(averages):.4f}"
    _finish(figure, axes, title, "class (average precision)")
    return figure


def calibration_figure(totals: NDArray[np.float64], error: float) -> Figure:
    """The reliability diagram of Guo et al. 2017 (https://arxiv.org/abs/1706.04599): accuracy by confidence, and below
    how many images have that confidence.

    Args:
        totals: (bins, 3): images of each bin of confidence, the sum of their confidences, and how many are right.
        error: the expected calibration error.
    """
    from matplotlib.figure import Figure

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
    axes.set_title(
        f"calibration error (ECE) {error:.2%}: mean confidence {_share(confidence, images)}, accuracy "
        f"{_share(right, images)}",
        fontsize=10,
    )
    axes.legend(loc="upper left", fontsize=8, frameon=False)
    below.bar(centres, images[filled], color="tab:gray", **bars)
    below.set(xlabel="confidence", ylabel="images")
    for panel in (axes, below):
        panel.spines[["top", "right"]].set_visible(False)
    return figure


def _axes(x_name: str, y_name: str) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=WITH_LEGEND, layout="constrained")
    axes = figure.add_subplot()
    axes.set(xlabel=x_name, ylabel=y_name, xlim=(-0.01, 1.01), ylim=(-0.01, 1.01))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    return figure, axes


def _draw_classes(
    axes: Axes, ordinates: Sequence[NDArray[np.float64]], figures: NDArray[np.float64], class_names: Sequence[str]
) -> None:
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


def _finish(figure: Figure, axes: Axes, title: str, legend: str) -> None:
    axes.set_title(title, fontsize=10)
    figure.legend(
        *axes.get_legend_handles_labels(), loc="outside right center", fontsize=8, title=legend, frameon=False
    )


def _at_grid(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.interp(GRID, x, y)


def _mean(figures: NDArray[np.float64]) -> float:
    return float(np.nanmean(figures)) if np.isfinite(figures).any() else float("nan")


def _share(part: NDArray[np.float64], images: NDArray[np.float64]) -> str:
    return f"{part.sum() / images.sum():.2%}"
