"""Reads run folders; no torch."""

import csv
import json
from pathlib import Path

import yaml

from cifar_zero.checkpoints import run_folder
from cifar_zero.comparison.result import Curve, Run
from cifar_zero.config.flags import flat
from cifar_zero.core.errors import UsageError

PERTURBED = "perturbed.json"
"""File that marks the run folder of a perturbed run; written by comparison.perturbed."""


def load(folder: Path) -> Run:
    """Reads the folder of a finished run, <out>/<name>/version_N.

    Raises:
        UsageError: the run has not finished, or a file is damaged.
    """
    if not (folder / run_folder.CONFIG).is_file():
        raise UsageError(f"{folder} is not a run folder: give <out>/<name>/version_N")
    for name in (run_folder.METRICS, run_folder.LOSSES):
        if not (folder / name).is_file():
            raise UsageError(f"{folder} has no {name}: the run has not finished, or it was a benchmark")
    try:
        return _read(folder)
    except KeyError as error:
        raise UsageError(f"{folder} cannot be read: {error} is missing in its files") from error
    except (OSError, ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise UsageError(f"{folder} cannot be read: {' '.join(str(error).split())}") from error


def last_checkpoint(run: Run) -> Path:
    """Returns the path of the checkpoint after the last step: a file, or a folder under DeepSpeed."""
    return Path(run.folder, run_folder.CHECKPOINTS, "last.ckpt")


def read_losses(file: Path) -> Curve:
    """Returns the loss of each optimizer step, bit by bit as it was computed.

    Raises:
        ValueError: the file is damaged or cut off.
    """
    text = file.read_text()
    if not text.endswith("\n"):
        raise ValueError(f"the last line of {file.name} is cut off")
    rows = [(int(row["step"]), float(row["loss"])) for row in csv.DictReader(text.splitlines())]
    return Curve([step for step, _ in rows], [loss for _, loss in rows])


def read_curves(folder: Path) -> dict[str, Curve]:
    """Returns TensorBoard's curves of a run by tag; empty if another logger was used.

    Seconds count from the start of the event file, which Lightning opens when training begins.
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


def _read(folder: Path) -> Run:
    settings = flat(yaml.safe_load((folder / run_folder.CONFIG).read_text()))
    metrics = json.loads((folder / run_folder.METRICS).read_text())
    engine = folder / run_folder.DEEPSPEED_CONFIG
    deepspeed = json.loads(engine.read_text()) if engine.is_file() else {}
    losses, curves = read_losses(folder / run_folder.LOSSES), read_curves(folder)
    run = Run(str(folder), metrics["seed"], metrics, settings, deepspeed, losses, curves)
    run.perturbed = (folder / PERTURBED).is_file()
    checkpoint = last_checkpoint(run)
    files = [checkpoint, *checkpoint.rglob("*")]
    run.checkpoint_bytes = sum(file.stat().st_size for file in files if file.is_file()) or None
    return run
