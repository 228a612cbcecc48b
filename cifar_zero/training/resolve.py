"""From the configuration to the resolved run: the only place where open settings are decided."""

import os
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

from cifar_zero import data
from cifar_zero.checkpoints import run_folder
from cifar_zero.checkpoints.resume import checkpoint_to_resume
from cifar_zero.config import ds_config, rules
from cifar_zero.config.flags import Choice, Config
from cifar_zero.config.run import NO_CONSENT, Consent, Run, with_accelerator
from cifar_zero.config.strategy_specs import STRATEGIES
from cifar_zero.core.console import say
from cifar_zero.core.errors import UsageError
from cifar_zero.core.hardware import core_count, gpu_count, has_bfloat16, has_gpu_driver
from cifar_zero.launch import heartbeat, rank_environment
from cifar_zero.schedules import SCHEDULES

LEAST_MICRO_BATCH = 32
"""Images of a micro-batch from which --devices auto uses a second GPU: with fewer, a GPU waits for its kernels to be
launched and for the other GPUs, whatever the model."""


def resolve(config: Config, consent: Consent = NO_CONSENT, starts: bool = False) -> Run:
    """Returns the resolved run of a configuration on this computer; if it `starts` now, says so as soon as it can. With
    several nodes, or under torchrun, rank 0 decides later for all ranks what is resumed: see `training.starting`. The
    strategy must be a name, not auto. Raises UsageError: it cannot run; says what to use instead."""
    starts = starts and rank_environment.global_rank() == 0 and heartbeat.VARIABLE not in os.environ  # the launcher did
    if starts:
        run_folder.check_writable(config.out, config.run_name)
    on_gpu = has_gpu_driver()
    if starts and on_gpu:
        _announce(config)  # to count the GPUs takes seconds
    run = of_machine(on_this_machine(config), consent)
    if not rank_0_decides(run.config):
        run = with_checkpoint(run, checkpoint_to_resume(run.config))
    rules.check(run, (lambda run: _announce(run.config)) if starts and not on_gpu else None)
    if run.config.augment.transform:
        from cifar_zero.data.policy import check_transform  # here: it imports torch

        check_transform(run.config.augment, run.config.data.inputs.side)
    # For DeepSpeed, which is imported later, here or in the ranks: it takes CUDA wherever there is a GPU (DeepSpeed
    # 0.19.8, accelerator/real_accelerator.py).
    os.environ.pop("DS_ACCELERATOR", None)
    if run.on_cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
    return run


def _announce(config: Config) -> None:
    """Prints in one line what is started."""
    ranks = config.devices if config.devices == "auto" else config.world_size
    cpu = config.accelerator == "cpu" or not has_gpu_driver()
    kind = "all GPUs" if ranks == "auto" else f"{ranks} {'CPU process' if cpu else 'GPU'}"
    kind += ("es" if cpu else "s") * (ranks not in (1, "auto"))
    source = "CIFAR-10 or else the digits" if config.data.source == "auto" else config.data.source
    what = f"model {config.model.name}, strategy {config.strategy_name}, {kind}, data {source}"
    say(f"starting: {what}, batch size {config.batch_size}")
    if cpu and isinstance(config.devices, int):
        warn_of_few_cores(config.devices)


def warn_of_few_cores(ranks: int) -> None:
    """Warns of more CPU ranks on this computer than cores."""
    if ranks > (cores := core_count()):
        say(f"warning: {ranks} CPU ranks take turns on {cores} cores: with --devices {cores} each has its own")


def on_this_machine(config: Config) -> Config:
    """Returns the configuration with accelerator, precision, devices and num_nodes decided. Raises UsageError if there
    are too few devices, or a launcher started different numbers of ranks on the nodes."""
    gpus = gpu_count() if config.accelerator != "cpu" else 0
    if config.accelerator == "gpu" and gpus == 0:
        raise UsageError("--accelerator gpu: torch finds no usable GPU; use --accelerator cpu to train on the CPU")
    config = with_accelerator(config, gpus > 0, has_bfloat16)
    devices, num_nodes = config.devices, config.num_nodes
    if place := rank_environment.variables():
        devices = int(place["LOCAL_WORLD_SIZE"])
        num_nodes, left = divmod(int(place["WORLD_SIZE"]), devices)
        if left:
            raise UsageError(
                f"the launcher started {place['WORLD_SIZE']} ranks, {devices} of them on this node: start the "
                "same number on each node"
            )
    elif devices == "auto":
        devices = _most_devices(config, gpus)
    if gpus and devices > gpus:
        raise UsageError(f"--devices {devices}: this computer has {gpus} GPU{'s'[: gpus > 1]}")
    return replace(config, devices=devices, num_nodes=num_nodes)


def _most_devices(config: Config, gpus: int) -> int:
    """Returns the largest number of GPUs on which the run is accepted, and prints why that is not all; 1 on the CPU."""
    why_not_all = ""
    for devices in range(gpus, 0, -1):
        try:
            run = of_machine(replace(config, devices=devices))
            rules.check(run)
            if run.replicas > 1 and run.micro_batch < LEAST_MICRO_BATCH:
                raise UsageError(f"a micro-batch of {run.micro_batch} is small for a GPU, --devices {devices} takes it")
        except UsageError as error:
            why_not_all = why_not_all or f": {error}"
            continue
        if gpus > 1:
            _say_once(f"--devices auto: {devices} of {gpus} GPUs{why_not_all}")
        return devices
    return 1


_say_once = cache(say)  # a process may resolve several runs


def rank_0_decides(config: Config) -> bool:
    """Returns whether the ranks must meet to know what is resumed: on several nodes, or if torchrun restarts them."""
    return config.num_nodes > 1 or rank_environment.by_torchrun()


def of_machine(config: Config, consent: Consent = NO_CONSENT) -> Run:
    """Returns the run of a configuration whose accelerator, devices and precision are decided. Raises UsageError: the
    batch cannot be divided, or the images or a raw DeepSpeed configuration cannot be used."""
    if config.find_lr and config.schedule.name != "range_test":
        config = replace(config, schedule=Choice("range_test", asdict(SCHEDULES["range_test"]())))
    spec = ds_config.spec_of(config.ds_config) if config.ds_config else STRATEGIES[config.strategy]
    run = Run(config, spec, num_classes=len(data.class_names(config.data)), consent=consent)
    _ = run.micro_batch
    rules.check_finetuning(config)
    return run


def with_checkpoint(run: Run, resume: str) -> Run:
    """Returns the run with the path of the checkpoint that it resumes, empty for none, or of weights to start from.
    Raises UsageError: the strategy cannot resume, or the weights do not exist."""
    config = replace(run.config, resume=resume)
    if config.weights:
        file = Path(config.weights) if resume else run_folder.find_checkpoint(config.weights)
        delta = config.delta and str(Path(config.delta).absolute())
        config = replace(config, weights=str(file.absolute()), delta=delta)
    run = replace(run, config=config)
    rules.check_can_resume(run)
    return run
