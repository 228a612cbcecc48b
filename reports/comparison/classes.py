"""The accuracy of each class under all variants, side by side."""

from __future__ import annotations

import math

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from numpy.typing import NDArray

from comparison.result import Comparison, Variant
from reports.comparison.look import WIDTH
from reports.comparison.text import MISSING

FEW = 30
"""Classes that stand below one another in one block; more stand in several, side by side and without decimals."""

ROW_HEIGHT = 0.24
"""Inches of a class."""

NAME_WIDTH, CELL_WIDTH = 1.3, 0.3
"""Inches of a class's name, and of a number without decimals."""

HORIZONTAL = 4
"""Most variants whose names have room beside one another."""

LEAST_SCALE = 0.01
"""Difference that has the strongest colour where all are smaller: a percentage point, or noise would look like much."""


def class_figure(comparison: Comparison) -> Figure | None:
    """Numbers are accuracies in per cent, mean over the seeds; colours are differences to the reference, none where it
    was not tested. None where no variant was.
    """
    found = {variant.name: accuracies for variant in comparison.variants if (accuracies := _of_classes(variant))}
    if not found:
        return None
    classes = list(dict.fromkeys(name for accuracies in found.values() for name in accuracies))
    table = np.array([[accuracies.get(name, np.nan) for accuracies in found.values()] for name in classes])
    names = list(found)
    tested = comparison.reference in names
    difference = table - table[:, [names.index(comparison.reference)]] if tested else np.zeros_like(table)
    blocks = 1
    if len(classes) > FEW:
        room = int(WIDTH / (NAME_WIDTH + CELL_WIDTH * len(names)))
        blocks = max(1, min(math.ceil(len(classes) / 10), room))
    rows = math.ceil(len(classes) / blocks)
    upright = blocks > 1 or len(names) > HORIZONTAL
    longest = max(map(len, names))
    figure = Figure(
        figsize=(WIDTH, ROW_HEIGHT * rows + (0.075 * longest if upright else 0.2) + 0.8), layout="constrained"
    )
    panels = figure.subplots(1, blocks, squeeze=False)[0]
    largest = float(np.nanmax(np.abs(difference), initial=0, where=np.isfinite(difference)))
    strongest = max(LEAST_SCALE, largest)
    norm = Normalize(-1.2 * strongest, 1.2 * strongest)  # without the ends of the scale, which are nearly black
    for number, axes in enumerate(panels):
        part = slice(number * rows, (number + 1) * rows)
        _draw(axes, table[part], difference[part], norm, decimals=1 if blocks == 1 else 0)
        axes.set_yticks(range(len(classes[part])), classes[part])
        axes.set_ylim(rows - 0.5, -0.5)
        axes.set_xticks(range(len(names)), names, rotation=90 if upright else 0)
    colored = (
        f"{comparison.reference} was not tested"
        if not tested
        else f"no class differs from {comparison.reference}"
        if not largest
        else f"blue above {comparison.reference}, red below, by {100 * largest:.2g} percentage points at most"
    )
    figure.supxlabel(f"accuracy in the test (%); {colored}", fontsize=9)
    return figure


def _draw(
    axes: Axes, accuracies: NDArray[np.float64], difference: NDArray[np.float64], norm: Normalize, decimals: int
) -> None:
    image = axes.imshow(difference, norm=norm, aspect="auto", interpolation="nearest")
    for (row, column), accuracy in np.ndenumerate(accuracies):
        text = f"{100 * accuracy:.{decimals}f}" if np.isfinite(accuracy) else MISSING
        color = _ink_on(np.asarray(image.to_rgba(difference[row, column])))
        axes.text(column, row, text, ha="center", va="center", fontsize=7.5, color=color)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _ink_on(rgba: NDArray[np.float64]) -> str:
    """Black or white, by the brightness of the colour (ITU-R BT.601); the text's where there is none."""
    red, green, blue, opacity = rgba
    if not opacity:
        return matplotlib.rcParams["text.color"]
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"


def _of_classes(variant: Variant) -> dict[str, float]:
    """Mean over the seeds; a class without test images has none."""
    runs = [run.metrics.get("test/acc_per_class") or {} for run in variant.runs]
    names = dict.fromkeys(name for run in runs for name, value in run.items() if value is not None)
    return {name: float(np.mean([run[name] for run in runs if run.get(name) is not None])) for name in names}
