"""Refuses values of the right type that make no sense on any machine; no torch, no Lightning."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from cifar_zero.config.flags import AugmentConfig, Choice, Config, flat
from cifar_zero.config.strategy_specs import AUTO, STRATEGIES
from cifar_zero.core.errors import UsageError
from cifar_zero.core.usage import check_range, nearest, nearest_flag
from cifar_zero.models import MODELS
from cifar_zero.optimizers import OPTIMIZERS
from cifar_zero.schedules import SCHEDULES

REGISTRIES: dict[str, Mapping[str, Any]] = {"model": MODELS, "optimizer": OPTIMIZERS, "schedule": SCHEDULES}
"""Registry of each `Choice` of the configuration."""

LONGEST_TIMEOUT = 7 * 24 * 3600
"""Largest --timeout, in seconds; Python and torch cannot represent much larger ones."""


def check_values(config: Config) -> None:
    """Raises UsageError for values that make no sense; it names the flag and what it may be."""
    if config.strategy not in (*STRATEGIES, AUTO):
        raise UsageError(f"unknown strategy {config.strategy!r}: {nearest(config.strategy, [*STRATEGIES, AUTO])}")
    _check_ranges(config)
    if config.plot_schedule and (config.find_lr or config.bench_steps):
        raise UsageError("--plot_schedule cannot be combined with --find_lr or --bench_steps: leave them out")
    if config.max_steps < -1 or config.max_steps == 0:
        raise UsageError(f"--max_steps must be at least 1, or -1 for no limit, not {config.max_steps}")
    if "none" in config.logger and len(config.logger) > 1:
        raise UsageError("--logger none cannot be combined with other loggers")
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
    _check_augmentation(config)
    _check_regularization(config)
    check_plain_name(config.name)
    options = flat(config)
    for name in (name for name in config.hparams if name not in options):
        raise UsageError(f"--hparams {name} is not an option of this run: {nearest_flag(name, options)}")


def check_plain_name(name: str) -> None:
    """Raises UsageError for a --name with a directory in it; an empty one is fine."""
    if name and (Path(name).name != name or name in (".", "..")):
        raise UsageError(f"--name {name} must be a plain name: give the directory with --out")


def _check_ranges(config: Config) -> None:
    """Checks each number on its own."""
    at_least_1 = ["epochs", "batch_size", "accumulate", "num_nodes", "log_interval"]
    check_flags(config, "", *at_least_1, *(["devices"] if config.devices != "auto" else []), at_least=1)
    check_flags(config, "", "timeout", over=0, at_most=LONGEST_TIMEOUT)
    check_flags(config, "", "save_every_n_steps", "save_every_minutes", "bench_steps", "gradient_clip_val")
    check_flags(config, "", "seed", at_most=2**32 - 1)
    check_flags(config, "", "label_smoothing", "ema", "swa_from", below=1)
    check_flags(config, "", "early_stopping")
    check_flags(config.data, "data.", "val_fraction", below=1)
    check_flags(config.data, "data.", "workers")
    check_flags(config.data, "data.", "synthetic_size", at_least=10)
    check_flags(config.zero, "zero.", "sub_group_size", "hpz_partition_size", at_least=1)
    check_flags(config.offload, "offload.", "ratio", at_most=1)
    check_flags(config.offload, "offload.", "cpuadam_cores_perc", over=0, at_most=1)
    # Images are 32 pixels wide: cropping with a border of 16 leaves a quarter of them in the worst case.
    check_flags(config.augment, "augment.", "crop", at_most=16)
    check_flags(config.augment, "augment.", "cutout", at_most=32)
    check_flags(config.augment, "augment.", "brightness", "contrast", below=1)
    check_flags(config.augment, "augment.", "mixup", "cutmix")


def check_flags(options: Any, group: str, *names: str, **limits: float) -> None:
    """Calls `check_range` for fields of the configuration or of a section, whose flags begin with `group`.

    Raises UsageError, which names the flag and the values that are allowed.
    """
    try:
        check_range(options, *names, **limits)
    except ValueError as error:
        raise UsageError(f"--{group}{error}") from error


def _check_augmentation(config: Config) -> None:
    augment = config.augment
    if config.data.loader == "torch" and augment != AugmentConfig():
        given = next(field.name for field in fields(augment) if getattr(augment, field.name) != field.default)
        raise UsageError(f"--augment.{given} needs --data.loader memory: the torch loader does not augment")
    if augment.padding == "reflect" and not augment.crop:
        raise UsageError("--augment.padding reflect needs --augment.crop: set it to a number of pixels")


def _check_regularization(config: Config) -> None:
    if config.ema and config.swa_from:
        raise UsageError("--ema and --swa_from cannot be combined: leave one of them out")
    if config.early_stopping and not config.data.val_fraction:
        raise UsageError("--early_stopping needs validation images: set --data.val_fraction above 0")
    if config.early_stopping and config.trainer.get("limit_val_batches") == 0:
        raise UsageError("--early_stopping needs validation: leave --trainer.limit_val_batches out")
