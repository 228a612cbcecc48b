"""The memory of a run: the peak of each rank, and its model states (the ZeRO paper's term): the bytes that it holds for
parameters, gradients and optimizer state."""

import resource
import sys
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.optim import Optimizer

from cifar_zero.launch.collectives import gather
from cifar_zero.strategies import hooks_of
from cifar_zero.training.callbacks.curves import IntervalCallback, log_scalars

PARTS = ("mem/parameter_rank_bytes", "mem/gradient_rank_bytes", "mem/optimizer_rank_bytes")
"""The summands of mem/model_state_rank_bytes."""


class Memory(IntervalCallback):
    """Writes the curve mem/peak_gb (10^9 bytes, of the rank with the most) and keeps the totals of the run."""

    def __init__(self) -> None:
        self._state_step = 0
        self._states = (0, 0, 0)
        # mem/* of metrics.json, one value per rank, after the fit
        keys = ("mem/peak_rank_bytes", "mem/model_state_rank_bytes", *PARTS)
        self.totals: dict[str, list[int]] = {key: [] for key in keys}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        # The optimizer has its state from the second step on; a run of one step is measured in that step.
        self._state_step = trainer.global_step + (trainer.estimated_stepping_batches != trainer.global_step + 1)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if trainer.global_step == self._state_step:
            self._states = hooks_of(trainer.strategy).state_bytes(pl_module, trainer.optimizers[0])

    def _log(self, trainer: Trainer) -> None:
        device = trainer.strategy.root_device
        highest = trainer.strategy.reduce(torch.tensor(peak_bytes(device), device=device), reduce_op="max")
        log_scalars(trainer, {"mem/peak_gb": int(highest) / 1e9})

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        of_rank = (peak_bytes(pl_module.device), sum(self._states), *self._states)
        for key, value in zip(self.totals, of_rank, strict=True):
            self.totals[key] = gather(value)


def peak_bytes(device: torch.device) -> int:
    """Returns the peak memory of this rank so far: of tensors on its GPU; on the CPU of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "linux":
        # Not getrusage, in which a process starts with its parent's peak.
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.split("VmHWM:")[1].split()[0])
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2): bytes on macOS, kilobytes elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
