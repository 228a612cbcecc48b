"""Callbacks and a model that send a signal at a known moment of a training, a test or an evaluation."""

import os
import zlib
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from torch import Tensor, nn


class SendsSignal(Callback):
    """Sends a signal once, from rank 0 in the given hook. The receiver `to` is "self", "group" or "launcher". They
    stand for rank 0 itself, for its process group including the launcher (as a terminal signals), and for the launcher
    alone (as a cluster signals)."""

    def __init__(self, hook: str, number: int, to: str):
        def send(trainer: Any, *args: Any, **kwargs: Any) -> None:
            if trainer.is_global_zero and not self._sent:
                self._sent = True
                os.kill({"self": os.getpid(), "launcher": os.getppid(), "group": 0}[to], number)

        self._sent = False
        setattr(self, hook, send)


class Model(nn.Module):
    """a linear layer that sends its own process a signal when it is evaluated, if the number is not 0"""

    def __init__(self, num_classes: int, number: int = 0):
        super().__init__()
        self.number, self.head = number, nn.Linear(3 * 32 * 32, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        if self.number and not self.training:
            os.kill(os.getpid(), self.number)
        return self.head(images.flatten(1))


class RecordsBatches(Callback):
    """Writes a line into the file `batches` of the run folder for each batch of rank 0, with its optimizer step and a
    checksum, and into the file `validations` for each validation, with the number of steps done. Before the step
    `step`, rank 0 sends itself the signal `number`. With `plans`, the number of steps is read before the training has
    its state."""

    def __init__(self, step: int = 0, number: int = 0, plans: bool = False):
        self.step, self.number, self.plans = step, number, plans

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit" and self.plans:
            assert trainer.estimated_stepping_batches > 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if not trainer.is_global_zero:
            return
        step = trainer.global_step + 1
        with Path(trainer.default_root_dir, "batches").open("a") as file:
            file.write(f"{step} {zlib.crc32(batch[0].numpy().tobytes())}\n")
        if step == self.step:
            os.kill(os.getpid(), self.number)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.is_global_zero:
            with Path(trainer.default_root_dir, "validations").open("a") as file:
                file.write(f"{trainer.global_step}\n")
