"""Refuses what cannot run, before anything is launched, in one line that says what to use instead: values that make no
sense on any machine, models that do not fit, and what this computer lacks. What a strategy cannot do stands in
strategy_rules.py.

A check raises UsageError. Nothing here imports torch, except for a model of torchvision or timm.
"""

import ctypes.util
import importlib.util
import os
import shutil
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path

from packaging.version import Version

from cifar_zero.config import strategy_rules
from cifar_zero.config.placement import Placement
from cifar_zero.config.recipe import AugmentConfig, LoRAConfig
from cifar_zero.config.run import Run
from cifar_zero.config.settings import Settings, sections
from cifar_zero.config.strategy_specs import AUTO, STRATEGIES
from cifar_zero.config.suggestions import REGISTRIES
from cifar_zero.core.errors import UsageError, short
from cifar_zero.core.hardware import free_memory_bytes
from cifar_zero.core.usage import check_numbers, nearest
from cifar_zero.models import IMAGE_SHAPE, MODELS
from cifar_zero.optimizers import BY_DEEPSPEED, OFFLOADED_BY

MOST_NAME_BYTES = 200  # file systems end at 255, and a suffix may follow

CPU_RANK_BYTES = 1_000_000_000
"""Memory of one CPU rank of the smallest run (measured: 0.9 to 1.1 GB resident, torch 2.15 with DeepSpeed 0.19)."""


def check(run: Run) -> None:
    """Refuses what cannot run on this computer."""
    check_strategy(run)
    check_here(run)
    check_model(run)


def check_strategy(run: Run) -> None:
    """Refuses what the strategy cannot do on any computer."""
    strategy_rules.check_devices(run)
    strategy_rules.check_optimizer(run)
    strategy_rules.check_switches(run)
    strategy_rules.check_model_parallel(run)
    strategy_rules.check_experts(run)
    strategy_rules.check_averaging(run)


def check_values(settings: Settings) -> None:
    """Refuses values of the right type that make no sense on any machine."""
    recipe, placement, output = settings.recipe, settings.placement, settings.output
    if placement.strategy not in (*STRATEGIES, AUTO):
        meant = nearest(placement.strategy, [*STRATEGIES, AUTO])
        raise UsageError(f"unknown strategy {placement.strategy!r}: {meant}")
    if recipe.lora != LoRAConfig() and recipe.lora.rank < 1:
        raise UsageError(f"--lora.rank must be at least 1, not {recipe.lora.rank}")
    if recipe.lora.rank and not recipe.lora.target:
        raise UsageError("--lora.rank needs --lora.target: names of linear layers such as 'blocks.*.attention.qkv'")
    _check_numbers(settings)
    if recipe.max_steps == 0:
        raise UsageError("--max_steps must be at least 1, or -1 for no limit, not 0")
    if recipe.only_measures and output.resume:
        raise UsageError("--bench_steps starts at the first step: leave --resume out")
    if placement.ds_config and placement.strategy != Placement.strategy:
        raise UsageError("--ds_config replaces the strategy: leave --strategy out")
    if recipe.ema and recipe.swa_from:
        raise UsageError("--ema and --swa_from cannot be combined: leave one of them out")
    if recipe.reduce_on_plateau and recipe.schedule.name != "constant":
        raise UsageError(f"--reduce_on_plateau needs --schedule constant: leave --schedule {recipe.schedule.name} out")
    if recipe.delta and not recipe.weights:
        raise UsageError(f"--delta {recipe.delta} needs --weights: those that the run which wrote it started from")
    _check_images(settings)
    for flag in of_validation(settings):
        if not settings.data.val_fraction:
            raise UsageError(f"--{flag} needs validation images: set --data.val_fraction above 0")
        if recipe.trainer.get("limit_val_batches") == 0:
            raise UsageError(f"--{flag} needs validation: leave --trainer.limit_val_batches out")
    check_plain_name(output.name)
    if output.plot_schedule and not output.plot_schedule.endswith(".png"):  # a recipe must not replace other files
        raise UsageError(f"--plot_schedule {output.plot_schedule}: give the name of a .png file")


def _check_numbers(settings: Settings) -> None:
    """Refuses numbers beyond their limits, in the settings and in the options of model, optimizer and schedule."""
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
        raise UsageError(f"--data.image_size {side} needs --data.source folder: all other images have 32 x 32 pixels")
    for option, most in (("crop", side // 2), ("cutout", side)):
        if getattr(augment, option) > most:
            raise UsageError(f"--augment.{option} must be at most {most}, for images of {side} x {side} pixels")
    if settings.data.loader == "torch" and augment != AugmentConfig():
        given = next(field.name for field in fields(augment) if getattr(augment, field.name) != field.default)
        raise UsageError(f"--augment.{given} needs --data.loader memory: the torch loader does not augment")


def of_validation(settings: Settings) -> list[str]:
    """Returns the flags that were given and need a validation."""
    names, defaults = ("early_stopping", "reduce_on_plateau", "monitor", "save_top_k"), Settings()
    return [name for name in names if settings.option(name) != defaults.option(name)]


def check_plain_name(name: str) -> None:
    """Refuses a --name with a directory in it, or that cannot be a folder's; an empty one is fine."""
    if not name.isprintable() or len(os.fsencode(name)) > MOST_NAME_BYTES:
        raise UsageError(f"--name {short(repr(name), 60)} must be one line of at most {MOST_NAME_BYTES} bytes")
    if name and (Path(name).name != name or name in (".", "..")):
        raise UsageError(f"--name {name} must be a plain name: give the directory with --out")


def check_model(run: Run) -> None:
    """Refuses a model that cannot train on these micro-batches; runs a model of another package to find out."""
    model, side = run.recipe.model, run.data.image_size
    if model.options.get("batch_norm") and run.micro_batch == 1:
        raise UsageError("--model.batch_norm normalises over the micro-batch, a single image here: raise --batch_size")
    if model.name == "speednet" and run.recipe.init != "default":
        raise UsageError(f"--model speednet has its own initialisation: leave --init {run.recipe.init} out")
    if ":" in model.name or side != IMAGE_SHAPE[1]:
        from cifar_zero.models.external import check

        try:
            made = MODELS[model.name](**model.options)
            check(made, run.num_classes, (run.micro_batch, IMAGE_SHAPE[0], side, side))
        except ValueError as error:
            raise UsageError(f"--model {model.name}: {error}") from error


def check_here(run: Run) -> None:
    """Refuses what this computer lacks and another one may have."""
    devices, optimizer, spec = run.placement.devices, run.recipe.optimizer.name, run.spec
    assert devices != "auto"
    launched = "LOCAL_WORLD_SIZE" in os.environ  # the ranks of a launcher have already taken their memory
    if run.on_cpu and devices > 1 and not launched and devices * CPU_RANK_BYTES > (free := free_memory_bytes()):
        fit = max(1, free // CPU_RANK_BYTES)
        raise UsageError(f"--devices {devices}: a CPU rank takes about 1 GB, and this computer has memory for {fit}")
    packages = {"--logger wandb": "wandb"} if "wandb" in run.output.logger else {}
    if optimizer == "adam8bit":
        packages["--optimizer adam8bit"] = "bitsandbytes"
    for flag, package in packages.items():
        if importlib.util.find_spec(package) is None:
            raise UsageError(f"{flag} needs the package: pip install {package}")
    if (
        spec.size == "tensor_parallel_size"
        and run.placement.ranks_per_model > 1
        and Version(version("torch")) < Version("2.12")
    ):
        raise UsageError(
            f"{run.placement.strategy_name} splits layers, which torch {version('torch')} cannot: update torch"
        )
    compiles = spec.offload_optimizer and OFFLOADED_BY.get(optimizer) == BY_DEEPSPEED
    if compiles and not (shutil.which("g++") or shutil.which("c++")):
        raise UsageError(
            f"{run.placement.strategy_name} compiles a CPU {optimizer}: install g++ or use --optimizer sgd"
        )
    if spec.offload_optimizer == "nvme" and spec.raw is None:
        check_nvme(run.placement.nvme_path)
    if "nvme" in (spec.offload_optimizer, spec.offload_parameters) and not run.on_cpu:
        from torch.utils.cpp_extension import CUDA_HOME  # here: of torch, which has counted the GPUs

        if CUDA_HOME is None:  # DeepSpeed 0.19.8, ops/op_builder/async_io.py
            raise UsageError(
                "NVMe offload on a GPU is compiled against CUDA: install the CUDA toolkit of torch's version and set "
                "CUDA_HOME to it, or use deepspeed_stage_3_offload"
            )


def check_nvme(path: str) -> None:
    """Refuses a missing directory, and a computer without libaio, which DeepSpeed's I/O is compiled against."""
    if not path:
        raise UsageError("--strategy deepspeed_stage_3_offload_nvme needs --nvme_path DIRECTORY on a local disk")
    if not os.access(path, os.W_OK | os.X_OK):
        raise UsageError(f"--nvme_path {path} is not a writable directory")
    if not ctypes.util.find_library("aio") or not Path("/usr/include/libaio.h").exists():
        raise UsageError("NVMe offload needs libaio: apt-get install libaio-dev, or use deepspeed_stage_3_offload")
