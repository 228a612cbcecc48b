"""Reads run folders, names variants, and finds the settings that differ between runs. Importing this module does not
import torch."""

import csv
import json
from collections.abc import Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import Any

from cifar_zero.checkpoints import run_folder
from cifar_zero.comparison.result import OF_CHECKS, FinishedRun, Variant
from cifar_zero.config.settings import flat, owner_of
from cifar_zero.core.console import command
from cifar_zero.core.errors import UsageError
from cifar_zero.core.plain_data import read_json, read_yaml

MEASURED = ("dataset", "num_train")
"""Keys of metrics.json that describe the training images and that the recipe does not fix."""

ENVIRONMENT = ("precision", "accelerator", "device_name", "git_commit", "versions")
"""Keys of metrics.json whose values may differ between runs, because a comparison tests the effect of these
differences. The report shows them."""

PLACEMENT = ("strategy", "world_size", "num_nodes", "accumulate")  # keys of metrics.json that define a variant


def load_run(folder: Path) -> FinishedRun:
    """Reads the folder of a finished run. Raises UsageError if it is no run folder, the run has not finished, or a file
    is damaged."""
    config, results, per_step = folder / run_folder.CONFIG, folder / run_folder.METRICS, folder / run_folder.LOSSES
    if not config.is_file():
        raise UsageError(f"{folder} is not a run folder: give <out>/<name>/version_N")
    for file in (results, per_step):
        if not file.is_file():
            raise UsageError(f"{folder} has no {file.name}, because the run has not finished or was a benchmark")
    try:
        settings = flat(read_yaml(config, str(config)))
        for key in settings:
            owner_of(key)  # raises KeyError for an option of another version of the program
        metrics = read_json(results, str(results))
        for key in PLACEMENT:
            if not isinstance(metrics[key], str if key == "strategy" else int):
                raise ValueError(f"{results.name} has {key} {json.dumps(metrics[key])}")
        run = FinishedRun(str(folder), metrics, settings, read_losses(per_step))
        check = folder / run_folder.STEP_CHECK
        run.check = read_json(check, str(check)) if check.is_file() else None
        if run.check and (run.check["outcome"] not in OF_CHECKS or not run.check["summary"]):
            raise ValueError(f"{check.name} has the unknown outcome {json.dumps(run.check['outcome'])}")
        return run
    except KeyError as error:
        raise UsageError(f"{folder} cannot be read: {error} is missing from its files, or is unknown") from error
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UsageError(f"{folder} cannot be read: {' '.join(str(error).split())}") from error


def read_losses(file: Path) -> dict[int, float]:
    """Returns the loss of each optimizer step from a losses.csv, without rounding. Raises ValueError if it has no
    losses, is damaged or is cut off."""
    text = file.read_text()
    if not text.endswith("\n"):
        raise ValueError(f"the last line of {file.name} is cut off")
    losses = {int(row["step"]): float(row["loss"]) for row in csv.DictReader(text.splitlines())}
    if not losses:
        raise ValueError(f"{file.name} has no losses")
    return losses


def shared(run: FinishedRun) -> dict[str, Any]:
    """Returns the settings whose differences a comparison reports, keyed by their dotted names: a run's recipe, and
    MEASURED and ENVIRONMENT from metrics.json."""
    recipe = {key: value for key, value in run.settings.items() if owner_of(key) == "recipe"}
    return {**recipe, **flat({key: run.metrics.get(key) for key in (*MEASURED, *ENVIRONMENT)})}


def differences(variants: Sequence[Variant]) -> dict[str, dict[str, str]]:
    """Returns the settings of `shared` that differ between the runs of the variants. Each has its value as text, or
    "missing", for each variant with a run, keyed by the variant's name."""
    runs = {variant.name: shared(variant.run) for variant in variants if variant.run}
    differing = {}
    for key in dict.fromkeys(key for settings in runs.values() for key in settings):
        values = {name: str(settings.get(key, "missing")) for name, settings in runs.items()}
        if len({*values.values()}) > 1:
            differing[key] = values
    return differing


def blocking_settings(differences: Mapping[str, Mapping[str, str]], one: str, other: str) -> list[str]:
    """Returns the names of the settings in `differences` that differ between the variants `one` and `other` and make a
    verdict on the two meaningless. Settings in ENVIRONMENT are never returned."""
    blocking = []
    for setting, values in differences.items():
        if setting.split(".")[0] not in ENVIRONMENT and values.get(one) != values.get(other):
            blocking.append(setting)
    return blocking


def variant_names(placements: Sequence[Sequence[Any]]) -> list[str]:
    """Returns a name for each variant, which lists the values that vary between the variants, or is the strategy if
    none varies. `placements` has the values of PLACEMENT for each variant. Variants with equal values have equal
    names."""
    named: list[tuple[str, ...]] = []
    for strategy, ranks, nodes, micro_batches in placements:
        sizes = with_unit(ranks, "rank", "ranks"), with_unit(nodes, "node", "nodes")
        named.append((strategy, *sizes, with_unit(micro_batches, "micro-batch", "micro-batches")))
    varies = [len({*values}) > 1 for values in zip(*named, strict=True)]
    return [", ".join(compress(parts, varies)) or parts[0] for parts in named]


def with_unit(number: int, one: str, many: str) -> str:
    return f"{number} {one}" if number == 1 else f"{number} {many}"


def variants_of(runs: Sequence[FinishedRun]) -> list[Variant]:
    """Returns a variant for each finished run, those with the strategy baseline first. If an earlier variant has the
    same name, the folder of the run is added to the name."""
    ordered = sorted(runs, key=lambda run: run.metrics["strategy"] != "baseline")
    names = variant_names([[run.metrics[key] for key in PLACEMENT] for run in ordered])
    variants: list[Variant] = []
    for name, run in zip(names, ordered, strict=True):
        if any(other.name == name for other in variants):
            name += f" ({run.folder})"
        variants.append(Variant(name, command("train", "--config", Path(run.folder, run_folder.CONFIG)), run=run))
    return variants
