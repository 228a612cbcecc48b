"""Tables and texts of a comparison for the console, JUnit and the report; plain Python."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from rich.filesize import decimal

from cifar_zero.comparison.result import Comparison, Spread, Variant, VerdictKind

MISSING = "-"
"""Text for an unknown number."""

SIGNS: dict[VerdictKind, str] = {
    "reference": "●",
    "bit-identical": "=",
    "within rounding": "≈",
    "different": "≠",
    "not trained": "✗",
}
"""Sign before each verdict, so that colour is not the only difference."""


class Cell(NamedTuple):
    """One cell of a table."""

    text: str
    bar: float = 0.0
    """Length of the bar behind the text, from 0 to 1."""


@dataclass
class Table:
    """A row for each variant."""

    columns: list[str]
    rows: dict[str, list[Cell]]
    """Cells of each row, by the variant's name."""


def number(value: float) -> str:
    """Returns three significant digits, with a thousands separator: 0.0123, 1.23, 4,329."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"


def percent(share: float) -> str:
    """Returns a share from 0 to 1 in percent; the sign is in the column's title."""
    return f"{100 * share:.2f}"


def size(count: float) -> str:
    """Returns bytes in a suitable unit."""
    return decimal(round(count), precision=2)


IN_EFFECT = ("compute_dtype", "parameter_dtype", "skipped_steps", "reduce_bucket_size", "allgather_bucket_size")
"""Keys of metrics.json with the settings actually in effect."""

Form = Callable[[float], str]
Figures = Mapping[str, tuple[str, Form]]
"""Columns: title -> key of `Variant.figures` and format of its values."""

ACCURACY: Figures = {
    "test accuracy (%)": ("test/acc", percent),
    "test loss": ("test/loss", "{:.4f}".format),
    "validation accuracy (%)": ("val/acc", percent),
    "training loss, last interval": ("train/loss", "{:.4f}".format),
}
SPEED: Figures = {
    "images/s": ("perf/images_per_second", number),
    "step (ms)": ("perf/step_time_ms", number),
    "start to first step (s)": ("perf/seconds_to_first_step", number),
    "training (s)": ("perf/fit_seconds", number),
}
MEMORY: Figures = {
    "parameters": ("mem/parameter_rank_bytes", size),
    "gradients": ("mem/gradient_rank_bytes", size),
    "optimizer": ("mem/optimizer_rank_bytes", size),
    "model states": ("mem/model_state_rank_bytes", size),
    "predicted by ZeRO's formulas": ("predicted_bytes", size),
    "peak": ("mem/peak_rank_bytes", size),
    "checkpoint": ("checkpoint_bytes", size),
}


def figures(comparison: Comparison, columns: Figures) -> Table:
    """Returns a table of figures over the seeds, without columns that no variant has; the bars show the means."""
    variants = comparison.variants
    known = {title: each for title, each in columns.items() if any(each[0] in variant.figures for variant in variants)}
    rows: dict[str, list[Cell]] = {variant.name: [] for variant in variants}
    for key, form in known.values():
        longest = max(variant.figures[key].mean for variant in variants if key in variant.figures)
        for variant in variants:
            found = variant.figures.get(key)
            bar = found.mean / longest if found and longest > 0 else 0.0
            rows[variant.name].append(Cell(spread(found, form), bar))
    return Table([*known], rows)


def settings(comparison: Comparison) -> Table:
    """Returns a table of the settings actually in effect."""
    rows = {}
    for variant in comparison.variants:
        found = [dict.fromkeys(run.metrics.get(key) for run in variant.runs) for key in IN_EFFECT]
        texts = [", ".join(MISSING if value is None else str(value) for value in values) for values in found]
        rows[variant.name] = [Cell(text) for text in texts]
    return Table([key.replace("_", " ") for key in IN_EFFECT], rows)


def spread(figure: Spread | None, form: Form) -> str:
    """Returns a mean, and if the seeds differ, the lowest and the highest value in brackets."""
    if figure is None:
        return MISSING
    mean, lowest, highest = form(figure.mean), form(figure.lowest), form(figure.highest)
    return mean if lowest == highest else f"{mean} ({lowest} to {highest})"


def verdict_line(variant: Variant) -> str:
    """Returns the verdict with its numbers, or why there is none."""
    verdict = variant.verdict
    if verdict is None:
        return f"not judged: {variant.unjudged}"
    parts = [variant.error, verdict.remark]
    if verdict.first_difference is not None:
        parts.append(f"first unequal loss at step {verdict.first_difference:,}")
    if verdict.first_parting is not None:
        parts.append(f"beyond rounding from step {verdict.first_parting:,} on")
    if verdict.loss_difference is not None and verdict.loss_bound is not None:
        parts.append(f"loss off by {verdict.loss_difference:.1e} of {verdict.loss_bound:.1e}")
    if verdict.weight_difference is not None and verdict.weight_bound is not None:
        parts.append(f"weight off by {verdict.weight_difference:.1e} of {verdict.weight_bound:.1e}")
    return ": ".join(filter(None, [f"{SIGNS[verdict.kind]} {verdict.kind}", ", ".join(filter(None, parts))]))


def headline(comparison: Comparison) -> str:
    """Returns the outcome in one sentence."""
    agree = sum(variant.passed for variant in comparison.variants)
    parts = [f"{agree} of {len(comparison.variants)} variants trained and agree"]
    for variant in comparison.variants:
        if variant.verdict is None:
            parts.append(f"{variant.name} was not judged")
        elif not variant.passed:
            step = variant.verdict.first_parting
            parts.append(f"{variant.name}: {variant.verdict.kind}" + (f" from step {step:,} on" if step else ""))
    return "; ".join(parts)
