"""Loss and accuracy of all variants over one another."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from comparison.result import Comparison, Curve, Run, Variant
from reports.comparison.look import WIDTH, colors, legend, log_scale, markers
from reports.comparison.text import kind_of

POINTS = 200
"""Most points of a curve of losses: of more steps each point is that of several, or noise would hide the curves."""

DASH = 4.0
"""Length of a dash in widths of the line."""

SEVERAL_DECADES = 100.0
"""A loss that falls by more than this factor is drawn on a log axis."""


@dataclass
class _Line:
    """Of one variant."""

    name: str
    x: NDArray[np.float64]
    y: NDArray[np.float64]


def loss_figure(comparison: Comparison) -> Figure | None:
    """The loss of each step, mean over the seeds, and below how far each variant is from the reference.

    None where no run has losses.
    """
    trained = [variant for variant in comparison.variants if any(run.losses.steps for run in variant.runs)]
    if not trained:
        return None
    differences = [line for variant in trained if (line := _difference(comparison, variant)) is not None]
    figure = Figure(figsize=(WIDTH, (5.9 if differences else 3.8) + 0.15 * len(trained)), layout="constrained")
    panels = figure.subplots(2 if differences else 1, 1, sharex=True, squeeze=False)[:, 0]
    _draw_losses(panels[0], comparison, trained)
    if differences:
        _draw_differences(panels[1], comparison, differences)
    panels[-1].set_xlabel("optimizer step")
    verdicts = {variant.name: kind_of(variant) for variant in trained}
    handles, names = panels[0].get_legend_handles_labels()
    legend(figure, handles, [name if verdicts[name] is None else f"{name} ({verdicts[name]})" for name in names])
    return figure


def accuracy_figure(comparison: Comparison) -> Figure | None:
    """The accuracy of each validation, a line for each seed, by step and by time; None where there was none."""
    runs = [
        (variant.name, run.curves["val/acc"])
        for variant in comparison.variants
        for run in variant.runs
        if "val/acc" in run.curves
    ]
    runs = [(name, curve) for name, curve in runs if curve.steps]
    if not runs:
        return None
    by_step = [_Line(name, _array(curve.steps), _array(curve.values)) for name, curve in runs]
    by_time = [_Line(name, _array(curve.seconds), _array(curve.values)) for name, curve in runs if curve.seconds]
    figure = Figure(figsize=(WIDTH, 4.0), layout="constrained")
    panels = figure.subplots(1, 2 if by_time else 1, sharey=True, squeeze=False)[0]
    _draw_over_one_another(panels[0], comparison, by_step, marker="o")
    panels[0].set(xlabel="optimizer step", ylabel="validation accuracy")
    panels[0].yaxis.set_major_formatter(lambda share, _: f"{100 * share:g} %")
    if by_time:
        _draw_over_one_another(panels[1], comparison, by_time, marker="o")
        panels[1].set(xlabel="seconds since the start of the training")
    for axes in panels:
        axes.grid()
        if comparison.target_accuracy is not None:
            axes.axhline(comparison.target_accuracy, color="tab:gray", linestyle=":", linewidth=1, zorder=0)
            label = f"target {100 * comparison.target_accuracy:g} %"
            axes.annotate(
                label,
                (1, comparison.target_accuracy),
                xycoords=("axes fraction", "data"),
                xytext=(0, 2),
                textcoords="offset points",
                ha="right",
                fontsize=8,
            )
    names = dict(zip(*reversed(panels[0].get_legend_handles_labels()), strict=True))
    legend(figure, list(names.values()), list(names))
    return figure


def _draw_losses(axes: Axes, comparison: Comparison, variants: Sequence[Variant]) -> None:
    lines, steps_a_point = [], 1
    for variant in variants:
        steps, values = _over_seeds([run.losses for run in variant.runs])
        steps_a_point = max(steps_a_point, math.ceil(len(steps) / POINTS))
        # Of the seeds that have the step: one may have ended before the others.
        x, mean = _points(steps, np.ma.masked_invalid(values).mean(axis=0).filled(np.nan), np.mean)
        lines.append(_Line(variant.name, x, mean))
        if len(values) > 1:
            low, high = (_points(steps, edge.reduce(values, axis=0), np.mean)[1] for edge in (np.fmin, np.fmax))
            axes.fill_between(
                x, low, high, color=colors(comparison)[variant.name], alpha=0.3 / len(variants), linewidth=0
            )
    _draw_over_one_another(axes, comparison, lines)
    finite = np.concatenate([line.y[np.isfinite(line.y)] for line in lines])
    if finite.size and finite.min() > 0 and finite.max() > SEVERAL_DECADES * finite.min():
        log_scale(axes)
    averaged = [f"{steps_a_point:,} steps"] if steps_a_point > 1 else []
    averaged += ["the seeds"] if any(len(variant.runs) > 1 for variant in variants) else []
    axes.set_title(f"training loss, mean of {' and '.join(averaged)}" if averaged else "training loss", loc="left")
    axes.set(ylabel="loss of a step")
    axes.grid()


def _draw_differences(axes: Axes, comparison: Comparison, differences: Sequence[_Line]) -> None:
    """On a log axis, which has no place for the steps that do not differ: they are gaps."""
    lines = []
    for line in differences:
        x, largest = _points(line.x, line.y, np.fmax.reduce)
        lines.append(_Line(line.name, x, np.where(largest > 0, largest, np.nan)))
    _draw_over_one_another(axes, comparison, lines, marker=".")
    _mark_partings(axes, comparison, [line.name for line in differences])
    log_scale(axes)
    bottom = axes.get_ylim()[0]
    verdicts = [variant.verdict for variant in comparison.variants if variant.verdict is not None]
    bounds = [verdict.loss_bound for verdict in verdicts if verdict.loss_bound]
    if comparison.rounding is not None and comparison.rounding.steps:
        x, bound = _points(_array(comparison.rounding.steps), _array(comparison.rounding.values), np.fmax.reduce)
        axes.fill_between(x, bottom / 10, bound, color="tab:gray", alpha=0.2, linewidth=0, zorder=0)
    elif bounds:
        axes.axhspan(bottom / 10, max(bounds), color="tab:gray", alpha=0.2, linewidth=0, zorder=0)
    axes.set_ylim(bottom=bottom)
    axes.set(ylabel="difference")
    shaded = "; grey: what rounding may do" if bounds or comparison.rounding is not None else ""
    axes.set_title(f"largest difference to {comparison.reference} at a step{shaded}", loc="left")
    axes.grid()


def _mark_partings(axes: Axes, comparison: Comparison, names: Sequence[str]) -> None:
    """A line at the step at which a variant parts, and its name beside it; the names stand below one another."""
    steps = {
        variant.name: variant.verdict.first_parting
        for variant in comparison.variants
        if variant.name in names and variant.verdict is not None and variant.verdict.first_parting is not None
    }
    left, right = axes.get_xlim()
    for place, (name, step) in enumerate(steps.items()):
        axes.axvline(step, color=colors(comparison)[name], linestyle=":", linewidth=1.2)
        before = step > (left + right) / 2
        axes.annotate(
            f"{name} parts at step {step:,}",
            (step, 1),
            xycoords=("data", "axes fraction"),
            xytext=(-4 if before else 4, -2 - 11 * place),
            textcoords="offset points",
            ha="right" if before else "left",
            va="top",
            fontsize=8,
        )


def _draw_over_one_another(axes: Axes, comparison: Comparison, lines: Sequence[_Line], marker: str = "") -> None:
    """Equal curves hide one another: where they do, each gets its share of the line, as dashes in turn."""
    palette, signs = colors(comparison), markers(comparison)
    names = list(dict.fromkeys(line.name for line in lines))
    width = 1.8 if len(lines) == len(names) else 1.0
    for line in lines:
        axes.plot(
            line.x,
            line.y,
            color=palette[line.name],
            linewidth=width,
            label=line.name,
            marker=signs[line.name] or marker,
            markevery=0.1 if signs[line.name] and not marker else None,
            markersize=2 * width,
        )
    for line in lines if len(names) > 1 else ():
        place = names.index(line.name)
        dashes = (DASH * (len(names) - place), (DASH, DASH * (len(names) - 1)))
        axes.plot(line.x, line.y, color=palette[line.name], linewidth=width, linestyle=dashes)


def _difference(comparison: Comparison, variant: Variant) -> _Line | None:
    """Of the losses, the largest of all seeds at each step; None where none differ, or there is nothing to compare."""
    references: dict[int, Run] = {
        run.seed: run for other in comparison.variants if other.name == comparison.reference for run in other.runs
    }
    pairs = [(references[run.seed], run) for run in variant.runs if run.seed in references]
    curves = []
    for reference, run in pairs:
        steps, ours, theirs = np.intersect1d(run.losses.steps, reference.losses.steps, return_indices=True)
        values = np.abs(_array(run.losses.values)[ours] - _array(reference.losses.values)[theirs])
        curves.append(Curve(steps.tolist(), values.tolist()))
    if not any(np.any(_array(curve.values) > 0) for curve in curves):
        return None
    steps, values = _over_seeds(curves)
    return _Line(variant.name, steps, np.fmax.reduce(values, axis=0))


def _over_seeds(curves: Sequence[Curve]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """All steps, and (curves, steps) values; NaN where a curve has none."""
    steps = np.unique(np.concatenate([_array(curve.steps) for curve in curves]))
    values = np.full((len(curves), len(steps)), np.nan)
    for row, curve in zip(values, curves, strict=True):
        row[np.searchsorted(steps, curve.steps)] = _array(curve.values)
    return steps, values


def _points(
    steps: NDArray[np.float64], values: NDArray[np.float64], of_several: Callable[[NDArray[np.float64]], float]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """At most POINTS of a curve, each made by `of_several` from the values of so many steps that follow one another."""
    parts = range(0, len(steps), math.ceil(len(steps) / POINTS) or 1)
    size = parts.step
    x = [steps[start : start + size].mean() for start in parts]
    return np.array(x), np.array([of_several(values[start : start + size]) for start in parts])


def _array(values: Sequence[float]) -> NDArray[np.float64]:
    """Infinities become NaN, which is not drawn."""
    array = np.asarray(values, dtype=np.float64)
    return np.where(np.isfinite(array), array, np.nan)
