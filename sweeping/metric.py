"""The figure that settings are chosen by; no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import run_folder
from config import Config
from errors import UsageError
from names import nearest

VALIDATION = "val/acc"
FIT_SECONDS = "perf/fit_seconds"

METRICS: dict[str, Literal["maximize", "minimize"]] = {
    VALIDATION: "maximize",
    "train/loss": "minimize",
    "perf/images_per_second": "maximize",
    "perf/step_time_ms": "minimize",
    FIT_SECONDS: "minimize",
}
"""Keys of metrics.json by which settings can be chosen, and what is better. None of the test: chosen by it, its figure
would say nothing of new images any more. val/acc is that of the last validation: the best of a run is the highest of
many draws, and higher for a run that validates more often."""


def check_metric(metric: str, config: Config) -> None:
    """Refuses a figure that a run will not have.

    Raises:
        UsageError: says which flag would give it.
    """
    if metric.startswith("test/"):
        raise UsageError(f"--metric {metric}: the test is for the setting that was chosen, choose it by {VALIDATION}")
    if metric not in METRICS:
        raise UsageError(f"--metric {metric}: {nearest(metric, METRICS)}")
    if metric != VALIDATION:
        return
    if not config.data.val_fraction:
        raise UsageError(f"--metric {VALIDATION} needs validation images: add --data.val_fraction 0.1")
    if config.trainer.get("limit_val_batches") == 0:
        raise UsageError(f"--metric {VALIDATION} needs a validation: leave --trainer.limit_val_batches out")


def shown(value: float) -> str:
    """For a table: accuracies and losses with four decimals, images and milliseconds with one."""
    return f"{value:.4f}" if abs(value) < 10 else f"{value:,.1f}"


def read(folders: Sequence[Path], metric: str) -> float:
    """The metric of a finished run.

    Args:
        folders: of the run, and before it those in which it began.
        metric: one of METRICS.

    Raises:
        UsageError: it has none.
    """
    value = json.loads((folders[-1] / run_folder.METRICS).read_text()).get(metric)
    if value is None and metric == VALIDATION:  # cut off after its last validation it does not validate again
        value = (validations(folders) or [None])[-1]
    if value is None:
        raise UsageError(f"it has no {metric}")
    return float(value)


def fit_seconds(folder: Path) -> float:
    """Of the training of a finished run; of one that went on those of its last part."""
    return float(json.loads((folder / run_folder.METRICS).read_text())[FIT_SECONDS] or 0.0)


def validations(folders: Sequence[Path]) -> list[float]:
    """val/acc after each epoch so far, as TensorBoard has it; of a run that went on in several folders once each."""
    from comparison.reading import read_curves

    points: dict[int, float] = {}
    for folder in folders:
        curve = read_curves(folder).get(VALIDATION)
        if curve is not None:
            points |= dict(zip(curve.steps, curve.values, strict=True))
    return [points[step] for step in sorted(points)]
