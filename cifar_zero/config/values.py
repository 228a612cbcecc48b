"""Refuses values of the right type that make no sense on any machine; no torch, no Lightning."""

import os
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from cifar_zero.config.flags import SECTIONS, AugmentConfig, Choice, Config, LoRAConfig, flat
from cifar_zero.config.strategy_specs import AUTO, STRATEGIES
from cifar_zero.core.errors import UsageError, short
from cifar_zero.core.usage import check_numbers, nearest, nearest_flag
from cifar_zero.models import IMAGE_SHAPE, MODELS
from cifar_zero.optimizers import OPTIMIZERS
from cifar_zero.schedules import SCHEDULES

REGISTRIES: dict[str, Mapping[str, Any]] = {"model": MODELS, "optimizer": OPTIMIZERS, "schedule": SCHEDULES}
"""Registry of each `Choice` of the configuration."""

MOST_NAME_BYTES = 200  # file systems end at 255, and a suffix may follow


def check_values(config: Config) -> None:
    """Raises UsageError for values that make no sense; it names the flag and what it may be."""
    if config.strategy not in (*STRATEGIES, AUTO):
        meant = re.sub(r"^(deepspeed|ds|zero|stage|[_-])*([0-3])", r"deepspeed_stage_\2", config.strategy)
        raise UsageError(f"unknown strategy {config.strategy!r}: {nearest(meant, [*STRATEGIES, AUTO])}")
    if config.max_steps < -1 or config.max_steps == 0:
        raise UsageError(f"--max_steps must be at least 1, or -1 for no limit, not {config.max_steps}")
    if config.lora != LoRAConfig() and config.lora.rank < 1:
        raise UsageError(f"--lora.rank must be at least 1, not {config.lora.rank}")
    for group, options in {"": config, **{f"{key}.": getattr(config, key) for key in SECTIONS}}.items():
        try:
            check_numbers(options)
        except ValueError as error:
            raise UsageError(f"--{group}{error}") from error
    if config.plot_schedule and (config.find_lr or config.bench_steps):
        raise UsageError("--plot_schedule cannot be combined with --find_lr or --bench_steps: leave them out")
    if "none" in config.logger and len(config.logger) > 1:
        raise UsageError("--logger none cannot be combined with other loggers")
    of_wandb = ("wandb_project", "wandb_run_name", "wandb_group", "wandb_tags")
    for logger, names in (("tensorboard", ("log_weights", "log_graph")), ("wandb", of_wandb)):
        for name in (name for name in names if getattr(config, name) and logger not in config.logger):
            raise UsageError(f"--{name} needs {logger}: add it to --logger")
    if config.bench_steps and config.find_lr:
        raise UsageError("--find_lr and --bench_steps cannot be combined: leave one of them out")
    if config.only_measures and config.resume:
        flag = "find_lr" if config.find_lr else "bench_steps"
        raise UsageError(f"--{flag} starts at the first step: leave --resume out")
    if config.plot_schedule and Path(config.plot_schedule).suffix != ".png":
        raise UsageError(f"--plot_schedule {config.plot_schedule}: give the name of a .png file")
    if config.ds_config and config.strategy != Config().strategy:
        raise UsageError("--ds_config replaces the strategy: leave --strategy out")
    for key, registry in REGISTRIES.items():
        choice: Choice = getattr(config, key)
        try:
            registry[choice.name](**choice.options)
        except ValueError as error:
            raise UsageError(f"--{key}.{error}") from error
    augment, side = config.augment, config.data.inputs.side
    if side != IMAGE_SHAPE[1] and config.data.source != "folder":
        raise UsageError(f"--data.image_size {side} needs --data.source folder: all other images have 32 x 32 pixels")
    for option, most in (("crop", side // 2), ("cutout", side)):
        if getattr(augment, option) > most:
            raise UsageError(f"--augment.{option} must be at most {most}, for images of {side} x {side} pixels")
    if config.data.loader == "torch" and augment != AugmentConfig():
        given = next(field.name for field in fields(augment) if getattr(augment, field.name) != field.default)
        raise UsageError(f"--augment.{given} needs --data.loader memory: the torch loader does not augment")
    if augment.padding == "reflect" and not augment.crop:
        raise UsageError("--augment.padding reflect needs --augment.crop: set it to a number of pixels")
    if config.ema and config.swa_from:
        raise UsageError("--ema and --swa_from cannot be combined: leave one of them out")
    for name in of_validation(config):
        if not config.data.val_fraction:
            raise UsageError(f"--{name} needs validation images: set --data.val_fraction above 0")
        if config.trainer.get("limit_val_batches") == 0:
            raise UsageError(f"--{name} needs validation: leave --trainer.limit_val_batches out")
    if config.reduce_on_plateau and config.schedule.name != "constant":
        raise UsageError(f"--reduce_on_plateau needs --schedule constant: leave --schedule {config.schedule.name} out")
    check_plain_name(config.name)
    options = flat(config)
    for name in (name for name in config.hparams if name not in options):
        raise UsageError(f"--hparams {name} is not an option of this run: {nearest_flag(name, options)}")


def of_validation(config: Config) -> list[str]:
    """Returns the flags that were given and need a validation."""
    names = ("early_stopping", "reduce_on_plateau", "monitor", "save_top_k")
    return [name for name in names if getattr(config, name) != getattr(Config, name)]


def check_plain_name(name: str) -> None:
    """Raises UsageError for a --name with a directory in it, or that cannot be a folder's; an empty one is fine."""
    if not name.isprintable() or len(os.fsencode(name)) > MOST_NAME_BYTES:
        raise UsageError(f"--name {short(repr(name), 60)} must be one line of at most {MOST_NAME_BYTES} bytes")
    if name and (Path(name).name != name or name in (".", "..")):
        raise UsageError(f"--name {name} must be a plain name: give the directory with --out")
