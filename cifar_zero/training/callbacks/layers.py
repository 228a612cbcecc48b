"""`--log_gradients` and `--log_weights`: where in the model gradients vanish or explode, and how the weights spread."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from cifar_zero.config.flags import Config
from cifar_zero.training.callbacks.curves import Interval, log_scalars


class Layers(Callback):
    """Logs the L2 norm of each parameter's gradient, before clipping, and in TensorBoard histograms of gradients and
    weights."""

    _interval: Interval

    def __init__(self, config: Config):
        self._config = config

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the first interval."""
        self._interval = Interval(trainer)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Logs a step if a point is due; every rank takes part."""
        if not self._interval.is_point(trainer.global_step + 1):
            return
        from cifar_zero.training.whole_tensors import ends_step, gradients, weights  # DeepSpeed takes a second

        if not ends_step(trainer):
            return
        if self._config.log_gradients:
            found = gradients(trainer, pl_module)
            norms = {name.removeprefix("net."): tensor.norm().item() for name, tensor in found.items()}
            log_scalars(trainer, {f"grad_norm/{name}": norm for name, norm in norms.items()})
            self._histograms(trainer, "gradients", found)
        if self._config.log_weights:
            self._histograms(trainer, "weights", weights(trainer, pl_module))

    @staticmethod
    def _histograms(trainer: Trainer, kind: str, tensors: dict[str, Any]) -> None:
        for logger in (logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)):
            for name, tensor in tensors.items():
                logger.experiment.add_histogram(f"{kind}/{name.removeprefix('net.')}", tensor, trainer.global_step)
