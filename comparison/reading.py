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

MARK = "rounding.json"
"""In the folder of a run that comparison.rounding has made, whatever it is called: its unit of rounding."""

NEEDED = ("seed", "strategy", "world_size", "accumulate", "micro_batch_size", "precision", "accelerator", "device_name")
"""Keys of metrics.json without which nothing can be compared."""

NEEDED_SETTINGS = ("model", "optimizer", "schedule", "batch_size", "epochs", "max_steps", "precision")
"""The same of config.yaml."""


@dataclass
class Loaded:
    """A run, with its settings."""

    folder: Path
    settings: dict[str, Any]
    """The content of config.yaml."""
    deepspeed: dict[str, Any]
    """DeepSpeed's configuration; empty for other strategies."""
    run: Run
    rounding: float | None = None
    """The unit of rounding of a run that comparison.rounding has moved by little; None for any other."""

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
        settings = _object(yaml.safe_load((folder / run_folder.CONFIG).read_text()), NEEDED_SETTINGS)
        for part in ("model", "optimizer", "schedule"):
            _object(settings[part], ("name",))
        metrics = _object(json.loads((folder / run_folder.METRICS).read_text()), NEEDED)
        engine = _optional(folder / run_folder.DEEPSPEED_CONFIG)
        losses = read_losses(folder / run_folder.LOSSES)
        curves = read_curves(folder)
        run = Run(str(folder), metrics["seed"], metrics, losses, curves)
        run.effective = {key: metrics.get(key) for key in EFFECTIVE}
        if engine:
            run.effective["communication_data_type"] = engine["communication_data_type"]
            run.effective["overlap_comm"] = engine["zero_optimization"]["overlap_comm"]
        loaded = Loaded(folder, settings, engine, run, _optional(folder / MARK, ("unit",)).get("unit"))
        if loaded.checkpoint.exists():
            run.checkpoint_bytes = _bytes(loaded.checkpoint)
    except KeyError as error:
        raise UsageError(f"{folder} cannot be read: {error} is missing from what it holds") from error
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        raise UsageError(f"{folder} cannot be read: {' '.join(str(error).split())}") from error
    accuracy = curves.get("val/acc")
    if target_accuracy is not None and accuracy is not None:
        times = zip(accuracy.values, accuracy.seconds, strict=True)
        run.seconds_to_accuracy = next((time for value, time in times if value >= target_accuracy), None)
    return loaded


def read_losses(file: Path) -> Curve:
    """The loss of each optimizer step, to the bit.

    Raises:
        ValueError: it is none, or its end is cut off.
    """
    text = file.read_text()
    if not text.endswith("\n"):
        raise ValueError(f"the last line of {file.name} is cut off")
    rows = [(int(row["step"]), float(row["loss"])) for row in csv.DictReader(text.splitlines())]
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


def _object(content: Any, needed: tuple[str, ...] = ()) -> dict[str, Any]:
    """What YAML or JSON has read, if it is an object with these keys."""
    if not isinstance(content, dict):
        raise ValueError("its settings or figures are empty or no object")
    missing = [key for key in needed if key not in content]
    if missing:
        raise KeyError(missing[0])
    return content


def _optional(file: Path, needed: tuple[str, ...] = ()) -> dict[str, Any]:
    """Of a JSON file; empty where there is none."""
    return _object(json.loads(file.read_text()), needed) if file.is_file() else {}


def _bytes(checkpoint: Path) -> int:
    files = checkpoint.rglob("*") if checkpoint.is_dir() else [checkpoint]
    return sum(file.stat().st_size for file in files if file.is_file())
