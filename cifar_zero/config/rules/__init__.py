"""What can be refused before anything is launched is refused here, in one line that says what to use instead.

Nothing here imports torch, but on a machine with a GPU driver, and for a network of torchvision or timm.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from cifar_zero import data
from cifar_zero.checkpoints.resume import settle_resume
from cifar_zero.config.batch import micro_batch_size
from cifar_zero.config.flags import Choice, Config
from cifar_zero.config.rules.averaging import check_averaging
from cifar_zero.config.rules.devices import check_cuda_graphs, check_on_cpu, check_sync_batch_norm, settle_devices
from cifar_zero.config.rules.experts import check_experts
from cifar_zero.config.rules.finetuning import check_finetuning, settle_finetuning
from cifar_zero.config.rules.here import check_here
from cifar_zero.config.rules.network import check_network
from cifar_zero.config.rules.offload import check_resume, check_switches
from cifar_zero.config.rules.optimizer import check_offload, check_optimizer
from cifar_zero.config.rules.parts import check_parts
from cifar_zero.config.rules.raw_config import raw_config
from cifar_zero.config.strategy_specs import replicas
from cifar_zero.core.errors import UsageError
from cifar_zero.core.hardware import gpu_count
from cifar_zero.schedules import SCHEDULES


def settle(config: Config) -> None:
    """Settles what the configuration leaves to the machine (accelerator, devices, precision); refuses what cannot run.

    Raises:
        UsageError: says what is wrong and what to use instead.
    """
    settle_machine(config)
    micro_batch = micro_batch_size(config.batch_size, replicas(config), config.accumulate)
    num_classes = len(data.class_names(config.data))
    raw = raw_config(config.ds_config) if config.ds_config else {}
    if config.num_nodes == 1:  # else rank 0 decides for all: meeting.settle_resume
        settle_resume(config)
    if config.find_lr and config.schedule.name != "range_test":
        config.schedule = Choice("range_test", asdict(SCHEDULES["range_test"]()))
    settle_resumed(config)
    check_strategy(config, raw)
    check_network(config, micro_batch, num_classes)
    if config.trainer.get("sync_batchnorm"):
        check_sync_batch_norm(config)


def settle_resumed(config: Config) -> None:
    """Settles and refuses what depends on whether the run goes on; again where several machines find that out late.

    Raises:
        UsageError: the strategy cannot go on, or the weights to begin with are not there.
    """
    check_resume(config)
    settle_finetuning(config)


def settle_machine(config: Config) -> None:
    """Settles what the configuration leaves to the machine: accelerator, devices, precision.

    Raises:
        UsageError: there are not so many devices.
    """
    gpus = gpu_count() if config.accelerator != "cpu" else 0
    if config.accelerator == "gpu" and gpus == 0:
        raise UsageError("--accelerator gpu: no GPU here that torch can use; --accelerator cpu trains on the CPU")
    config.accelerator = "gpu" if gpus else "cpu"
    if config.precision == "auto":
        config.precision = "16-mixed" if gpus else "32-true"
    settle_devices(config, gpus)


def check_model(config: Config) -> None:
    """Refuses what a network cannot be, under whatever strategy.

    Args:
        config: of the run, its devices settled and its strategy one that spreads images over all ranks, or none yet.

    Raises:
        UsageError: names the option.
    """
    check_finetuning(config)
    micro_batch = micro_batch_size(config.batch_size, config.world_size, config.accumulate)
    check_network(config, micro_batch, len(data.class_names(config.data)))


def check_strategy(config: Config, raw: dict[str, Any]) -> None:
    """Refuses what the strategy cannot do.

    Args:
        config: of the run, its devices settled.
        raw: the content of --ds_config, empty without one.

    Raises:
        UsageError: names what to use instead.
    """
    check_possible(config, raw)
    check_here(config, raw)


def check_possible(config: Config, raw: dict[str, Any]) -> None:
    """Refuses what the strategy can do on no machine; see `check_strategy`."""
    if config.accelerator == "cpu":
        check_on_cpu(config)
    if config.cuda_graphs:
        check_cuda_graphs(config)
    check_optimizer(config, raw)
    check_offload(config)
    check_switches(config)
    if not config.ds_config:
        check_parts(config)
    if "ep_size" in config.model.options:
        check_experts(config, raw)
    if config.ema or config.swa_from:
        check_averaging(config, raw)
