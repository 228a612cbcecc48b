"""What a model needs whose tensors, or whose layers, lie on several ranks."""

from cifar_zero.config.run import Run
from cifar_zero.core.errors import UsageError
from cifar_zero.models import MODELS, ViT


def check_model_parallel(run: Run) -> None:
    """Refuses a model that cannot be split over the ranks, and float16 where there is no loss scaling."""
    config, spec, ranks, model = run.config, run.spec, run.world_size, run.config.model.name
    given = f"--strategy {config.strategy}"
    if not spec.scales_loss and config.precision == "16-mixed":
        raise UsageError(f"{given} has no loss scaling for float16: use --precision bf16-mixed")
    if not spec.one_replica:
        return
    entry = MODELS[model]
    if not issubclass(entry, ViT):
        known = ", ".join(name for name, other in MODELS.items() if issubclass(other, ViT))
        raise UsageError(f"{given} cannot split --model {model}: it splits {known}")
    if config.num_nodes > 1:
        raise UsageError(f"{given} is for the ranks of one node: over several use fsdp2 or deepspeed_stage_3")
    if config.trainable or config.lora.rank:
        raise UsageError(f"{given} trains whole models only: --trainable and --lora.rank go with fsdp2 or ZeRO")
    if spec.family == "tensor_parallel" and config.activation_offload:
        raise UsageError(f"{given} splits the activations: use --activation_checkpointing, or fsdp2")
    if config.compile:
        raise UsageError(f"{given} exchanges tensors within the model: leave --compile out, or use fsdp2")
    shape = entry(**config.model.options).shape
    if spec.family == "tensor_parallel" and shape.heads % ranks:
        fit = " or ".join(str(number) for number in range(1, shape.heads + 1) if shape.heads % number == 0)
        raise UsageError(f"{given}: {ranks} ranks cannot divide the {shape.heads} heads of {model}: --devices {fit}")
    if spec.family == "pipeline" and ranks > shape.depth:
        raise UsageError(
            f"{given}: {model} has {shape.depth} blocks for {ranks} ranks: --devices {shape.depth} at most"
        )
