"""Refuses a run that cannot work, before anything is launched: values that make no sense on any machine, models that do
not fit the images, and requirements that this computer does not meet. strategy_rules.py refuses what a strategy cannot
do. Imports torch only to try out a model. Each UsageError is one line that names what to use instead."""

import ctypes.util
import importlib.util
import os
import shutil
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path

from packaging.version import Version

from cifar_zero.config import ds_config, strategy_rules
from cifar_zero.config.placement import Placement
from cifar_zero.config.recipe import AugmentConfig, LoRAConfig
from cifar_zero.config.run import Run
from cifar_zero.config.settings import REGISTRIES, Settings, flat, sections
from cifar_zero.config.strategy_specs import AUTO, STRATEGIES
from cifar_zero.core.errors import UsageError, short
from cifar_zero.core.hardware import free_memory_bytes
from cifar_zero.core.usage import check_numbers, nearest, refuse
from cifar_zero.models import IMAGE_SHAPE, MODELS
from cifar_zero.optimizers import OPTIMIZERS

MOST_NAME_BYTES = 200  # file systems allow 255 bytes, and a suffix may follow

CPU_RANK_BYTES = 1_000_000_000
"""Memory of one CPU rank in the smallest run (measured: 0.9 to 1.1 GB resident, torch 2.15 with DeepSpeed 0.19)."""


def check(run: Run) -> None:
    """Raises UsageError if the run cannot work on this computer."""
    strategy_rules.check_strategy(run)
    check_here(run)
    check_model(run)
    interval = run.recipe.trainer.get("val_check_interval")
    if isinstance(interval, (str, dict)) and run.placement.world_size > 1:  # each rank would look at its own clock
        raise UsageError(f"--trainer.val_check_interval {interval} needs one rank: give a number of batches instead")


def check_values(settings: Settings) -> None:
    """Raises UsageError for values of the right type that make no sense on any machine."""
    recipe, placement, output = settings.recipe, settings.placement, settings.output
    strategies, lora = [*STRATEGIES, AUTO], recipe.lora
    meant = nearest(placement.strategy, strategies)
    _check_numbers(settings)
    refuse(
        {
            f"unknown strategy {placement.strategy!r}: {meant}": placement.strategy not in strategies,
            f"--lora.rank must be at least 1, not {lora.rank}": lora != LoRAConfig() and not lora.rank,
            "--lora.rank needs --lora.target: names of linear layers such as 'blocks.*.attention.qkv'": (
                lora.rank and not lora.target
            ),
            "--max_steps must be at least 1, or -1 for no limit, not 0": recipe.max_steps == 0,
            "--bench_steps starts at the first step: leave out --resume": recipe.only_measures and output.resume,
            "--ds_config replaces the strategy: leave out --strategy": (
                placement.ds_config and placement.strategy != Placement.strategy
            ),
        }
    )
    _check_images(settings)
    for flag in of_validation(settings):
        none = not settings.data.val_fraction or recipe.trainer.get("limit_val_batches") == 0
        refuse({f"--{flag} needs validation: set --data.val_fraction above 0 and limit_val_batches not to 0": none})
    check_plain_name(output.name)


def _check_numbers(settings: Settings) -> None:
    for part in (settings.recipe, settings.placement, settings.output):
        groups = {"": part, **{f"{name}.": getattr(part, name) for name in sections(type(part))}}
        for prefix, options in groups.items():
            try:
                check_numbers(options)
            except ValueError as error:
                raise UsageError(f"--{prefix}{error}") from error
    for key, registry in REGISTRIES.items():
        choice = getattr(settings.recipe, key)
        try:
            registry[choice.name](**choice.options)
        except ValueError as error:
            raise UsageError(f"--{key}.{error}") from error


def _check_images(settings: Settings) -> None:
    augment, side = settings.recipe.augment, settings.data.inputs.side
    if side != IMAGE_SHAPE[1] and settings.data.source != "folder":
        raise UsageError(f"--data.image_size {side} needs --data.source folder, as other images have 32 x 32 pixels")
    for option, most in (("crop", side // 2), ("cutout", side)):
        if getattr(augment, option) > most:
            raise UsageError(f"--augment.{option} must be at most {most}, for images of {side} x {side} pixels")
    if settings.data.loader == "torch" and augment != AugmentConfig():
        given = next(field.name for field in fields(augment) if getattr(augment, field.name) != field.default)
        raise UsageError(f"--augment.{given} needs --data.loader memory, because the torch loader does not augment")


def of_validation(settings: Settings) -> list[str]:
    """Returns the names of the options that need a validation and differ from their defaults."""
    given, defaults = flat(settings), flat(Settings())
    names = ("early_stopping", "monitor", "save_top_k")
    return [name for name in names if given[name] != defaults[name]]


def check_plain_name(name: str) -> None:
    """Raises UsageError if a --name contains a directory, is too long, or cannot be printed. An empty name is valid."""
    if not name.isprintable() or len(os.fsencode(name)) > MOST_NAME_BYTES:
        raise UsageError(f"--name {short(repr(name), 60)} must be one line of at most {MOST_NAME_BYTES} bytes")
    if name and (Path(name).name != name or name in (".", "..")):
        raise UsageError(f"--name {name} must be a plain name: give the directory with --out")


def check_model(run: Run) -> None:
    """Raises UsageError if the model cannot train on the run's micro-batches. Builds and runs the model only if it
    comes from outside this project, or if the images are not 32 x 32 pixels."""
    model, side = run.recipe.model, run.data.image_size
    if ":" in model.name or side != IMAGE_SHAPE[1]:
        from cifar_zero.models.external import check

        try:
            made = MODELS[model.name](**model.options)
            check(made, run.num_classes, (run.micro_batch, IMAGE_SHAPE[0], side, side))
        except ValueError as error:
            raise UsageError(f"--model {model.name}: {error}") from error


def check_here(run: Run) -> None:
    """Raises UsageError if the run needs something that this computer lacks but another may have: memory for its CPU
    ranks, a package, a version of torch, a compiler, or a disk and library for NVMe offloading."""
    placement, optimizer, spec = run.placement, run.recipe.optimizer.name, run.spec
    assert placement.devices != "auto"
    launched = "LOCAL_WORLD_SIZE" in os.environ  # ranks of a launcher have already allocated their memory
    fit = max(1, ranks_in_memory())
    compiles = spec.offload_optimizer and OPTIMIZERS[optimizer].compiled
    splits_layers = spec.size == "tensor_parallel_size" and placement.ranks_per_model > 1
    refuse(
        {
            f"--devices {placement.devices}: a CPU rank takes about 1 GB, so this computer has memory for {fit}": (
                run.on_cpu and not launched and placement.devices > fit
            ),
            "--logger wandb needs a package: pip install wandb": (
                "wandb" in run.output.logger and importlib.util.find_spec("wandb") is None
            ),
            f"{placement.strategy_name} splits layers, but torch {version('torch')} cannot split them: update torch": (
                splits_layers and Version(version("torch")) < Version("2.12")
            ),
            f"{placement.strategy_name} needs g++ to compile a CPU {optimizer}: install g++ or use --optimizer sgd": (
                compiles and not (shutil.which("g++") or shutil.which("c++"))
            ),
        }
    )
    for option, path in ds_config.nvme_paths(placement, spec).items():
        check_nvme(path, option)


def ranks_in_memory() -> int:
    """Returns how many CPU ranks fit into the free memory, which may be 0."""
    return free_memory_bytes() // CPU_RANK_BYTES


def check_nvme(path: str, option: str = "--nvme_path") -> None:
    """Raises UsageError if the directory `path` for NVMe offloading, which `option` names, is missing or not writable,
    or if the computer lacks libaio, which DeepSpeed needs for it."""
    refuse(
        {
            f"{option} is missing: offloading to a disk needs a directory on a local disk": not path,
            f"{option} {path} is not a writable directory": not os.access(path, os.W_OK | os.X_OK),
            "NVMe offload needs libaio: apt-get install libaio-dev, or offload to the CPU": (
                not ctypes.util.find_library("aio")
            ),
        }
    )
