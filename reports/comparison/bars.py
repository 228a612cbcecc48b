"""Speed and memory of all variants, as bars below one another."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from comparison.result import Comparison, ModelStates, Spread
from reports.comparison import memory
from reports.comparison.look import ROW, WIDTH, colors, legend, name_rows
from reports.comparison.text import MISSING, number, size, unit_of_bytes

PART_COLORS = dict(zip(memory.PARTS, ("#1f6f8b", "#55a9a1", "#c9b458"), strict=True))
"""Of the model states; dark to light, so that they are told apart without colours."""


def speed_figure(comparison: Comparison) -> Figure | None:
    """Images a second, time of a step, start-up and time to the target, with the spread over seeds; or None."""
    panels = {
        "perf/images_per_second": "images per second",
        "perf/step_time_ms": "milliseconds a step",
        "perf/seconds_to_first_step": "seconds to the first step",
    }
    if comparison.target_accuracy is not None:
        panels["seconds_to_accuracy"] = f"seconds of training to {100 * comparison.target_accuracy:g} % accuracy"
    shown = {
        key: title for key, title in panels.items() if any(key in variant.figures for variant in comparison.variants)
    }
    if not shown:
        return None
    columns, rows = min(2, len(shown)), math.ceil(len(shown) / 2)
    height = rows * (ROW * len(comparison.variants) + 0.8)
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
    for axes in grid.flat[len(shown) :]:
        axes.set_axis_off()
    for axes, (key, title) in zip(grid.flat, shown.items(), strict=False):
        _bars(axes, comparison, [variant.figures.get(key) for variant in comparison.variants])
        axes.set_title(title, loc="left")
    return figure


def memory_figure(comparison: Comparison) -> Figure | None:
    """Model states of the fullest rank beside what ZeRO's formulas say, and the peak of each rank; or None."""
    states = [memory.model_states(variant) for variant in comparison.variants]
    totals = [memory.model_state_bytes(variant) for variant in comparison.variants]
    predicted = [variant.predicted for variant in comparison.variants]
    peaks = [memory.peaks(variant) for variant in comparison.variants]
    has_states, has_peaks = any(totals) or any(states) or any(predicted), any(peaks)
    if not has_states and not has_peaks:
        return None
    figure = Figure(figsize=(WIDTH, 1.45 * ROW * len(comparison.variants) + 1.3), layout="constrained")
    panels = list(figure.subplots(1, has_states + has_peaks, sharey=True, squeeze=False)[0])
    if has_states:
        _model_states(figure, panels[0], comparison, states, totals, predicted)
    if has_peaks:
        _peaks(panels[-1], comparison, peaks)
    return figure


def _bars(axes: Axes, comparison: Comparison, figures: Sequence[Spread | None]) -> None:
    palette = colors(comparison)
    for row, (variant, figure) in enumerate(zip(comparison.variants, figures, strict=True)):
        if figure is None:
            _write(axes, row, 0, MISSING)
            continue
        axes.barh(row, figure.mean, height=0.62, color=palette[variant.name])
        if figure.lowest < figure.highest:
            axes.plot([figure.lowest, figure.highest], [row, row], color="tab:gray", marker="|", linewidth=1.5)
        _write(axes, row, figure.highest, number(figure.mean))
    _finish(axes, comparison)


def _model_states(
    figure: Figure,
    axes: Axes,
    comparison: Comparison,
    states: Sequence[ModelStates | None],
    totals: Sequence[int | None],
    predicted: Sequence[ModelStates | None],
) -> None:
    unit, unit_name = unit_of_bytes(
        max([*filter(None, totals), *(memory.total(each) for each in (*states, *predicted) if each), 1])
    )
    for row, (measured, total, formula) in enumerate(zip(states, totals, predicted, strict=True)):
        above, below = (row - 0.19, row + 0.19) if formula is not None else (row, row)
        if measured is not None:
            end = _stack(axes, above, measured, unit)
        else:
            end = (total or 0) / unit
            axes.barh(above, end, height=0.34, color="tab:gray")
        known = memory.total(measured) if measured is not None else total
        _write(axes, above, end, MISSING if known is None else size(known))
        if formula is not None:
            _write(axes, below, _stack(axes, below, formula, unit, hatch="////"), size(memory.total(formula)))
    axes.set_title(f"model states of the fullest rank ({unit_name})", loc="left")
    _finish(axes, comparison)
    keys = (
        [Patch(color=color, label=part) for part, color in PART_COLORS.items()] if any(states) or any(predicted) else []
    )
    if any(measured is None and total for measured, total in zip(states, totals, strict=True)):
        keys.append(Patch(color="tab:gray", label="measured as a whole"))
    if any(predicted):
        keys.append(Patch(facecolor="none", edgecolor="tab:gray", hatch="////", label="predicted by ZeRO"))
    legend(figure, keys, [str(key.get_label()) for key in keys])


def _stack(axes: Axes, row: float, states: ModelStates, unit: float, hatch: str = "") -> float:
    """Draws the parts end to end and returns where they end; hatched ones are outlines."""
    start = 0.0
    for part, color in PART_COLORS.items():
        width = getattr(states, part) / unit
        face = "none" if hatch else color
        axes.barh(row, width, left=start, height=0.34, facecolor=face, edgecolor=color, hatch=hatch, linewidth=0.8)
        start += width
    return start


def _peaks(axes: Axes, comparison: Comparison, peaks: Sequence[Sequence[int]]) -> None:
    unit, unit_name = unit_of_bytes(max(max(ranks, default=0) for ranks in peaks))
    palette = colors(comparison)
    for row, (variant, ranks) in enumerate(zip(comparison.variants, peaks, strict=True)):
        each = 0.7 / max(len(ranks), 1)
        places = row + (np.arange(len(ranks)) - (len(ranks) - 1) / 2) * each
        axes.barh(places, np.array(ranks) / unit, height=0.86 * each, color=palette[variant.name])
        _write(axes, row, max(ranks, default=0) / unit, size(max(ranks)) if ranks else MISSING)
    axes.set_title(f"peak memory, a bar for each rank ({unit_name})", loc="left")
    _finish(axes, comparison)


def _write(axes: Axes, row: float, x: float, text: str) -> None:
    axes.annotate(text, (x, row), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)


def _finish(axes: Axes, comparison: Comparison) -> None:
    name_rows(axes, comparison)
    axes.set_xlim(0, 1.22 * axes.dataLim.x1 if axes.dataLim.x1 > 0 else 1)
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.grid(axis="x")
    axes.set_axisbelow(True)
