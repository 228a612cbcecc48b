"""Runs that were never made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from comparison.reading import Loaded
from comparison.result import Curve, Run

SETTINGS: dict[str, Any] = {
    **{"strategy": "baseline", "gradient_clip_val": 0.0, "batch_size": 16, "compile": False, "out": "runs"},
    **{"epochs": 2, "max_steps": -1, "precision": "32-true", "activation_checkpointing": False},
    **{"model": {"name": "net"}, "optimizer": {"name": "sgd", "lr": 0.1}, "schedule": {"name": "constant"}},
    "data": {"source": "digits", "root": "data"},
}
METRICS: dict[str, Any] = {
    **{"strategy": "baseline", "world_size": 2, "accumulate": 1, "micro_batch_size": 8, "seed": 0},
    **{"dataset": "digits", "num_train": 100, "device_name": "a CPU", "git_commit": None, "versions": {"torch": "2"}},
    **{"precision": "32-true", "accelerator": "cpu", "skipped_steps": 0, "test/acc": 0.5, "perf/fit_seconds": 2.0},
}


def made_up(
    losses: tuple[float, ...] = (2.0, 1.0),
    settings: Any = None,
    deepspeed: Any = None,
    rates: Any = (),
    rounding: float | None = None,
    first: int = 1,
    folder: str = "somewhere",
    **metrics: Any,
) -> Loaded:
    """A run, with what differs from the usual one; `rounding` is the unit of one that was moved by it."""
    steps = list(range(first, len(losses) + first))
    curves = {"train/learning_rate": Curve(list(range(1, len(rates) + 1)), list(rates))}
    measured = {**METRICS, **metrics}
    run = Run(folder, measured["seed"], measured, Curve(steps, list(losses)), curves)
    return Loaded(Path(folder), {**SETTINGS, **(settings or {})}, deepspeed or {}, run, rounding)
