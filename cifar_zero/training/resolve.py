"""Turns the settings of a user into the resolved run. This module decides accelerator, devices and nodes.

`planning/estimates.py` decides --strategy auto, `config/run.py` --precision auto, and `checkpoints/resume.py` --resume
last and auto. `training/starting.py` decides --data.source auto, and for several nodes or torchrun the checkpoint.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from cifar_zero import data
from cifar_zero.checkpoints import run_folder
from cifar_zero.checkpoints.resume import checkpoint_to_resume
from cifar_zero.config import command_line, ds_config, rules, strategy_rules
from cifar_zero.config.run import Run, with_accelerator
from cifar_zero.config.settings import Settings
from cifar_zero.core.console import say
from cifar_zero.core.errors import UsageError
from cifar_zero.core.hardware import core_count, gpu_count, has_bfloat16
from cifar_zero.launch import rank_environment

LEAST_MICRO_BATCH = 32
"""Smallest number of images in a micro-batch for which --devices auto uses more than one GPU. With fewer images a GPU
waits for its kernels to be launched and for the other GPUs, whatever the model."""

CPU_RANKS = 2
"""Number of CPU ranks that --devices auto uses if the strategy shards or splits the model. One rank shards nothing."""

TINY_MICRO_BATCH = 4
"""Largest number of images in a micro-batch for which `announce` recommends a larger batch if the strategy is ZeRO. The
batches of PyTorch's tutorial "Training a Classifier" have this size."""


def resolve(settings: Settings) -> Run:
    """Resolves the settings for this computer, and returns the run. The strategy must be a name, not auto. Also sets or
    removes the environment variable DS_ACCELERATOR, from which DeepSpeed takes the device type in this process and in
    the ranks that it starts. Raises UsageError, with an alternative, if the run is not possible.

    Rank 0 decides two things later, for all ranks: which images --data.source auto uses and, with several nodes or
    under torchrun, which checkpoint is resumed (see `training.starting`).
    """
    run = make_run(resolve_devices(settings))
    if not rank_0_decides(run):
        run = with_checkpoint(run, checkpoint_to_resume(run))
    rules.check(run)
    if run.recipe.augment.transform:
        from cifar_zero.data.augment import check_transform  # here, because it imports torch

        check_transform(run.recipe.augment, run.data.inputs.side)
    # DeepSpeed is imported later, and without the variable it uses CUDA on every computer with a GPU (DeepSpeed 0.19.8,
    # accelerator/real_accelerator.py).
    os.environ.pop("DS_ACCELERATOR", None)
    if run.on_cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
    return run


def announce(run: Run) -> None:
    """Prints a line that describes the run. Warns if there are fewer cores than CPU ranks on this computer. Hints at
    alternatives if the strategy shards or splits the model on one CPU rank or, unless the run is a benchmark, if
    several ranks use ZeRO with micro-batches of at most TINY_MICRO_BATCH images."""
    ranks, placement = run.placement.world_size, run.placement
    what = f"model {run.recipe.model.name}, strategy {placement.strategy_name}, data {run.data.source}"
    say(f"starting: {what}, batch size {run.recipe.batch_size}, ranks {ranks} ({placement.accelerator})")
    if run.on_cpu:
        warn_of_few_cores(ranks // placement.num_nodes)
    if run.spec.shards_tensors and ranks == 1 and run.on_cpu:
        what = "ZeRO" if run.spec.stage else placement.strategy_name
        say(f"1 rank: {what} shards nothing; --devices 2 shards over two CPU ranks")
    elif run.spec.stage and ranks > 1 and run.micro_batch <= TINY_MICRO_BATCH and not run.recipe.only_measures:
        say(
            f"note: with {run.micro_batch} images per micro-batch, ranks mostly exchange messages; ZeRO pays off "
            "with larger batches, such as --batch_size 256"
        )


def warn_of_few_cores(ranks: int) -> None:
    if ranks > (cores := core_count()):
        shared = "1 core" if cores == 1 else f"{cores} cores"
        say(f"warning: {ranks} CPU ranks share {shared}: use --devices {cores} so that each rank has a core")


def resolve_devices(settings: Settings, strategies: Sequence[str] = ()) -> Settings:
    """Returns the settings with accelerator, precision, devices and num_nodes decided. `strategies` are the names from
    which the run's strategy will be chosen later. If it is empty, the settings name the strategy. Raises UsageError if
    there are too few devices, or if a launcher started different numbers of ranks on the nodes."""
    gpus = gpu_count() if settings.placement.accelerator != "cpu" else 0
    if settings.placement.accelerator == "gpu" and gpus == 0:
        raise UsageError("--accelerator gpu: torch finds no usable GPU; use --accelerator cpu to train on the CPU")
    settings = with_accelerator(settings, gpus > 0, has_bfloat16)
    devices, num_nodes = settings.placement.devices, settings.placement.num_nodes
    if launched := rank_environment.variables():
        devices = int(launched["LOCAL_WORLD_SIZE"])
        num_nodes, left = divmod(int(launched["WORLD_SIZE"]), devices)
        if left:
            raise UsageError(
                f"the launcher started {launched['WORLD_SIZE']} ranks, {devices} of them on this node: start the "
                "same number on each node"
            )
    elif devices == "auto":
        devices = _most_devices(settings, strategies or [settings.placement.strategy], gpus)
    if gpus and devices > gpus:
        raise UsageError(f"--devices {devices}: this computer has only {'1 GPU' if gpus == 1 else f'{gpus} GPUs'}")
    return settings.changed(devices=devices, num_nodes=num_nodes)


def _most_devices(settings: Settings, strategies: Sequence[str], gpus: int) -> int:
    """Returns the number of devices for --devices auto, or 1 if the run is not possible on any number.

    On GPUs, this is the largest number on which the run is possible under one of `strategies`, with micro-batches of at
    least LEAST_MICRO_BATCH images if there are several replicas. If there are several GPUs, prints the number, and why
    not all are used.

    On the CPU, one strategy gets CPU_RANKS if it shards or splits the model and the run is possible on as many ranks,
    otherwise 1. Several strategies get 1 if one of them is possible on one rank, otherwise CPU_RANKS.
    """
    counts = [*range(gpus, 0, -1)]
    if not gpus:
        counts = [1, CPU_RANKS]
        if len(strategies) == 1:
            counts = [CPU_RANKS, 1] if ds_config.spec_of(settings.placement).shards_tensors else [1]
    why_not_all = ""
    for devices in counts:
        try:
            run = _possible([make_run(settings.changed(devices=devices, strategy=name)) for name in strategies])
            if gpus and run.placement.replicas > 1 and run.micro_batch < LEAST_MICRO_BATCH:
                raise UsageError(
                    f"a micro-batch of {run.micro_batch} images is too small to keep a GPU busy; --devices {devices} "
                    f"uses {devices} GPUs anyway"
                )
        except UsageError as error:
            why_not_all = why_not_all or f": {error}"
            continue
        if gpus > 1:
            _say_once(f"--devices auto: {devices} of {gpus} GPUs{why_not_all}")
        return devices
    return 1


def _possible(runs: Sequence[Run]) -> Run:
    """Returns the first of `runs`, which differ only in their strategies, that is possible on this computer. Raises
    UsageError if none is, with the reason for the first of `runs`."""
    for run in runs:
        with suppress(UsageError):
            strategy_rules.check_strategy(run)
            rules.check_here(run)
            break
    else:
        run = runs[0]
    rules.check(run)
    return run


_say_once = cache(say)  # a process may resolve several runs


def rank_0_decides(settings: Settings) -> bool:
    """Returns whether rank 0 must decide for all ranks which checkpoint is resumed: on several nodes, and under
    torchrun, because torchrun may restart the ranks."""
    return settings.placement.num_nodes > 1 or rank_environment.by_torchrun()


def make_run(settings: Settings) -> Run:
    """Returns the run for settings in which accelerator, devices and precision are decided. Raises UsageError if the
    batch cannot be divided into equal micro-batches, or if the images or the file of --ds_config cannot be used."""
    run = Run(**vars(settings), num_classes=len(data.class_names(settings.data)))
    strategy_rules.check_micro_batch(run)
    return run


def with_checkpoint(run: Run, resume: str) -> Run:
    """Returns the run with the path of the checkpoint that it resumes (empty for a new run), and with the absolute path
    of the weights from which it starts. A resumed run keeps the image source with which it began, even under
    --data.source auto. Raises UsageError if the strategy cannot resume, or if the weights do not exist."""
    run, recipe = run.changed(resume=resume), run.recipe
    if resume and (file := run_folder.recipe_of(Path(resume))):
        run = run.with_images_of(command_line.read_recipe(file).get("data.source", "auto"))
    if recipe.weights:
        weights = Path(recipe.weights)
        if not resume:
            weights = run_folder.find_checkpoint(recipe.weights)
        run = run.changed(weights=str(weights.absolute()))
    strategy_rules.check_can_resume(run)
    return run
