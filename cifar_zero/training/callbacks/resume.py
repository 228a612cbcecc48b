"""What a checkpoint needs in addition to Lightning's state, to be resumed exactly and read without its run folder."""

import random
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from cifar_zero.checkpoints.read import RECORD
from cifar_zero.config.flags import Config
from cifar_zero.launch.collectives import gather
from cifar_zero.strategies import replica

SCHEMA = 1
"""Version of the record."""


class Resume(Callback):
    """Saves the configuration, the class names and every rank's random state in each checkpoint, and restores them.

    A run that begins, or resumes on another number of ranks, gets random states drawn from seed, step and replica, so
    that the noise of the model differs between replicas.

    Args:
        config: of the run.
    """

    def __init__(self, config: Config):
        self._config = config
        self._states: list[dict[str, Any]] = []

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Adds the record, with the source in use in place of auto; called on every rank."""
        datamodule: Any = trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
        data = replace(self._config.data, source=datamodule.source)
        checkpoint[RECORD] = {
            "schema": SCHEMA,
            "config": asdict(replace(self._config, data=data)),
            "classes": list(datamodule.classes),
            "random_states": gather(_random_state()),
        }

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Recounts the micro-batches of the epoch for another --accumulate."""
        record = checkpoint.get(RECORD)
        if record is not None:
            self._states = record["random_states"]
            _recount(checkpoint["loops"]["fit_loop"], record["config"]["accumulate"], self._config.accumulate)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Sets the random state."""
        here = [self._config.seed, trainer.global_step, replica(trainer.strategy)[1]]
        seed = int(np.random.SeedSequence(here).generate_state(1)[0])
        torch.manual_seed(seed)
        random.seed(seed)
        if len(self._states) == trainer.world_size:  # without a GPU's if they were CPU processes
            _set_random_state(self._states[trainer.global_rank])


def _recount(fit_loop: dict[str, Any], before: int, now: int) -> None:
    """Keeps the optimizer steps; a checkpoint is written between two of them, so the micro-batches divide."""
    for progress in (fit_loop["epoch_loop.batch_progress"][part] for part in ("total", "current")):
        in_hand = progress["processed"] - progress["completed"]  # 1 in a hook at the end of a batch
        for key in ("ready", "started", "processed"):
            progress[key] = progress[key] * now // before
        progress["completed"] = progress["processed"] - in_hand
    for state in fit_loop["state_dict"].get("combined_loader", []):
        state["given"] = state["given"] * now // before


def _random_state() -> dict[str, Any]:
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    return {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "cuda": torch.cuda.get_rng_state() if on_gpu else None,
    }


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
