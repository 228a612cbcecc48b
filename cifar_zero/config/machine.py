"""Decides what the configuration leaves open: accelerator, precision, number of ranks."""

import os
from dataclasses import replace

from cifar_zero.config.flags import Config
from cifar_zero.core.errors import UsageError
from cifar_zero.core.hardware import gpu_count


def on_this_machine(config: Config) -> Config:
    """Returns the configuration with accelerator, precision, devices and num_nodes decided.

    Raises:
        UsageError: there are too few devices, or a launcher started different numbers of ranks on the nodes.
    """
    gpus = gpu_count() if config.accelerator != "cpu" else 0
    if config.accelerator == "gpu" and gpus == 0:
        raise UsageError("--accelerator gpu: torch finds no usable GPU; use --accelerator cpu to train on the CPU")
    devices, num_nodes = _ranks(config, gpus)
    if gpus and devices > gpus:
        raise UsageError(f"--devices {devices}: this computer has {gpus} GPU{'s'[: gpus > 1]}")
    return replace(with_accelerator(config, gpus > 0), devices=devices, num_nodes=num_nodes)


def with_accelerator(config: Config, on_gpu: bool) -> Config:
    """Returns the configuration for GPUs or for the CPU, with auto precision replaced."""
    precision = config.precision if config.precision != "auto" else "16-mixed" if on_gpu else "32-true"
    return replace(config, accelerator="gpu" if on_gpu else "cpu", precision=precision)


def _ranks(config: Config, gpus: int) -> tuple[int, int]:
    """Returns the ranks on this node and the number of nodes, from the launcher that started this rank if one did."""
    if "LOCAL_WORLD_SIZE" in os.environ:
        devices = int(os.environ["LOCAL_WORLD_SIZE"])
        num_nodes, left = divmod(int(os.environ["WORLD_SIZE"]), devices)
        if left:
            raise UsageError(
                f"the launcher started {os.environ['WORLD_SIZE']} ranks, {devices} of them on this node: start the "
                "same number on each node"
            )
        return devices, num_nodes
    return max(1, gpus) if config.devices == "auto" else config.devices, config.num_nodes
