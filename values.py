"""Values that make no sense on any machine, be they of the right type; no torch, no Lightning."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from config import AugmentConfig, Choice, Config
from errors import UsageError
from models import MODELS
from names import nearest, nearest_flag
from optimizers import OPTIMIZERS
from options import flat
from ranges import check_range
from schedules import SCHEDULES
from strategies import AUTO, STRATEGIES

REGISTRIES: dict[str, Mapping[str, Any]] = {"model": MODELS, "optimizer": OPTIMIZERS, "schedule": SCHEDULES}
"""Where a `Choice` of the configuration is looked up."""

LONGEST_TIMEOUT = 7 * 24 * 3600
"""Of --timeout, in seconds; many more are no length of time for Python or torch."""


def check_values(config: Config) -> None:
    """Refuses values that have the right type and make no sense.

    Raises:
        UsageError: names the flag and what it may be.
    """
    if config.strategy not in (*STRATEGIES, AUTO):
        raise UsageError(f"unknown strategy {config.strategy!r}: {nearest(config.strategy, [*STRATEGIES, AUTO])}")
    for name in ("epochs", "batch_size", "accumulate", "num_nodes", "log_interval"):
        if getattr(config, name) < 1:
            raise UsageError(f"--{name} must be at least 1, not {getattr(config, name)}")
    if config.devices != "auto" and config.devices < 1:
        raise UsageError(f"--devices must be at least 1, not {config.devices}")
    if not 0 < config.timeout <= LONGEST_TIMEOUT:
        raise UsageError(
            f"--timeout must be over 0 and at most {LONGEST_TIMEOUT}, a week in seconds, not {config.timeout}"
        )
    for name in ("save_every_n_steps", "save_every_minutes", "bench_steps", "gradient_clip_val"):
        if not getattr(config, name) >= 0:
            raise UsageError(f"--{name} must not be negative, not {getattr(config, name)}")
    if config.plot_schedule and (config.find_lr or config.bench_steps):
        raise UsageError("--plot_schedule draws the schedule of a training: leave out --find_lr and --bench_steps")
    if config.max_steps < -1 or config.max_steps == 0:
        raise UsageError(f"--max_steps must be at least 1, or -1 for no limit, not {config.max_steps}")
    if not 0 <= config.seed < 2**32:
        raise UsageError(f"--seed must be from 0 to 4294967295, not {config.seed}")
    if "none" in config.logger and len(config.logger) > 1:
        raise UsageError("--logger none stands alone")
    if config.bench_steps and config.find_lr:
        raise UsageError("--find_lr and --bench_steps are two runs: leave one of them out")
    if config.only_measures and config.resume:
        flag = "find_lr" if config.find_lr else "bench_steps"
        raise UsageError(f"--{flag} counts from the first step: leave --resume out")
    if config.plot_schedule and Path(config.plot_schedule).suffix != ".png":
        raise UsageError(f"--plot_schedule {config.plot_schedule}: give the name of a .png file")
    if config.ds_config and config.strategy != Config().strategy:
        raise UsageError("--ds_config stands in for a strategy: leave --strategy out")
    for key, registry in REGISTRIES.items():
        choice: Choice = getattr(config, key)
        try:
            registry[choice.name](**choice.options)
        except ValueError as error:
            raise UsageError(f"--{key}.{error}") from error
    _check_share("--data.val_fraction", config.data.val_fraction)
    if config.data.workers < 0:
        raise UsageError(f"--data.workers must not be negative, not {config.data.workers}")
    if config.data.synthetic_size < 10:
        raise UsageError(f"--data.synthetic_size must be at least 10, not {config.data.synthetic_size}")
    _check_switches(config)
    _check_augmentation(config)
    _check_regularization(config)
    check_plain_name(config.name)
    options = flat(config)
    for name in (name for name in config.hparams if name not in options):
        raise UsageError(f"--hparams {name} is no option of this run: {nearest_flag(name, options)}")


def check_plain_name(name: str) -> None:
    """Refuses a --name that leads to another directory; none at all is fine.

    Raises:
        UsageError: says what --name and --out are for.
    """
    if name and (Path(name).name != name or name in (".", "..")):
        raise UsageError(f"--name {name} must be a plain name; --out is the directory")


def _check_switches(config: Config) -> None:
    for name in ("sub_group_size", "hpz_partition_size"):
        if getattr(config.zero, name) < 1:
            raise UsageError(f"--zero.{name} must be at least 1, not {getattr(config.zero, name)}")
    if not 0 <= config.offload.ratio <= 1:
        raise UsageError(f"--offload.ratio must be from 0 to 1, not {config.offload.ratio}")
    if not 0 < config.offload.cpuadam_cores_perc <= 1:
        raise UsageError(
            f"--offload.cpuadam_cores_perc must be over 0 and at most 1, not {config.offload.cpuadam_cores_perc}"
        )


def _check_augmentation(config: Config) -> None:
    augment = config.augment
    if config.data.loader == "torch" and augment != AugmentConfig():
        given = next(field.name for field in fields(augment) if getattr(augment, field.name) != field.default)
        raise UsageError(
            f"--augment.{given} needs --data.loader memory: the torch loader, the tutorial's own, does not augment"
        )
    # Images are 32 pixels wide: cropping with a border of 16 leaves a quarter of them in the worst case.
    for name, most in (("crop", 16), ("cutout", 32)):
        if not 0 <= getattr(augment, name) <= most:
            raise UsageError(f"--augment.{name} must be from 0 to {most} pixels, not {getattr(augment, name)}")
    for name in ("brightness", "contrast"):
        _check_share(f"--augment.{name}", getattr(augment, name))
    if augment.padding == "reflect" and not augment.crop:
        raise UsageError("--augment.padding reflect is for the pixels of --augment.crop: give a number of them")
    for name in ("mixup", "cutmix"):
        if not 0 <= getattr(augment, name) < math.inf:
            raise UsageError(f"--augment.{name} must be at least 0 and finite, not {getattr(augment, name)}")


def _check_regularization(config: Config) -> None:
    for name in ("label_smoothing", "ema", "swa_from"):
        _check_share(f"--{name}", getattr(config, name))
    if config.ema and config.swa_from:
        raise UsageError("--ema and --swa_from are two ways to average the weights: leave one of them out")
    if config.early_stopping < 0:
        raise UsageError(f"--early_stopping must not be negative, not {config.early_stopping}")
    if config.early_stopping and not config.data.val_fraction:
        raise UsageError("--early_stopping needs validation images: set --data.val_fraction above 0")
    if config.early_stopping and config.trainer.get("limit_val_batches") == 0:
        raise UsageError("--early_stopping needs a validation: leave --trainer.limit_val_batches out")


def _check_share(flag: str, share: float) -> None:
    try:
        check_range(flag, share, below=1)
    except ValueError as error:
        raise UsageError(str(error)) from error
