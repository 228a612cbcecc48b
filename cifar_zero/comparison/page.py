"""Writes the report of a comparison as report.html, which includes the plots, and also writes the plots as image files.
Each plot draws the curves of all variants in the same axes."""

import base64
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from jinja2 import StrictUndefined, Template
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogFormatter
from numpy.typing import NDArray

from cifar_zero.comparison import report
from cifar_zero.comparison.result import Comparison, Curve

STYLE: dict[Any, Any] = {"font.size": 9, "axes.grid": True, "grid.alpha": 0.3, "text.parse_math": False}
"""matplotlib's options for the plots. Mathematical notation is not parsed, so that a $ in a name stays a $."""

REFERENCE: dict[str, Any] = {"color": "black", "alpha": 0.2, "linewidth": 7}
"""Style of the reference's curve, which is drawn under the other curves."""

PALETTE = ("#3f90da", "#ffa90e", "#bd1f01", "#832db6", "#a96b59", "#e76300", "#b9ac70", "#92dadd")
"""Eight colours that colour-blind readers can distinguish, from Petroff 2021 (https://arxiv.org/abs/2107.02270). The
two greys of that palette are left out, because they cannot be seen on the grey line of the reference."""

POINTS = 200  # largest number of points of a curve; with more steps, a point is the mean of several, to reduce noise
DASH = 4.0  # length of a dash, in line widths

Array = NDArray[np.float64]
Line = tuple[str, Array, Array]  # the variant's name, x (points,) and y (points,); NaN is a gap


def write_page(comparison: Comparison, folder: Path) -> None:
    """Writes the report of a comparison into an existing folder. Sections without content are left out."""
    with matplotlib.rc_context(STYLE):
        drawn: dict[str, Figure | None] = {}
        if any(variant.runs for variant in comparison.variants):
            drawn = {"losses.png": loss_plot(comparison), "accuracy.png": accuracy_plot(comparison)}
        plots: dict[str, str] = {}
        for name, figure in drawn.items():
            if figure is not None:
                figure.savefig(folder / name, dpi=120)  # legible on high-density screens, in a page of 250 kB
                plots[name] = base64.b64encode((folder / name).read_bytes()).decode()
    sections = (
        ("Loss", "losses.png", {}),
        ("Accuracy", "accuracy.png", report.figures(comparison, report.ACCURACY)),
        ("Speed", "", report.figures(comparison, report.SPEED)),
        ("Memory of the fullest rank", "", report.figures(comparison, report.MEMORY)),
        ("Settings in effect", "", report.settings(comparison) if plots else None),
    )
    text = Path(__file__).with_name("report.html.j2").read_text()
    template = Template(text, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    page = template.render(comparison=comparison, sections=sections, plots=plots, zip=zip)
    (folder / "report.html").write_text(page, encoding="utf-8")


def loss_plot(comparison: Comparison) -> Figure:
    """Plots the loss of each run by step. Below it, plots the difference of this loss from the loss of the reference's
    run with the same seed. At least one variant must have a run."""
    by_seed = comparison.reference.by_seed
    most = max(len(run.losses.steps) for variant in comparison.variants for run in variant.runs)
    size = math.ceil(most / POINTS)
    losses: list[Line] = []
    differences: list[Line] = []
    for variant in comparison.variants:
        for run in variant.runs:
            losses.append((variant.name, *_points(run.losses, size)))
            if run.seed in by_seed:
                steps, difference = _points(by_seed[run.seed].losses.difference(run.losses), size)
                if (difference > 0).any():
                    differences.append((variant.name, steps, np.where(difference > 0, difference, np.nan)))
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
    figure.axes[-1].set_xlabel(f"optimizer step ({comparison.recipe.get('batch_size')} images each)")
    labels = {each.name: f"{each.name} ({each.outcome})" for each in comparison.variants if each.runs}
    _legend(figure, comparison, labels)
    return figure


def accuracy_plot(comparison: Comparison) -> Figure | None:
    """Plots the validation accuracy by step and by time, with one line per seed. Returns None if no run was
    validated."""
    steps: list[Line] = []
    seconds: list[Line] = []
    for variant in comparison.variants:
        for run in variant.runs:
            if curve := run.curves.get("val/acc"):
                steps.append((variant.name, _array(curve.steps), _array(curve.values)))
                seconds.append((variant.name, _array(curve.seconds), _array(curve.values)))
    if not steps:
        return None
    figure = Figure(figsize=(10, 4), layout="constrained")
    by_step, by_time = figure.subplots(1, 2, sharey=True)
    _draw(by_step, comparison, steps, "o")
    _draw(by_time, comparison, seconds, "o")
    by_step.set(xlabel="optimizer step", ylabel="validation accuracy")
    by_step.yaxis.set_major_formatter(lambda share, _: f"{100 * share:g} %")
    by_time.set_xlabel("seconds since the start of the training")
    _legend(figure, comparison, {name: name for name, _, _ in steps})
    return figure


def _draw(axes: Axes, comparison: Comparison, lines: Sequence[Line], marker: str = "") -> None:
    """Draws thin lines over the reference's line. Equal lines would hide one another. If there are several lines, each
    is therefore drawn a second time as dashes, with gaps for the dashes of the other lines."""
    names = [*dict.fromkeys(name for name, _, _ in lines if name != comparison.reference.name)]
    for name, x, y in lines:
        axes.plot(x, y, marker=marker, markersize=3, **_style(comparison, name))
    for name, x, y in lines if len(names) > 1 else ():
        if name in names:
            dashes = (DASH * (len(names) - names.index(name)), (DASH, DASH * (len(names) - 1)))
            axes.plot(x, y, linestyle=dashes, **_style(comparison, name))


def _points(curve: Curve, size: int) -> tuple[Array, Array]:
    """Returns x and y of a curve with one point for every `size` steps. The point is the mean of these steps and of
    their values."""
    return _means(curve.steps, size), _means(curve.values, size)


def _means(values: Sequence[float], size: int) -> Array:
    array = _array(values)
    return np.array([array[start : start + size].mean() for start in range(0, len(array), size)])


def _array(values: Sequence[float]) -> Array:
    """Returns an array with NaN in place of infinity, because NaN is not drawn."""
    array = np.asarray(values, dtype=np.float64)
    return np.where(np.isfinite(array), array, np.nan)


def _style(comparison: Comparison, name: str) -> dict[str, Any]:
    """Returns colour and width of a variant's lines, which are the same in all plots."""
    place = [variant.name for variant in comparison.variants].index(name)
    return {"color": PALETTE[(place - 1) % len(PALETTE)], "linewidth": 1.5} if place else REFERENCE


def _legend(figure: Figure, comparison: Comparison, labels: dict[str, str]) -> None:
    """Draws the legend below the figure. `labels` gives the text of each variant by its name."""
    handles = [Line2D([], [], label=label, **_style(comparison, name)) for name, label in labels.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=2)
