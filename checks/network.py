"""What a network needs of the micro-batch and of the images."""

from __future__ import annotations

from config import Config
from errors import UsageError
from models import MODELS


def check_network(config: Config, micro_batch: int, num_classes: int) -> None:
    """Batch normalisation needs several images in a micro-batch; a classifier of another package is tried out."""
    if config.model.options.get("batch_norm") and micro_batch == 1:
        raise UsageError("--model.batch_norm normalises over a micro-batch, here a single image: raise --batch_size")
    if config.model.name == "speednet" and config.init != "default":
        raise UsageError(f"--model speednet draws its weights in its own way: leave --init {config.init} out")
    if ":" not in config.model.name:
        return
    from models.external import check
    from sources.dataset import IMAGE_SHAPE

    entry = MODELS[config.model.name](**config.model.options)
    try:
        check(entry, num_classes, (micro_batch, *IMAGE_SHAPE))
    except ValueError as error:
        raise UsageError(f"--model {config.model.name}: {error}") from error
