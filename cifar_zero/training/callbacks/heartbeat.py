"""Signs of life of a rank, for the launcher that ends a run which hangs."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from cifar_zero.launch.heartbeat import Pulse


class Heartbeat(Callback):
    """Beats after each micro-batch; to be the first of the callbacks, as the work of the others may take its time.

    Silence counts from the end of the first batch of an epoch, a validation or a test up to the end of the last, but
    for the writing of checkpoints: compiling, decoding, figures and uploads lie outside. A rank that fails goes on as
    it was: if it hangs while it ends, that is found too.
    """

    def __init__(self) -> None:
        self._pulse = Pulse()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Beats."""
        self._pulse.beat()

    def on_validation_batch_end(self, *args: Any) -> None:
        """Beats."""
        self._pulse.beat()

    def on_test_batch_end(self, *args: Any) -> None:
        """Beats."""
        self._pulse.beat()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Waits: Lightning is about to write a checkpoint."""
        self._pulse.wait()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Waits: checkpoints, and the loader of the next epoch."""
        self._pulse.wait()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Waits: --max_steps ends a training in mid-epoch."""
        self._pulse.wait()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Waits: another loader and, where the network is compiled, another graph."""
        self._pulse.wait()

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Waits: metrics and the best checkpoint."""
        self._pulse.wait()

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Waits: metrics, figures, and the end of the run."""
        self._pulse.wait()
