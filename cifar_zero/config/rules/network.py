"""What a network needs of the micro-batch and of the images."""

from __future__ import annotations

from cifar_zero.config.flags import Config
from cifar_zero.core.errors import UsageError
from cifar_zero.models import MODELS

LEAST_SIDE = 12
"""Of images that are scaled down, in pixels."""


def check_network(config: Config, micro_batch: int, num_classes: int) -> None:
    """Batch normalisation needs several images in a micro-batch; a classifier of another package is tried out."""
    if config.model.options.get("batch_norm") and micro_batch == 1:
        raise UsageError("--model.batch_norm normalises over a micro-batch, here a single image: raise --batch_size")
    if config.model.name == "speednet" and config.init != "default":
        raise UsageError(f"--model speednet draws its weights in its own way: leave --init {config.init} out")
    check_resolution(config, micro_batch, num_classes)
    if ":" not in config.model.name:
        return
    from cifar_zero.data.dataset import IMAGE_SHAPE
    from cifar_zero.models.external import check

    entry = MODELS[config.model.name](**config.model.options)
    try:
        check(entry, num_classes, (micro_batch, *IMAGE_SHAPE))
    except ValueError as error:
        raise UsageError(f"--model {config.model.name}: {error}") from error


def check_resolution(config: Config, micro_batch: int, num_classes: int) -> None:
    """Smaller images in the first epochs need a network that takes them: it is tried out."""
    side, epochs = config.augment.low_resolution, config.augment.low_epochs
    if not side and not epochs:
        return
    from cifar_zero.data.dataset import IMAGE_SHAPE

    channels, whole, _ = IMAGE_SHAPE
    if not LEAST_SIDE <= side < whole or epochs < 1:
        raise UsageError(
            f"--augment.low_resolution {side} --augment.low_epochs {epochs}: give a side from {LEAST_SIDE} to "
            f"{whole - 1} pixels and a number of epochs"
        )
    from cifar_zero.models.external import check

    entry = MODELS[config.model.name](**config.model.options)
    try:
        check(entry, num_classes, (micro_batch, channels, side, side))
    except ValueError as error:
        raise UsageError(
            f"--augment.low_resolution {side}: --model {config.model.name} takes images of {whole} x {whole} pixels "
            "alone: use speednet or resnet18"
        ) from error
