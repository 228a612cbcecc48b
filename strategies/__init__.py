"""The registry of strategies: how a run is spread over ranks, and what of it is sharded or offloaded.

A name that Lightning has too (ddp, fsdp, deepspeed_stage_2, ...) means here what it means there; `fsdp` runs torch's
FSDP2, to which torch tells users of its FullyShardedDataParallel to migrate. Reading the registry
imports neither torch, Lightning nor DeepSpeed; `build` imports the one family that a run needs.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy
    from torch.distributed import ProcessGroup
    from torch.nn import Module

    from config import Config
    from optimizers import Implementation


@dataclass(frozen=True)
class Spec:
    """What a strategy's name stands for.

    Attributes:
        family: the module of this package that builds it.
        summary: one line for the help and the documentation.
        stage: ZeRO stage; 0 shards nothing.
        offload_optimizer: where the optimizer's state and update go when not on the rank's device.
        offload_parameters: where the parameters rest when not on the rank's device.
        super_offload: DeepSpeed's SuperOffload, for CPU-GPU links as fast as a GH200's.
        one_replica: whether all ranks together hold one network and compute the same images.
    """

    family: Literal["baseline", "deepspeed", "fsdp2", "tensor_parallel", "pipeline"]
    summary: str
    stage: int = 0
    offload_optimizer: Literal["", "cpu", "nvme"] = ""
    offload_parameters: Literal["", "cpu", "nvme"] = ""
    super_offload: bool = False
    one_replica: bool = False


STRATEGIES: dict[str, Spec] = {
    "baseline": Spec("baseline", "plain PyTorch on one device, DDP where there are several"),
    "ddp": Spec("baseline", "torch's DistributedDataParallel: every rank holds everything"),
    "deepspeed_stage_0": Spec("deepspeed", "DeepSpeed's engine, nothing sharded"),
    "deepspeed_stage_1": Spec("deepspeed", "ZeRO 1: optimizer state sharded", stage=1),
    "deepspeed_stage_1_offload": Spec("deepspeed", "ZeRO 1, optimizer on the CPU", stage=1, offload_optimizer="cpu"),
    "deepspeed_stage_2": Spec("deepspeed", "ZeRO 2: optimizer state and gradients sharded", stage=2),
    "deepspeed_stage_2_offload": Spec("deepspeed", "ZeRO 2, optimizer on the CPU", stage=2, offload_optimizer="cpu"),
    "deepspeed_stage_3": Spec("deepspeed", "ZeRO 3: optimizer state, gradients and parameters sharded", stage=3),
    "deepspeed_stage_3_offload": Spec(
        "deepspeed", "ZeRO 3, optimizer and parameters on the CPU", 3, offload_optimizer="cpu", offload_parameters="cpu"
    ),
    "deepspeed_stage_3_offload_nvme": Spec(
        "deepspeed", "ZeRO 3, optimizer and parameters on disk", 3, offload_optimizer="nvme", offload_parameters="nvme"
    ),
    "deepspeed_stage_3_superoffload": Spec(
        "deepspeed", "ZeRO 3, SuperOffload to the CPU (CUDA)", 3, offload_optimizer="cpu", super_offload=True
    ),
    "fsdp2": Spec("fsdp2", "torch's fully_shard (FSDP2): optimizer state, gradients and parameters sharded"),
    "fsdp": Spec("fsdp2", "the same as fsdp2: torch replaces FullyShardedDataParallel by it"),
    "tensor_parallel": Spec(
        "tensor_parallel", "each layer of a vit_* cut over the ranks, which compute the same images", one_replica=True
    ),
    "pipeline": Spec(
        "pipeline", "the blocks of a vit_* shared out over the ranks, one after the other", one_replica=True
    ),
}

AUTO = "auto"
"""In place of a name: the one that planning recommends, which train.py puts there before anything is launched."""


def build(config: Config, on_cpu: bool, micro_batch_size: int, num_parameters: int) -> Strategy | str:
    """Lightning's strategy for a run.

    Args:
        config: of the run, its devices a number; its strategy is a key of STRATEGIES, unless ds_config names a raw
            DeepSpeed configuration.
        on_cpu: whether the ranks are CPU processes.
        micro_batch_size: images per rank and micro-batch.
        num_parameters: of the network, in elements.
    """
    family = "deepspeed" if config.ds_config else STRATEGIES[config.strategy].family
    return import_module(f"strategies.{family}").build(config, on_cpu, micro_batch_size, num_parameters)


def replicas(config: Config) -> int:
    """Networks that a run trains on images of their own: one a rank, or one in all.

    Args:
        config: of the run, its devices a number.
    """
    split = STRATEGIES[config.strategy].one_replica and not config.ds_config
    return 1 if split else config.world_size


def replica(strategy: Strategy) -> tuple[int, int]:
    """How many replicas of the network train on images of their own, and which of them this rank is, or is a part of.

    To be called when the ranks have found each other.
    """
    kwargs = getattr(strategy, "distributed_sampler_kwargs", {"num_replicas": 1, "rank": 0})
    return kwargs["num_replicas"], kwargs["rank"]


def data_group(strategy: Strategy) -> ProcessGroup | None:
    """One rank of each replica, this one among them, which together see each image once; None for all ranks."""
    mesh = getattr(strategy, "device_mesh", None)
    return None if mesh is None else mesh["data_parallel"].get_group()


def optimizer_implementation(strategy: Strategy, device_type: str, clips: bool) -> Implementation:
    """The optimizer that a strategy runs: DeepSpeed's CPU optimizer where it is offloaded, DeepSpeed's fused one on
    CUDA where it can be compiled, else torch's.

    torch's fused optimizer updates all parameters in one call. It is used on CUDA: on the CPU it rounds an element at
    the end of a tensor differently from one in its middle (torch 2.15), so that sharding would change the weights.
    Under autocast it is used only without a gradient scaler and without clipping: Lightning (2.6.6) does not clip the
    gradients of a fused optimizer there, in bfloat16 either.

    Args:
        strategy: of the run.
        device_type: of the ranks' devices: cuda or cpu.
        clips: whether gradients are clipped.
    """
    from lightning.pytorch.plugins.precision import MixedPrecision

    own = getattr(strategy, "optimizer_implementation", None)
    if own is not None:
        return own(device_type)
    precision = strategy.precision_plugin
    refused = isinstance(precision, MixedPrecision) and (clips or precision.scaler is not None)
    return "torch_fused" if device_type == "cuda" and not refused else "torch"


def parameter_groups(strategy: Strategy, module: Module, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """An optimizer's groups of a network's parameters, split further where the strategy has to tell them apart."""
    own = getattr(strategy, "parameter_groups", None)
    return own(module, groups) if own is not None else groups


def rewriting(strategy: Strategy) -> AbstractContextManager[None]:
    """Within it the weights that a rank holds may be given other values; to be entered by all ranks."""
    own = getattr(strategy, "rewriting", None)
    return own() if own is not None else nullcontext()
