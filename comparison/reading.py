"""A run folder as a comparison needs it."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

import run_folder
from comparison.result import Curve, Run
from errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

EFFECTIVE = ("compute_dtype", "parameter_dtype", "skipped_steps", "reduce_bucket_size", "allgather_bucket_size")
"""Keys of metrics.json that say what the strategy made of the request."""

ROUNDING = "rounding-"
"""What the name of a run begins with that comparison.rounding made: the reference's, moved by little."""


@dataclass
class Loaded:
    """A run, with its settings."""

    folder: Path
    settings: dict[str, Any]
    """The content of config.yaml."""
    deepspeed: dict[str, Any]
    """DeepSpeed's configuration; empty for other strategies."""
    run: Run

    @property
    def metrics(self) -> dict[str, Any]:
        """The content of metrics.json."""
        return self.run.metrics

    @property
    def checkpoint(self) -> Path:
        """With the weights after the last step."""
        return self.folder / run_folder.CHECKPOINTS / "last.ckpt"

    def weights(self, trust: bool = False) -> dict[str, Tensor]:
        """Those after the last step by the names of the plain network, buffers too; not the average of --ema.

        Raises:
            UsageError: there is no checkpoint, or it cannot be read.
        """
        from checkpointing.read import read
        from checkpointing.weights import network

        if not self.checkpoint.exists():
            raise UsageError(f"{self.folder} has no checkpoint of its last step")
        return network(read(self.checkpoint, trust), averaged=False)


def load(folder: Path, target_accuracy: float | None = None) -> Loaded:
    """Reads a finished run.

    Args:
        folder: of the run, or with a single one under it.
        target_accuracy: of val/acc, from 0 to 1, whose time is looked for.

    Raises:
        UsageError: it is none, it has not finished, or it is of a version that wrote no losses.
    """
    folder = _run_folder(folder)
    for name in (run_folder.METRICS, run_folder.LOSSES):
        if not (folder / name).is_file():
            raise UsageError(f"{folder} has no {name}: it has not finished, or an older version or a benchmark made it")
    try:
        settings = yaml.safe_load((folder / run_folder.CONFIG).read_text())
        metrics = json.loads((folder / run_folder.METRICS).read_text())
        deepspeed = folder / run_folder.DEEPSPEED_CONFIG
        engine = json.loads(deepspeed.read_text()) if deepspeed.is_file() else {}
        losses = read_losses(folder / run_folder.LOSSES)
    except (OSError, ValueError, KeyError, yaml.YAMLError) as error:
        raise UsageError(f"{folder} cannot be read: {error}") from error
    curves = read_curves(folder)
    run = Run(str(folder), metrics["seed"], metrics, losses, curves)
    run.effective = {key: metrics.get(key) for key in EFFECTIVE}
    if engine:
        run.effective["communication_data_type"] = engine["communication_data_type"]
        run.effective["overlap_comm"] = engine["zero_optimization"]["overlap_comm"]
    accuracy = curves.get("val/acc")
    if target_accuracy is not None and accuracy is not None:
        times = zip(accuracy.values, accuracy.seconds, strict=True)
        run.seconds_to_accuracy = next((time for value, time in times if value >= target_accuracy), None)
    loaded = Loaded(folder, settings, engine, run)
    if loaded.checkpoint.exists():
        run.checkpoint_bytes = _bytes(loaded.checkpoint)
    return loaded


def read_losses(file: Path) -> Curve:
    """The loss of each optimizer step, to the bit."""
    with file.open(newline="") as lines:
        rows = [(int(row["step"]), float(row["loss"])) for row in csv.DictReader(lines)]
    return Curve([step for step, _ in rows], [loss for _, loss in rows])


def read_curves(folder: Path) -> dict[str, Curve]:
    """What TensorBoard has of a run; empty where it was logged elsewhere.

    Seconds are from the opening of the event file, which Lightning does when the network is there and the training
    begins.
    """
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    if not any(folder.glob("events.out.tfevents.*")):
        return {}
    events = EventAccumulator(str(folder), size_guidance={SCALARS: 0})
    events.Reload()
    start = events.FirstEventTimestamp() or 0.0
    curves = {}
    for tag in events.Tags()[SCALARS]:
        points = events.Scalars(tag)
        times = [point.wall_time - start for point in points]
        curves[tag] = Curve([point.step for point in points], [point.value for point in points], times)
    return curves


def _run_folder(given: Path) -> Path:
    """The folder itself, or the only run under it."""
    if (given / run_folder.CONFIG).is_file():
        return given
    found = [file.parent for file in given.glob(f"**/{run_folder.CONFIG}")]
    if len(found) != 1:
        raise UsageError(f"{given} is no run folder: {len(found)} runs lie under it, name each of them")
    return found[0]


def _bytes(checkpoint: Path) -> int:
    files = checkpoint.rglob("*") if checkpoint.is_dir() else [checkpoint]
    return sum(file.stat().st_size for file in files if file.is_file())
