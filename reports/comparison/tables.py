"""The tables of a comparison: cells of text, for HTML and Markdown alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from comparison.result import Comparison, Variant
from reports.comparison import memory
from reports.comparison.text import MISSING, number, percent, size, small, spread, verdict_name


@dataclass
class Table:
    """The first column is the variant's name."""

    columns: list[str]
    rows: list[list[str]]


def verdicts(comparison: Comparison) -> Table:
    """How far each variant is from the reference, and how far rounding may take it."""
    return _table(
        comparison,
        {
            "verdict": verdict_name,
            "difference of a step's loss": lambda variant: small(_judged(variant, "loss_difference")),
            "bound of the loss": lambda variant: small(_judged(variant, "loss_bound")),
            "difference of a weight": lambda variant: small(_judged(variant, "weight_difference")),
            "bound of the weight": lambda variant: small(_judged(variant, "weight_bound")),
            "first step not bit-identical": lambda variant: _count(_judged(variant, "first_difference")),
            "first step beyond rounding": lambda variant: _count(_judged(variant, "first_parting")),
        },
    )


def results(comparison: Comparison) -> Table:
    """What was learnt."""
    return _table(
        comparison,
        {
            "seeds": lambda variant: str(len(variant.runs)) if variant.runs else MISSING,
            "test accuracy (%)": _spread("test/acc", percent),
            "test loss": _spread("test/loss", _loss),
            "validation accuracy (%)": _spread("val/acc", percent),
            "training loss, last interval": _spread("train/loss", _loss),
        },
    )


def speeds(comparison: Comparison) -> Table:
    """How fast."""
    target = comparison.target_accuracy
    columns = {
        "images/s": _spread("perf/images_per_second"),
        "step (ms)": _spread("perf/step_time_ms"),
        "start to first step (s)": _spread("perf/seconds_to_first_step"),
        "training (s)": _spread("perf/fit_seconds"),
    }
    if target is not None:
        columns[f"to {100 * target:g} % accuracy (s)"] = _spread("seconds_to_accuracy")
    return _table(comparison, columns)


def memories(comparison: Comparison) -> Table:
    """What the fullest rank holds."""

    def part(name: str) -> Callable[[Variant], str]:
        def cell(variant: Variant) -> str:
            states = memory.model_states(variant)
            return MISSING if states is None else size(getattr(states, name))

        return cell

    return _table(
        comparison,
        {
            **{name: part(name) for name in memory.PARTS},
            "model states": lambda variant: _size(memory.model_state_bytes(variant)),
            "predicted": lambda variant: _size(variant.predicted and memory.total(variant.predicted)),
            "measured / predicted": _ratio,
            "peak": lambda variant: _size(max(memory.peaks(variant), default=None)),
            "checkpoint": _spread("checkpoint_bytes", size),
        },
    )


def settings(comparison: Comparison) -> Table:
    """What the strategies made of the request."""

    def cell(key: str) -> Callable[[Variant], str]:
        def of_runs(variant: Variant) -> str:
            values = dict.fromkeys(_plain(run.effective[key]) for run in variant.runs if key in run.effective)
            return ", ".join(values) or MISSING

        return of_runs

    keys = dict.fromkeys(key for variant in comparison.variants for run in variant.runs for key in run.effective)
    counts = {
        "ranks": lambda variant: str(variant.world_size),
        "micro-batches a step": lambda variant: str(variant.accumulate),
    }
    return _table(comparison, {**counts, **{key.replace("_", " "): cell(key) for key in keys}})


def _table(comparison: Comparison, columns: dict[str, Callable[[Variant], str]]) -> Table:
    """Without the columns in which no variant has anything."""
    cells = {name: [cell(variant) for variant in comparison.variants] for name, cell in columns.items()}
    filled = {name: column for name, column in cells.items() if set(column) != {MISSING}}
    names = [variant.name for variant in comparison.variants]
    return Table(["", *filled], [list(row) for row in zip(names, *filled.values(), strict=True)])


def _judged(variant: Variant, figure: str):
    return None if variant.verdict is None else getattr(variant.verdict, figure)


def _spread(key: str, form: Callable[[float], str] = number) -> Callable[[Variant], str]:
    return lambda variant: spread(variant.figures.get(key), form)


def _loss(value: float) -> str:
    return f"{value:.4f}"


def _count(value: int | None) -> str:
    return MISSING if value is None else f"{value:,}"


def _size(value: int | None) -> str:
    return MISSING if value is None else size(value)


def _ratio(variant: Variant) -> str:
    measured = memory.model_state_bytes(variant)
    if measured is None or variant.predicted is None or not memory.total(variant.predicted):
        return MISSING
    return f"{measured / memory.total(variant.predicted):.3f}"


def _plain(value: object) -> str:
    if value is None:
        return MISSING
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
