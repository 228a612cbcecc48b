"""What became of the settings of a sweep, as sweep.json holds it; plain Python."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from reports.summary import write_json
from sweeping.metric import METRICS
from sweeping.space import Setting

SCHEMA = 1
"""Of sweep.json: keys may be added, none changes its meaning."""

State = Literal["finished", "pruned", "failed", "cut off"]


@dataclass
class Run:
    """One finished run."""

    seed: int
    value: float
    """Of the metric."""
    folder: str
    seconds: float
    """Of its training (perf/fit_seconds)."""


@dataclass
class Result:
    """What became of a setting."""

    trial: int
    """Optuna's number."""
    setting: Setting
    state: State
    runs: list[Run] = field(default_factory=list)
    """By seed."""
    error: str = ""
    """The line with which it failed."""

    @property
    def mean(self) -> float:
        """Of the metric over the seeds."""
        return statistics.fmean(run.value for run in self.runs)

    @property
    def deviation(self) -> float | None:
        """The sample's standard deviation over the seeds; None for a single one."""
        return statistics.stdev(run.value for run in self.runs) if len(self.runs) > 1 else None


def ranked(results: Sequence[Result], metric: str) -> list[Result]:
    """The finished ones, the best first, and then the others."""
    finished = [result for result in results if result.state == "finished"]
    finished.sort(key=lambda result: result.mean, reverse=METRICS[metric] == "maximize")
    return finished + [result for result in results if result.state != "finished"]


def write(results: Sequence[Result], metric: str, command: str, best: str, file: Path) -> None:
    """Writes sweep.json.

    Args:
        results: ranked.
        metric: that they are ranked by.
        command: of the sweep.
        best: of the best setting; empty where none finished.
        file: to be written.
    """
    settings = [_plain(result) for result in results]
    content = {"schema": SCHEMA, "command": command, "metric": metric, "direction": METRICS[metric]}
    write_json(file, {**content, "best_command": best or None, "settings": settings})


def _plain(result: Result) -> dict[str, Any]:
    values = [run.value for run in result.runs]
    whole = result.state == "finished"
    figures = {
        "mean": result.mean if whole else None,
        "lowest": min(values) if whole else None,
        "highest": max(values) if whole else None,
        "standard_deviation": result.deviation if whole else None,
    }
    return {**asdict(result), **figures}
