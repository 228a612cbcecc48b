"""Made-up runs for the tests of comparisons."""

from typing import Any

from cifar_zero.comparison.result import FinishedRun
from cifar_zero.config.settings import flat

SETTINGS: dict[str, Any] = {
    **{"strategy": "baseline", "gradient_clip_val": 0.0, "batch_size": 16, "compile": False, "out": "runs"},
    **{"epochs": 2, "max_steps": -1, "seed": 0, "precision": "32-true", "activation_checkpointing": False},
    **{"model": {"name": "net"}, "optimizer": {"name": "sgd", "lr": 0.1}, "schedule": {"name": "constant"}},
    "data": {"source": "digits", "root": "data"},
}
METRICS: dict[str, Any] = {
    **{"strategy": "baseline", "world_size": 2, "num_nodes": 1, "accumulate": 1, "micro_batch_size": 8},
    **{"dataset": "digits", "num_train": 100, "device_name": "a CPU", "git_commit": None, "versions": {"torch": "2"}},
    **{"precision": "32-true", "accelerator": "cpu", "skipped_steps": 0, "test/acc": 0.5, "perf/fit_seconds": 2.0},
}


def made_up(
    losses: tuple[float, ...] = (2.0, 1.0),
    settings: Any = None,
    check: Any = None,
    folder: str = "somewhere",
    **metrics: Any,
) -> FinishedRun:
    """Returns a made-up run with the given differences from the default one."""
    measured, asked = {**METRICS, **metrics}, flat({**SETTINGS, **(settings or {})})
    return FinishedRun(folder, measured, asked, dict(enumerate(losses, 1)), check)
