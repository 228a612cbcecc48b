"""Signs of life of a rank, for the launcher that ends a run which hangs."""

from typing import Any

from lightning.pytorch import Callback, Trainer

from cifar_zero.launch.heartbeat import Pulse


class Heartbeat(Callback):
    """Beats after each micro-batch. It must be the first callback, since the others may take their time. Silence counts
    only between the first and the last batch of an epoch, a validation or a test, and not while a checkpoint is
    written. A rank that fails stays in its state, so that one which hangs while it ends is found too."""

    def __init__(self, compiles_step: bool = False) -> None:
        self._pulse = Pulse()
        self._compiles_step = compiles_step

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self._pulse.beat()
        if self._compiles_step and trainer.global_step == 1:
            self._pulse.wait()  # the second step is compiled, which may take minutes

    def _beat(self, *args: Any, **kwargs: Any) -> None:
        self._pulse.beat()

    def _wait(self, *args: Any, **kwargs: Any) -> None:
        self._pulse.wait()

    on_validation_batch_end = on_test_batch_end = _beat
    # Checkpoints, the loader of the next epoch; `on_train_end`, as --max_steps ends a training in mid-epoch.
    on_save_checkpoint = on_train_epoch_end = on_train_end = _wait
    # Another loader and, if the model is compiled, another graph.
    on_validation_start = _wait
    # Metrics, the best checkpoint, figures, and the end of the run.
    on_validation_epoch_end = on_test_epoch_end = _wait
