"""The memory of a run: the peak of each rank, and its model states."""

import resource
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer

from cifar_zero.launch.collectives import gather
from cifar_zero.training.callbacks.interval import Interval, log_scalars
from cifar_zero.training.callbacks.model_state import ModelStates, model_states

PARTS = ("mem/parameter_rank_bytes", "mem/gradient_rank_bytes", "mem/optimizer_rank_bytes")
"""The summands of mem/model_state_rank_bytes."""


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


class Memory(Callback):
    """Writes the curve mem/peak_gb (10^9 bytes, of the rank with the most) and keeps the totals of the run.

    Args:
        log_interval: optimizer steps between two points.
    """

    def __init__(self, log_interval: int):
        self._interval = Interval(log_interval)
        self._state_step = 0
        self._states = ModelStates(0, 0, 0)
        self.totals: dict[str, list[int]] = {
            key: [] for key in ("mem/peak_rank_bytes", "mem/model_state_rank_bytes", *PARTS)
        }
        """mem/* of metrics.json, one value per rank, after the fit."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the first interval."""
        self._interval.start(trainer)
        # The optimizer has its state from the second step on; a run of one step is measured in that step.
        self._state_step = trainer.global_step + (trainer.estimated_stepping_batches != trainer.global_step + 1)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Measures the model states once, while the gradients exist."""
        if trainer.global_step == self._state_step:
            self._states = model_states(pl_module, trainer.optimizers[0])

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Writes a point if one is due."""
        if self._interval.due(trainer.global_step):
            peak = torch.tensor(peak_bytes(pl_module.device), device=pl_module.device)
            highest = trainer.strategy.reduce(peak, reduce_op="max")
            log_scalars(trainer, {"mem/peak_gb": int(highest) / 1e9})

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gathers the totals of all ranks."""
        self.totals = {
            "mem/peak_rank_bytes": gather(peak_bytes(pl_module.device)),
            "mem/model_state_rank_bytes": gather(sum(self._states)),
            **{key: gather(part) for key, part in zip(PARTS, self._states, strict=True)},
        }
