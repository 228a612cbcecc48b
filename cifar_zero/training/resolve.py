"""From what a user asks for to the resolved run: the only place where open settings are decided."""

import os
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
"""Images of a micro-batch from which --devices auto uses a second GPU: with fewer, a GPU waits for its kernels to be
launched and for the other GPUs, whatever the model."""

TINY_MICRO_BATCH = 4
"""Images of a micro-batch, the tutorial's number, up to which `announce` recommends a ZeRO run a larger batch."""


def resolve(settings: Settings) -> Run:
    """Returns the resolved run of what is asked for on this computer. With several nodes, or under torchrun, rank 0
    decides later for all ranks what is resumed, and for --data.source auto on which images: see `training.starting`.
    The strategy must be a name, not auto. Raises UsageError: it cannot run; says what to use instead."""
    run = make_run(resolve_devices(settings))
    if not rank_0_decides(run):
        run = with_checkpoint(run, checkpoint_to_resume(run))
    rules.check(run)
    if run.recipe.augment.transform:
        from cifar_zero.data.augment import check_transform  # here: it imports torch

        check_transform(run.recipe.augment, run.data.inputs.side)
    # For DeepSpeed, which is imported later, here or in the ranks: it takes CUDA wherever there is a GPU (DeepSpeed
    # 0.19.8, accelerator/real_accelerator.py).
    os.environ.pop("DS_ACCELERATOR", None)
    if run.on_cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
    return run


def announce(run: Run) -> None:
    """Prints in one line what is started, a warning of too few cores, and under ZeRO one of a tiny micro-batch."""
    ranks, placement = run.placement.world_size, run.placement
    what = f"model {run.recipe.model.name}, strategy {placement.strategy_name}, data {run.data.source}"
    say(f"starting: {what}, batch size {run.recipe.batch_size}, ranks {ranks} ({placement.accelerator})")
    if run.on_cpu:
        warn_of_few_cores(ranks // placement.num_nodes)
    if run.spec.stage and run.micro_batch <= TINY_MICRO_BATCH and not run.recipe.only_measures:
        say(
            f"note: with {run.micro_batch} images per micro-batch a step is mostly messages between the ranks; ZeRO is "
            "for larger batches, such as --batch_size 256"
        )


def warn_of_few_cores(ranks: int) -> None:
    """Warns of more CPU ranks on this computer than cores."""
    if ranks > (cores := core_count()):
        say(f"warning: {ranks} CPU ranks take turns on {cores} cores: with --devices {cores} each has its own")


def resolve_devices(settings: Settings) -> Settings:
    """Returns the settings with accelerator, precision, devices and num_nodes decided. Raises UsageError if there are
    too few devices, or a launcher started different numbers of ranks on the nodes."""
    gpus = gpu_count() if settings.placement.accelerator != "cpu" else 0
    if settings.placement.accelerator == "gpu" and gpus == 0:
        raise UsageError("--accelerator gpu: torch finds no usable GPU; use --accelerator cpu to train on the CPU")
    settings = with_accelerator(settings, gpus > 0, has_bfloat16)
    devices, num_nodes = settings.placement.devices, settings.placement.num_nodes
    if place := rank_environment.variables():
        devices = int(place["LOCAL_WORLD_SIZE"])
        num_nodes, left = divmod(int(place["WORLD_SIZE"]), devices)
        if left:
            raise UsageError(
                f"the launcher started {place['WORLD_SIZE']} ranks, {devices} of them on this node: start the "
                "same number on each node"
            )
    elif devices == "auto":
        devices = _most_devices(settings, gpus)
    if gpus and devices > gpus:
        raise UsageError(f"--devices {devices}: this computer has {'1 GPU' if gpus == 1 else f'{gpus} GPUs'}")
    return settings.changed(devices=devices, num_nodes=num_nodes)


def _most_devices(settings: Settings, gpus: int) -> int:
    """Returns the largest number of GPUs on which the run is accepted, and prints why that is not all; 1 on the CPU."""
    why_not_all = ""
    for devices in range(gpus, 0, -1):
        try:
            run = make_run(settings.changed(devices=devices))
            rules.check(run)
            if run.placement.replicas > 1 and run.micro_batch < LEAST_MICRO_BATCH:
                raise UsageError(f"a micro-batch of {run.micro_batch} is small for a GPU, --devices {devices} takes it")
        except UsageError as error:
            why_not_all = why_not_all or f": {error}"
            continue
        if gpus > 1:
            _say_once(f"--devices auto: {devices} of {gpus} GPUs{why_not_all}")
        return devices
    return 1


_say_once = cache(say)  # a process may resolve several runs


def rank_0_decides(settings: Settings) -> bool:
    """Returns whether the ranks must meet to know what is resumed: on several nodes, or if torchrun restarts them."""
    return settings.placement.num_nodes > 1 or rank_environment.by_torchrun()


def make_run(settings: Settings) -> Run:
    """Returns the run of settings whose accelerator, devices and precision are decided. Raises UsageError: the batch
    cannot be divided, or the images or a raw DeepSpeed configuration cannot be used."""
    spec = ds_config.spec_of(settings.placement)
    run = Run.of(settings, spec, num_classes=len(data.class_names(settings.data)))
    strategy_rules.check_micro_batch(run)
    return run


def with_checkpoint(run: Run, resume: str) -> Run:
    """Returns the run with the path of the checkpoint that it resumes, empty for none, or of weights to start from. A
    resumed run has the images that it began on, also for --data.source auto. Raises UsageError: the strategy cannot
    resume, or the weights or the delta do not exist."""
    run, recipe = run.changed(resume=resume), run.recipe
    if resume and (file := run_folder.recipe_of(Path(resume))):
        run = run.with_images_of(command_line.read_recipe(file).get("data.source", "auto"))
    if recipe.weights:
        weights = Path(recipe.weights)
        if not resume:
            weights = run_folder.find_checkpoint(recipe.weights)
        if recipe.delta and not Path(recipe.delta).is_file():
            raise UsageError(f"--delta {recipe.delta} is not a file")
        delta = recipe.delta and str(Path(recipe.delta).absolute())
        run = run.changed(weights=str(weights.absolute()), delta=delta)
    strategy_rules.check_can_resume(run)
    return run
