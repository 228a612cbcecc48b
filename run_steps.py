"""What a run needs and how many optimizer steps it will take, told without starting it."""

from __future__ import annotations

import build
from config import Config


def prepare(config: Config) -> None:
    """Has the images in their cache, before a run is started in another process.

    Raises:
        UsageError: an option of --trainer is not known to Lightning, or the weights or images cannot be had.
    """
    build.check_trainer_options(config)
    build.finetuning(config)
    build.datamodule(config).prepare_data()


def run_steps(config: Config) -> int:
    """Those that Lightning would count (`Trainer.estimated_stepping_batches`): of all epochs, or --max_steps.

    Decodes the images where that has not been done: their number is in nothing else.
    """
    datamodule = build.datamodule(config)
    datamodule.setup()
    batches = len(datamodule.train_dataloader())
    limit = config.trainer.get("overfit_batches") or config.trainer.get("limit_train_batches", 1.0)
    batches = int(batches * limit) if isinstance(limit, float) else min(batches, limit)
    steps = config.epochs * -(-batches // config.accumulate)
    return steps if config.max_steps == -1 else min(steps, config.max_steps)
