"""Plots the losses of all variants of a comparison, and how far they are from the reference's losses."""

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter
from numpy.typing import NDArray

from cifar_zero.comparison.result import Comparison

STYLE: dict[Any, Any] = {"font.size": 9, "axes.grid": True, "grid.alpha": 0.3, "text.parse_math": False}
"""matplotlib's options for the plots. Mathematical notation is not parsed, so that a $ in a name stays a $."""

REFERENCE: dict[str, Any] = {"color": "black", "alpha": 0.2, "linewidth": 7}  # drawn under the other curves

PALETTE = ("#3f90da", "#ffa90e", "#bd1f01", "#832db6", "#a96b59", "#e76300", "#b9ac70", "#92dadd")
"""Eight colours that colour-blind readers can distinguish, from Petroff 2021 (https://arxiv.org/abs/2107.02270). The
two greys of that palette are left out, because they cannot be seen on the grey line of the reference."""

POINTS = 200  # largest number of points of a curve; with more steps, a point is the mean of several, to reduce noise
DASH = 4.0  # length of a dash, in line widths

Array = NDArray[np.float64]
Line = tuple[str, Array, Array]  # the variant's name, x (points,) and y (points,); NaN is a gap


def write_plot(comparison: Comparison, file: Path) -> None:
    """Writes the plot of the losses, unless no variant has a run."""
    if any(variant.run for variant in comparison.variants):
        with matplotlib.rc_context(STYLE):
            loss_plot(comparison).savefig(file, dpi=120)


def loss_plot(comparison: Comparison) -> Figure:
    """Returns a plot of the loss of each run by step and, below it, of the absolute difference from the reference's
    loss on a logarithmic scale. If no run differs, the second plot is left out. At least one variant must have a
    run."""
    runs = {variant.name: variant.run for variant in comparison.variants if variant.run}
    expected = comparison.reference.run.losses if comparison.reference.run else {}
    size = math.ceil(max(len(run.losses) for run in runs.values()) / POINTS)
    losses: list[Line] = []
    differences: list[Line] = []
    for name, run in runs.items():
        losses.append((name, *_points(run.losses, size)))
        errors = {step: abs(loss - expected[step]) for step, loss in run.losses.items() if step in expected}
        steps, difference = _points(errors, size)
        if (difference > 0).any():
            differences.append((name, steps, np.where(difference > 0, difference, np.nan)))
    several = f", mean of {size:,} steps" if size > 1 else ""
    figure = Figure(figsize=(10, 6.5 if differences else 4.4), layout="constrained")
    above, *below = figure.subplots(2 if differences else 1, sharex=True, squeeze=False)[:, 0]
    _draw(above, comparison, losses)
    above.set(ylabel=f"training loss{several}")
    above.set_title(textwrap.fill(comparison.headline, 110), weight="bold")
    for axes in below:
        _draw(axes, comparison, differences, marker=".")
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(LogFormatter())  # 1e-05: default labels are math, which is not parsed
        axes.set_title(f"difference from {comparison.reference.name} (grows by rounding, and is not judged)")
        axes.set(ylabel=f"difference of the loss{several}")
    figure.axes[-1].set_xlabel(f"optimizer step ({next(iter(runs.values())).settings['batch_size']} images each)")
    figure.legend(*above.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


def _draw(axes: Axes, comparison: Comparison, lines: Sequence[Line], marker: str = "") -> None:
    """Draws the reference's wide line, and thin lines over it. Because equal lines would hide one another, several thin
    lines are each drawn again as dashes, with gaps for the dashes of the other lines."""
    outcomes = {variant.name: variant.outcome for variant in comparison.variants}
    names = [name for name, _, _ in lines if name != comparison.reference.name]
    for name, x, y in lines:
        label = f"{name} ({outcomes[name]})"
        axes.plot(x, y, label=label, marker=marker, markersize=3, **_style(comparison, name))
    for name, x, y in lines if len(names) > 1 else ():
        if name in names:
            dashes = (DASH * (len(names) - names.index(name)), (DASH, DASH * (len(names) - 1)))
            axes.plot(x, y, linestyle=dashes, **_style(comparison, name))


def _points(losses: Mapping[int, float], size: int) -> tuple[Array, Array]:
    """Returns x and y of a curve. Each point is the mean of `size` consecutive steps and of their losses."""
    x, y = _array(losses.keys()), _array(losses.values())
    starts = range(0, len(losses), size)
    return _array(x[i : i + size].mean() for i in starts), _array(y[i : i + size].mean() for i in starts)


def _array(values: Iterable[float]) -> Array:
    """Returns an array with NaN in place of infinity, because NaN is not drawn."""
    array = np.array([*values], dtype=np.float64)
    return np.where(np.isfinite(array), array, np.nan)


def _style(comparison: Comparison, name: str) -> dict[str, Any]:
    number = [variant.name for variant in comparison.variants].index(name)
    return {"color": PALETTE[(number - 1) % len(PALETTE)], "linewidth": 1.5} if number else REFERENCE
