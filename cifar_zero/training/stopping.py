"""The end of a rank: after a signal, after the last run of its process, or after a checkpoint that was not written."""

import os
import subprocess
from pathlib import Path

import torch.distributed
from lightning.pytorch import Trainer

from cifar_zero.checkpoints.io import AtomicCheckpointIO
from cifar_zero.config.run import Run
from cifar_zero.core.errors import RunError
from cifar_zero.training.callbacks.interrupt import SLURM_REQUEUE


def after_signal(trainer: Trainer, run: Run, run_dir: Path | None, signal: int, last: bool) -> str:
    """Ends a run that a signal has stopped and saved; returns how to resume it, empty if it cannot be.

    Args:
        trainer: of the run.
        run: of this rank.
        run_dir: the run folder, on rank 0.
        signal: its number.
        last: see `leave`.

    Raises:
        RunError: the checkpoint could not be written.
    """
    trainer.strategy.barrier()
    check_saved(trainer)
    saved = run_dir is not None and not run.config.only_measures
    if saved and signal == SLURM_REQUEUE:
        # While the others wait: srun --kill-on-bad-exit ends the step with the first rank that leaves.
        subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=False)
    leave(trainer, last)
    return f"resume the run with --resume {run_dir}" if saved else ""


def check_saved(trainer: Trainer) -> None:
    """Raises RunError if the newest checkpoint could not be written; called on every rank, known to rank 0."""
    plugin = trainer.strategy.checkpoint_io
    if isinstance(plugin, AtomicCheckpointIO) and plugin.failure:
        raise RunError(plugin.failure)


def leave(trainer: Trainer, last: bool) -> None:
    """Waits for the other ranks, and destroys the process group, as torch asks.

    Args:
        trainer: of the run.
        last: whether no other run follows in this process; else the process group stays.
    """
    trainer.strategy.barrier()
    if last and torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
