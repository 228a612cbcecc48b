"""The registry of strategies: how each spreads a run over ranks, what it shards or offloads, and what it can do.

A name that Lightning has too (ddp, fsdp, deepspeed_stage_2, ...) has the same meaning as there; `fsdp` runs torch's
FSDP2, to which torch tells users of its FullyShardedDataParallel to migrate. A raw DeepSpeed configuration stands for
a strategy too. No torch, Lightning or DeepSpeed.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from cifar_zero.core.errors import UsageError

Device = Literal["", "cpu", "nvme"]
"""The place that something is offloaded to; empty: it stays on the rank's device."""


@dataclass(frozen=True)
class Spec:
    """What a strategy does and can do."""

    family: Literal["baseline", "deepspeed", "fsdp2", "tensor_parallel", "pipeline"]  # module of `strategies`
    summary: str  # one line for the help and the documentation
    stage: int = 0  # ZeRO stage; 0 shards nothing
    offload_optimizer: Device = ""  # where the optimizer's state and update are
    offload_parameters: Device = ""  # where the parameters rest
    super_offload: bool = False  # DeepSpeed's SuperOffload, for CPU-GPU links as fast as a GH200's
    one_replica: bool = False  # all ranks together hold one model and compute the same images
    casts: bool = False  # mixed precision casts the model instead of running it under autocast
    shards_tensors: bool = False  # a rank holds only parts of the parameters or of the optimizer state
    scales_loss: bool = True  # it can train in float16
    averages: bool = True  # --ema and --swa_from can average its weights
    spreads_experts: bool = False  # the experts of a mixture can be spread over ranks
    graphs: bool = False  # --cuda_graphs can record its steps, which must not move parameters
    raw: Mapping[str, Any] | None = None  # content of a raw DeepSpeed configuration (--ds_config)


_zero_0 = partial(Spec, "deepspeed", casts=True, spreads_experts=True)
_zero = partial(_zero_0, shards_tensors=True)
_shards = partial(Spec, shards_tensors=True, scales_loss=False, averages=False)

STRATEGIES: dict[str, Spec] = {
    "baseline": Spec("baseline", "plain PyTorch on one device, DDP on several", graphs=True),
    "ddp": Spec("baseline", "torch's DistributedDataParallel: every rank holds everything", graphs=True),
    "deepspeed_stage_0": _zero_0("DeepSpeed's engine, nothing sharded", graphs=True),
    "deepspeed_stage_1": _zero("ZeRO 1: optimizer state sharded", stage=1, graphs=True),
    "deepspeed_stage_1_offload": _zero("ZeRO 1, optimizer on the CPU", stage=1, offload_optimizer="cpu", graphs=True),
    "deepspeed_stage_2": _zero("ZeRO 2: optimizer state and gradients sharded", stage=2, graphs=True),
    "deepspeed_stage_2_offload": _zero("ZeRO 2, optimizer on the CPU", stage=2, offload_optimizer="cpu", graphs=True),
    "deepspeed_stage_3": _zero("ZeRO 3: optimizer state, gradients and parameters sharded", stage=3),
    "deepspeed_stage_3_offload": _zero(
        "ZeRO 3, optimizer and parameters on the CPU", stage=3, offload_optimizer="cpu", offload_parameters="cpu"
    ),
    "deepspeed_stage_3_offload_nvme": _zero(
        "ZeRO 3, optimizer and parameters on disk",
        stage=3,
        offload_optimizer="nvme",
        offload_parameters="nvme",
        averages=False,
    ),
    "deepspeed_stage_3_superoffload": _zero(
        "ZeRO 3, SuperOffload to the CPU (CUDA)", stage=3, offload_optimizer="cpu", super_offload=True
    ),
    "fsdp2": _shards(
        "fsdp2", "torch's fully_shard (FSDP2): optimizer state, gradients and parameters sharded", casts=True
    ),
    "fsdp": _shards("fsdp2", "the same as fsdp2: torch replaces FullyShardedDataParallel by it", casts=True),
    "tensor_parallel": _shards(
        "tensor_parallel", "each layer of a vit_* split over the ranks, which compute the same images", one_replica=True
    ),
    "pipeline": _shards(
        "pipeline", "the blocks of a vit_* divided among the ranks, one after the other", one_replica=True
    ),
}

AUTO = "auto"
"""train.py replaces this name by the strategy that plan.py recommends, before it starts the ranks."""

# Keys of a raw DeepSpeed configuration that have another owner, and that owner.
OWNED_BY_FLAGS = {
    "train_batch_size": "--batch_size",
    "train_micro_batch_size_per_gpu": "--batch_size and --devices",
    "gradient_accumulation_steps": "--accumulate",
    "gradient_clipping": "--gradient_clip_val",
    "optimizer": "--optimizer",
    "scheduler": "--schedule",
    "fp16": "--precision 16-mixed",
    "bf16": "--precision bf16-mixed",
    # These two could run code that a file names: it imports modules, and unpickles "universal" checkpoints unchecked.
    "torch_autocast": "--precision bf16-mixed",
    "checkpoint": "--resume, which reads the checkpoints of every strategy",
}


def raw_spec(file: str) -> Spec:
    """Returns what a raw DeepSpeed configuration stands for.

    Raises UsageError if it cannot be read, or sets what has another owner.
    """
    try:
        raw: Any = json.loads(Path(file).read_text())
    except OSError as error:
        raise UsageError(f"--ds_config {file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"--ds_config {file} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise UsageError(f"--ds_config {file} must hold a JSON object")
    for key, owner in OWNED_BY_FLAGS.items():
        if key in raw:
            raise UsageError(f"--ds_config {file} sets {key!r}: take it out and use {owner}")
    zero = raw.get("zero_optimization", {})
    if not isinstance(zero, dict) or zero.get("stage", 0) not in (0, 1, 2, 3):
        raise UsageError(f"--ds_config {file}: zero_optimization must be an object with a stage from 0 to 3")
    for key in ("offload_optimizer", "offload_param"):
        if not isinstance(zero.get(key, {}), dict):
            raise UsageError(f"--ds_config {file}: {key} must be an object with a device")
    parameters = _device(zero, "offload_param")
    return _zero_0(
        "a raw DeepSpeed configuration",
        stage=zero.get("stage", 0),
        offload_optimizer=_device(zero, "offload_optimizer"),
        offload_parameters=parameters,
        super_offload=bool(zero.get("offload_optimizer", {}).get("super_offload")),
        shards_tensors=zero.get("stage", 0) > 0,
        averages=parameters != "nvme",
        raw=raw,
    )


def _device(zero: dict[str, Any], section: str) -> Device:
    device: Device | Literal["none"] = zero.get(section, {}).get("device", "none")
    return "" if device == "none" else device
