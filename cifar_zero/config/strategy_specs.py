"""The registry of strategies: how a run is spread over ranks, and what of it is sharded or offloaded.

A name that Lightning has too (ddp, fsdp, deepspeed_stage_2, ...) has the same meaning as there; `fsdp` runs torch's
FSDP2, to which torch tells users of its FullyShardedDataParallel to migrate. Plain data: no torch, Lightning or
DeepSpeed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from cifar_zero.config.flags import Config


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


def replicas(config: Config) -> int:
    """Networks that a run trains on images of their own: one a rank, or one in all.

    Args:
        config: of the run, its devices a number.
    """
    split = STRATEGIES[config.strategy].one_replica and not config.ds_config
    return 1 if split else config.world_size
