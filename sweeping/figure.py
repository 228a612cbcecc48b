"""The metric against each parameter, every run a dot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sweeping.planned import short
from sweeping.result import Result
from sweeping.space import Range, Space, Values

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANEL_INCHES = (3.6, 3.4)
COLUMNS = 4
"""Most panels beside one another."""


def draw(results: Sequence[Result], space: Space, metric: str, file: Path) -> None:
    """Draws the finished settings; the line is the mean over the seeds, in a grid over all other options too.

    Args:
        results: of the sweep.
        space: that was searched.
        metric: of the ordinate.
        file: the PNG file to write.
    """
    from matplotlib.figure import Figure

    finished = [result for result in results if result.state == "finished"]
    if not finished or not space.parameters:
        return
    columns = min(COLUMNS, len(space.parameters))
    rows = -(-len(space.parameters) // columns)
    size = (PANEL_INCHES[0] * columns, PANEL_INCHES[1] * rows)
    figure = Figure(figsize=size, layout="constrained")
    for place, parameter in enumerate(space.parameters, start=1):
        axes = figure.add_subplot(rows, columns, place)
        _panel(axes, finished, parameter)
        axes.set_xlabel(parameter.name)
        axes.set_ylabel(metric)
        axes.grid(alpha=0.3)
    figure.savefig(file, dpi=150)


def _panel(axes: Axes, finished: Sequence[Result], parameter: Values | Range) -> None:
    values = [result.setting[parameter.name] for result in finished]
    if isinstance(parameter, Range):
        places = [float(value) for value in values]
        axes.set_xscale("log" if parameter.log else "linear")
    else:
        places = [float(parameter.values.index(value)) for value in values]
        axes.set_xticks(range(len(parameter.values)), [short(value) for value in parameter.values])
        axes.margins(x=0.15)
        groups = {
            place: [result.mean for result, at in zip(finished, places, strict=True) if at == place] for place in places
        }
        means = [(place, sum(group) / len(group)) for place, group in sorted(groups.items())]
        axes.plot(*zip(*means, strict=True), color="C0", alpha=0.5)
    dots = [(place, run.value) for place, result in zip(places, finished, strict=True) for run in result.runs]
    axes.plot(*zip(*dots, strict=True), "o", color="C0", alpha=0.7, markersize=4)
