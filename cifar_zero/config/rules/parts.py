"""What a network needs whose tensors, or whose layers, lie on several ranks."""

from __future__ import annotations

from cifar_zero.config.flags import Config
from cifar_zero.config.strategy_specs import STRATEGIES
from cifar_zero.core.errors import UsageError
from cifar_zero.models import MODELS, ViT


def check_parts(config: Config) -> None:
    """What a network whose tensors, or whose layers, lie on several ranks needs."""
    spec, ranks, model = STRATEGIES[config.strategy], config.world_size, config.model.name
    given = f"--strategy {config.strategy}"
    if spec.family in ("fsdp2", "tensor_parallel", "pipeline") and config.precision == "16-mixed":
        raise UsageError(f"{given} has no loss scaling for float16: use --precision bf16-mixed")
    if not spec.one_replica:
        return
    entry = MODELS[model]
    if not issubclass(entry, ViT):
        known = ", ".join(name for name, other in MODELS.items() if issubclass(other, ViT))
        raise UsageError(f"{given} has no plan how to cut --model {model}: it has one for {known}")
    if config.num_nodes > 1:
        raise UsageError(f"{given} is for the ranks of one machine: over several use fsdp2 or deepspeed_stage_3")
    if config.trainable or config.lora.rank:
        raise UsageError(f"{given} trains whole networks alone: --trainable and --lora.rank go with fsdp2 or ZeRO")
    if spec.family == "tensor_parallel" and config.activation_offload:
        raise UsageError(f"{given} cuts the activations: use --activation_checkpointing, or fsdp2")
    if config.compile:
        raise UsageError(f"{given} exchanges tensors within the network: leave --compile out, or use fsdp2")
    shape = entry(**config.model.options).shape
    heads, depth = shape.heads, shape.depth
    if spec.family == "tensor_parallel" and heads % ranks:
        fit = " or ".join(str(number) for number in range(1, heads + 1) if heads % number == 0)
        raise UsageError(f"{given}: the {heads} heads of {model} cannot be shared out among {ranks}: --devices {fit}")
    if spec.family == "pipeline" and ranks > depth:
        raise UsageError(f"{given}: {model} has {depth} blocks for {ranks} ranks: --devices {depth} at most")
