"""What a run can be continued from, told before anything is launched; no torch."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import yaml

import run_folder
from config import Config
from errors import UsageError
from strategies import STRATEGIES


def settle_resume(config: Config) -> None:
    """Puts the checkpoint's own path for what --resume names.

    Raises:
        UsageError: there is none, it is damaged, or it is of a run that cannot be continued with this configuration.
    """
    if not config.resume:
        return
    checkpoint = run_folder.find_checkpoint(config.resume, config.out, config.run_name)
    _check_whole(checkpoint)
    recipe = run_folder.recipe_of(checkpoint)
    if recipe is not None:
        _check_same_run(config, yaml.safe_load(recipe.read_text()), checkpoint)
    config.resume = str(checkpoint)


def _check_whole(checkpoint: Path) -> None:
    """torch writes zip archives, whose table of contents comes last: one that was cut has none."""
    files = sorted(checkpoint.rglob("*.pt")) if checkpoint.is_dir() else [checkpoint]
    for file in files:
        if not zipfile.is_zipfile(file):
            raise UsageError(f"--resume {checkpoint}: {file.name} is damaged or no checkpoint")
    if not files:
        raise UsageError(f"--resume {checkpoint} holds no checkpoint")


def _check_same_run(config: Config, recipe: dict[str, Any], checkpoint: Path) -> None:
    """The checkpoint of a ZeRO stage is continued by the same stage on as many ranks; a plain one by DDP too."""
    before = _identity(
        recipe["strategy"], recipe["ds_config"], recipe["devices"] * recipe["num_nodes"], recipe["precision"]
    )
    now = _identity(config.strategy, config.ds_config, config.world_size, config.precision)
    now = {flag: now.get(flag) for flag in before}
    for key in ("model", "optimizer"):
        before[f"--{key}"], now[f"--{key}"] = recipe[key]["name"], getattr(config, key).name
    for flag in before:
        if before[flag] != now[flag]:
            raise UsageError(f"--resume {checkpoint}: that run had {flag} {before[flag]}, this one has {now[flag]}")


def _identity(strategy: str, ds_config: str, ranks: int, precision: str) -> dict[str, Any]:
    if not ds_config and STRATEGIES[strategy].family != "deepspeed":
        return {"--strategy": strategy if strategy == "fsdp" else "baseline or ddp"}
    return {"--strategy": ds_config or strategy, "--devices": ranks, "--precision": precision}
