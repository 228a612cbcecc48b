"""The number of optimizer steps of a run that is not started."""

from typing import Any

from cifar_zero.config.flags import Config


def run_steps(config: Config, datamodule: Any) -> int:
    """Returns the steps that Lightning would count (`Trainer.estimated_stepping_batches`): of all epochs, or
    --max_steps.

    Decodes the images if that has not been done, to learn their number.

    Args:
        config: of the run.
        datamodule: the CIFARDataModule of the run.
    """
    datamodule.setup()
    batches = len(datamodule.train_dataloader())
    limit = config.trainer.get("overfit_batches") or config.trainer.get("limit_train_batches", 1.0)
    batches = int(batches * limit) if isinstance(limit, float) else min(batches, limit)
    steps = config.epochs * -(-batches // config.accumulate)
    return steps if config.max_steps == -1 else min(steps, config.max_steps)
