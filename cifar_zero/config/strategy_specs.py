"""The registry of strategies: how each one spreads a run over ranks, what it shards or offloads, and which options it
supports. Imports no torch, Lightning or DeepSpeed.

Names that Lightning has too (ddp, deepspeed_stage_2, ...) mean the same as in Lightning. Only `fsdp` runs torch's
FSDP2, because torch tells users of FullyShardedDataParallel to migrate to FSDP2. A raw DeepSpeed configuration can
replace a strategy (ds_config.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Device = Literal["", "cpu", "nvme"]  # where something is offloaded to; if empty, it stays on the rank's device


@dataclass(frozen=True)
class Spec:
    family: Literal["baseline", "deepspeed", "fsdp2", "tensor_parallel", "pipeline"]  # its code in `strategies`
    summary: str  # one line for the help and the documentation
    stage: int = 0  # ZeRO stage; 0 shards nothing
    offload_optimizer: Device = ""  # where the optimizer's state is kept and updated
    offload_parameters: Device = ""  # where parameters are kept while no layer uses them
    super_offload: bool = False  # DeepSpeed's SuperOffload, for CPU-GPU links as fast as a GH200's
    size: Literal["", "tensor_parallel_size", "pipeline_parallel_size"] = ""  # option for the number of ranks per model
    one_replica: bool = False  # whether the option in `size` means all ranks if it is 0
    raw: Mapping[str, Any] | None = None  # content of a raw DeepSpeed configuration (--ds_config)

    @property
    def splits_model(self) -> bool:
        """Whether the strategy splits or shards the model with torch's own APIs. Such a strategy has no loss scaling
        and cannot average weights."""
        return self.family not in ("baseline", "deepspeed")

    @property
    def shards_tensors(self) -> bool:
        """Whether a rank holds only parts of the parameters or of the optimizer state."""
        return self.splits_model or self.stage > 0

    @property
    def casts(self) -> bool:
        """Whether mixed precision casts the model to 16 bits, instead of running it under autocast."""
        return self.family in ("deepspeed", "fsdp2")

    @property
    def averages(self) -> bool:
        """Whether --ema can average the weights."""
        return not self.splits_model and self.offload_parameters != "nvme"

    @property
    def graphs(self) -> bool:
        """Whether --cuda_graphs can record the training steps, which needs parameters at constant memory addresses."""
        return not self.splits_model and self.stage < 3 and self.raw is None


STRATEGIES: dict[str, Spec] = {
    "baseline": Spec("baseline", "plain PyTorch on one device, DDP on several"),
    "ddp": Spec("baseline", "torch's DistributedDataParallel: every rank holds everything"),
    "deepspeed_stage_0": Spec("deepspeed", "DeepSpeed's engine, nothing sharded"),
    "deepspeed_stage_1": Spec("deepspeed", "ZeRO 1: optimizer state sharded", stage=1),
    "deepspeed_stage_1_offload": Spec("deepspeed", "ZeRO 1, optimizer on the CPU", stage=1, offload_optimizer="cpu"),
    "deepspeed_stage_2": Spec("deepspeed", "ZeRO 2: optimizer state and gradients sharded", stage=2),
    "deepspeed_stage_2_offload": Spec("deepspeed", "ZeRO 2, optimizer on the CPU", stage=2, offload_optimizer="cpu"),
    "deepspeed_stage_3": Spec("deepspeed", "ZeRO 3: optimizer state, gradients and parameters sharded", stage=3),
    "deepspeed_stage_3_offload": Spec(
        "deepspeed",
        "ZeRO 3, optimizer and parameters on the CPU",
        stage=3,
        offload_optimizer="cpu",
        offload_parameters="cpu",
    ),
    "deepspeed_stage_3_offload_nvme": Spec(
        "deepspeed",
        "ZeRO 3, optimizer and parameters on disk",
        stage=3,
        offload_optimizer="nvme",
        offload_parameters="nvme",
    ),
    "deepspeed_stage_3_superoffload": Spec(
        "deepspeed", "ZeRO 3, SuperOffload to the CPU (CUDA)", stage=3, offload_optimizer="cpu", super_offload=True
    ),
    "fsdp2": Spec(
        "fsdp2",
        "torch's fully_shard (FSDP2): optimizer state, gradients and parameters sharded",
        size="tensor_parallel_size",
    ),
    "fsdp": Spec(
        "fsdp2", "another name of fsdp2, which replaces torch's FullyShardedDataParallel", size="tensor_parallel_size"
    ),
    "tensor_parallel": Spec(
        "tensor_parallel",
        "each layer of a vit_* split over the ranks, which compute the same images",
        size="tensor_parallel_size",
        one_replica=True,
    ),
    "pipeline": Spec(
        "pipeline",
        "the blocks of a vit_* divided among the ranks, one after the other",
        size="pipeline_parallel_size",
        one_replica=True,
    ),
}

AUTO = "auto"  # before it starts the ranks, `train` replaces this name with the strategy that `plan` recommends
