"""What a model needs of the micro-batch and of the images, and fine-tuning of its weights."""

from pathlib import Path

from cifar_zero.config.flags import Config, LoRAConfig
from cifar_zero.config.run import Run
from cifar_zero.config.values import check_flags
from cifar_zero.core.errors import UsageError
from cifar_zero.models import IMAGE_SHAPE, MODELS

LEAST_SIDE = 12
"""Smallest side of downscaled images, in pixels."""


def check_model(run: Run) -> None:
    """Refuses a model that cannot train on these micro-batches; runs a model of another package to find out."""
    config = run.config
    if config.model.options.get("batch_norm") and run.micro_batch == 1:
        raise UsageError("--model.batch_norm normalises over the micro-batch, a single image here: raise --batch_size")
    if config.model.name == "speednet" and config.init != "default":
        raise UsageError(f"--model speednet has its own initialisation: leave --init {config.init} out")
    if config.augment.low_resolution or config.augment.low_epochs:
        _check_resolution(run)
    if ":" in config.model.name:
        try:
            _try_out(run, IMAGE_SHAPE[1])
        except ValueError as error:
            raise UsageError(f"--model {config.model.name}: {error}") from error


def check_finetuning(config: Config) -> None:
    """Refuses options of fine-tuning that cannot be combined."""
    lora = config.lora
    if lora != LoRAConfig():
        check_flags(lora, "lora.", "rank", at_least=1)
    if lora.rank and not lora.target:
        raise UsageError("--lora.rank needs --lora.target: names of linear layers such as 'blocks.*.attention.qkv'")
    check_flags(lora, "lora.", "dropout", below=1)
    if config.delta and not config.weights:
        raise UsageError(f"--delta {config.delta} needs --weights: those that the run which wrote it started from")
    if config.delta and not Path(config.delta).is_file():
        raise UsageError(f"--delta {config.delta} is not a file")


def _check_resolution(run: Run) -> None:
    """Refuses smaller images in the first epochs for a model that cannot take them."""
    augment, whole = run.config.augment, IMAGE_SHAPE[1]
    side = augment.low_resolution
    if not LEAST_SIDE <= side < whole or augment.low_epochs < 1:
        raise UsageError(
            f"--augment.low_resolution {side} --augment.low_epochs {augment.low_epochs}: give a side from {LEAST_SIDE} "
            f"to {whole - 1} pixels and a number of epochs"
        )
    try:
        _try_out(run, side)
    except ValueError as error:
        raise UsageError(
            f"--augment.low_resolution {side}: --model {run.config.model.name} takes images of {whole} x {whole} "
            "pixels only: use speednet or resnet18"
        ) from error


def _try_out(run: Run, side: int) -> None:
    from cifar_zero.models.external import check

    model = MODELS[run.config.model.name](**run.config.model.options)
    check(model, run.num_classes, (run.micro_batch, IMAGE_SHAPE[0], side, side))
