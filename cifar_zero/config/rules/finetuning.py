"""What the weights that a run starts from, and its adapters, need."""

from pathlib import Path

from cifar_zero.config.flags import Config, LoRAConfig
from cifar_zero.config.values import check_flags
from cifar_zero.core.errors import UsageError


def check_finetuning(config: Config) -> None:
    """Refuses options of fine-tuning that cannot be combined."""
    lora = config.lora
    if lora != LoRAConfig():
        check_flags(lora, "lora.", "rank", at_least=1)
    if lora.rank and not lora.target:
        raise UsageError("--lora.rank needs --lora.target, names of linear layers such as 'blocks.*.attention.qkv'")
    check_flags(lora, "lora.", "dropout", below=1)
    if config.delta and not config.weights:
        raise UsageError(f"--delta {config.delta} needs --weights, what the run that wrote it started from")
    if config.delta and not Path(config.delta).is_file():
        raise UsageError(f"--delta {config.delta} is not a file")
