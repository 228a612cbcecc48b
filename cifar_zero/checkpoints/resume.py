"""What a run can be continued from, told before anything is launched; no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from cifar_zero import data
from cifar_zero.checkpoints import run_folder
from cifar_zero.checkpoints.records import check_records
from cifar_zero.config.flags import Config
from cifar_zero.config.flat import flat
from cifar_zero.core import atomic
from cifar_zero.core.errors import UsageError

KEPT = ("model", "optimizer", "batch_size", "seed", "data.val_fraction")
KEPT += ("trainable", "lora.rank", "lora.alpha", "lora.target", "lora.dropout")
"""What a run that goes on must have as it was: else it is another run, and trains on images held out before."""

OF_AUTO = ("cifar10", "digits")
"""What --data.source auto can come to."""

FEW = 6
"""Most names of classes that a message has."""

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
    checkpoint = find_recovered(config.resume, config.out, config.run_name, config.data.source == "digits")
    for file in sorted(checkpoint.rglob("*.pt")) if checkpoint.is_dir() else [checkpoint]:
        check_records(file, checksums=False)  # `build.check_resume` compares them, on one rank
    recipe = run_folder.recipe_of(checkpoint)
    if recipe is not None:
        check_same_run(config, yaml.safe_load(recipe.read_text()))
    config.resume = str(checkpoint)


def settle_restart(config: Config, name: str) -> None:
    """Puts the newest checkpoint of the name for auto, and in a job that SLURM has started again for whatever it was
    submitted with: it goes on from where it was itself, on the digits too where it had to take these. Before there is
    such a checkpoint: nothing for auto, else what --resume says.

    Args:
        config: of the run.
        name: of the run.
    """
    restarted = int(os.environ.get("SLURM_RESTART_COUNT", "0")) > 0 and not config.only_measures
    if not restarted and config.resume != IF_ANY:
        return
    try:
        own = find_recovered("last", config.out, name, restarted or config.data.source == "digits")
    except UsageError:
        config.resume = "" if config.resume == IF_ANY else config.resume
    else:
        config.resume = str(own)


def newest_of(agents: Collection[str], out: str, name: str) -> Path | None:
    """Returns the newest checkpoint that earlier ranks of the same torchrun processes wrote; None before the first one.

    torchrun's restart count does not tell a restart: it stays the same when a node joins, and is 0 on the new node.

    Args:
        agents: names of the torchrun processes of this run, see `launchers.torchrun_agent`.
        out: directory of the runs.
        name: of the run.
    """
    found: list[Path] = []
    folders = (Path(out, name + suffix) for suffix in ("", run_folder.FALLBACK_SUFFIX))
    for file in (file for folder in folders for file in folder.glob(f"version_*/{run_folder.RANKS}")):
        try:
            earlier = {place["agent"] for place in json.loads(file.read_text())}
        except (OSError, ValueError, TypeError, KeyError):  # damaged, by a full disk for example
            continue
        if earlier.intersection(agents) - {""}:
            atomic.recover(file.parent)
            found += run_folder.checkpoints(file.parent)
    return max(found, key=run_folder.written, default=None)


def find_recovered(path: str, out: str, name: str, fallback: bool = False) -> Path:
    """What `run_folder.find_checkpoint` finds when checkpoints that a crash has left aside are back in place."""
    for folder in (Path(path), Path(out) / name, Path(out) / (name + run_folder.FALLBACK_SUFFIX)):
        if folder.is_dir():
            atomic.recover(folder)
    return run_folder.find_checkpoint(path, out, name, fallback)


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
    before, now = flat(recipe), flat(config)
    source = before.get("data.source", "auto")
    if source not in ("auto", *(OF_AUTO if config.data.source == "auto" else (config.data.source,))):
        raise UsageError(
            f"--resume {config.resume}: that run trained on --data.source {source}, this one has {config.data.source}: "
            f"--data.source {source} continues it, --weights {config.resume} without --resume fine-tunes it"
        )
    for option in now:
        kept = any(option == key or option.startswith(f"{key}.") for key in KEPT) and option not in MAY_CHANGE
        if kept and option in before and before[option] != now[option]:
            raise UsageError(
                f"--resume {config.resume}: that run had --{option} {before[option]}, this one has {now[option]}"
            )


def source_of(config: Config, record: dict[str, Any]) -> Any:
    """Returns the source of images that a resumed run continues on: the one that it had, also for --data.source auto.

    Args:
        config: of the resumed run.
        record: of the checkpoint, accepted by `check_same_run`.

    Raises:
        UsageError: the source now has other classes.
    """
    source = record["config"]["data"]["source"]
    names = [*data.class_names(replace(config.data, source=source))]
    if names != record["classes"]:
        differing = ", ".join(sorted({*names} ^ {*record["classes"]})[:FEW]) or "their order"
        raise UsageError(
            f"--resume {config.resume}: that run had other classes than --data.source {source} now has ({differing}): "
            f"name the data that it had, or fine-tune it with --weights {config.resume} without --resume"
        )
    return source
