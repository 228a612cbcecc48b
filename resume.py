"""What a run can be continued from, told before anything is launched; no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

import atomic
import run_folder
from checkpointing.records import check_records
from config import Config
from errors import UsageError

KEPT = ("model", "optimizer", "batch_size", "seed", "data.val_fraction")
KEPT += ("trainable", "lora.rank", "lora.alpha", "lora.target", "lora.dropout")
"""What a run that goes on must have as it was: else it is another run, and trains on images held out before."""

IF_ANY = "auto"
"""For --resume: as last, but a run of which nothing is there begins."""

MAY_CHANGE = ("model.ep_size",)
"""Options among them that say where the run is, not what it is."""


def settle_resume(config: Config) -> None:
    """Puts the checkpoint's own path for what --resume names, or means in a job that SLURM has started again.

    Raises:
        UsageError: there is none, it is not whole, or it is of a run that cannot be continued with this configuration.
    """
    settle_restart(config, config.run_name)
    if not config.resume:
        return
    checkpoint = find_recovered(config.resume, config.out, config.run_name)
    for file in sorted(checkpoint.rglob("*.pt")) if checkpoint.is_dir() else [checkpoint]:
        check_records(file)
    recipe = run_folder.recipe_of(checkpoint)
    if recipe is not None:
        check_same_run(config, yaml.safe_load(recipe.read_text()))
    config.resume = str(checkpoint)


def settle_restart(config: Config, name: str) -> None:
    """Puts `last` for auto, and in a job that SLURM has started again for whatever it was submitted with: it goes on
    from where it was itself. Before there is a checkpoint of the name: nothing for auto, else what --resume says.

    Args:
        config: of the run.
        name: of the run.
    """
    restarted = int(os.environ.get("SLURM_RESTART_COUNT", "0")) and not config.only_measures
    if not restarted and config.resume != IF_ANY:
        return
    try:
        find_recovered("last", config.out, name)
    except UsageError:
        config.resume = "" if config.resume == IF_ANY else config.resume
    else:
        config.resume = "last"


def newest_of(starters: Collection[str], out: str, names: Iterable[str]) -> Path | None:
    """The newest checkpoint that earlier ranks of the same launchers have written; None before there is one.

    A launcher is known by its process: torchrun's restart count stays as it was when a machine joins, and is 0 on one
    that has just come.

    Args:
        starters: of this run's ranks, see `launchers.starter`.
        out: directory of the runs.
        names: of the run; several where they follow from the strategy and auto chooses it.
    """
    found: list[Path] = []
    folders = (Path(out, name + suffix) for name in names for suffix in ("", run_folder.FALLBACK_SUFFIX))
    for file in (file for folder in folders for file in folder.glob(f"version_*/{run_folder.RANKS}")):
        try:
            earlier = {place["starter"] for place in json.loads(file.read_text())}
        except (OSError, ValueError, TypeError, KeyError):  # damaged by a disk that was full, or by hand
            continue
        if earlier.intersection(starters) - {""}:
            atomic.recover(file.parent)
            found += run_folder.checkpoints(file.parent)
    return max(found, key=run_folder.written, default=None)


def find_recovered(path: str, out: str, name: str) -> Path:
    """What `run_folder.find_checkpoint` finds when checkpoints that a crash has left aside are back in place."""
    for folder in (Path(path), Path(out) / name):
        if folder.is_dir():
            atomic.recover(folder)
    return run_folder.find_checkpoint(path, out, name)


def check_same_run(config: Config, recipe: dict[str, Any]) -> None:
    """Refuses to go on with another run.

    Args:
        config: of the run that is to go on.
        recipe: of the run that wrote the checkpoint, as its config.yaml or the checkpoint has it.

    Raises:
        UsageError: names the first option that differs.
    """
    if config.weights and not Path(recipe.get("weights", "")).is_relative_to(Path(config.weights).absolute()):
        raise UsageError(f"--resume {config.resume} goes on with the weights that it has: leave --weights out")
    now, defaults = asdict(config), asdict(Config())
    for key in KEPT:  # one of an older version lacks what has come since
        before, wanted = _flat(key, {**defaults, **recipe}), _flat(key, now)
        if before.get("optimizer.weight_decay"):
            before.setdefault("optimizer.weight_decay_on", "all")  # before there was this option
        for option in before:
            if option not in MAY_CHANGE and option in wanted and before[option] != wanted[option]:
                raise UsageError(
                    f"--resume {config.resume}: that run had --{option} {before[option]}, this one has {wanted[option]}"
                )


def _flat(key: str, tree: dict[str, Any]) -> dict[str, Any]:
    """The options under a key: its name first, or its one value."""
    value: Any = tree
    for part in key.split("."):
        value = value[part]
    if not isinstance(value, dict):
        return {key: value}
    options = value.get("options", {name: option for name, option in value.items() if name != "name"})
    plain = {f"{key}.{name}": list(option) if isinstance(option, tuple) else option for name, option in options.items()}
    return {key: value["name"], **plain}
