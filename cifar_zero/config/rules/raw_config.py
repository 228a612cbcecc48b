"""What a raw DeepSpeed configuration may hold, and what it stands for."""

import json
from pathlib import Path
from typing import Any, Literal

from cifar_zero.config.strategy_specs import Device, Spec
from cifar_zero.core.errors import UsageError

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


def read(file: str) -> Spec:
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
    return Spec(
        "deepspeed",
        "a raw DeepSpeed configuration",
        stage=zero.get("stage", 0),
        offload_optimizer=_device(zero, "offload_optimizer"),
        offload_parameters=parameters,
        super_offload=bool(zero.get("offload_optimizer", {}).get("super_offload")),
        casts=True,
        shards_tensors=zero.get("stage", 0) > 0,
        averages=parameters != "nvme",
        spreads_experts=True,
        raw=raw,
    )


def _device(zero: dict[str, Any], section: str) -> Device:
    device: Device | Literal["none"] = zero.get(section, {}).get("device", "none")
    return "" if device == "none" else device
