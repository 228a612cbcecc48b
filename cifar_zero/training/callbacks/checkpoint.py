"""Adds to each checkpoint the state that Lightning does not save. With this state a run resumes exactly, and the
checkpoint can be read without its run folder. Also saves last.ckpt, the checkpoint with the newest state of a run."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from cifar_zero.checkpoints.read import RECORD
from cifar_zero.config.settings import tree_of
from cifar_zero.core.console import say
from cifar_zero.launch.collectives import gather
from cifar_zero.strategies import hooks_of

SCHEMA = 3  # version of the record; the identity of the images in version 3 has checksums of all their bytes


class RunState(Callback):
    """Saves the configuration, the class names, the identity of the images and each replica's random state in each
    checkpoint, and restores the random states.

    If a run begins, or resumes with another number of replicas, each rank derives its random state from the seed, the
    step and the index of its replica. The ranks of one model thus always have the same random state. If a run resumes
    with another --accumulate, or from within an optimizer step, the counts of micro-batches are converted.
    """

    _states: Sequence[dict[str, Any]] = ()
    _schedule: str | None = None  # name of the schedule of the run that saved the checkpoint

    def on_save_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        datamodule: Any = trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        name, keys, *position = np.random.get_state()
        numpy = (name, np.asarray(keys).tolist(), *position)  # plain values, which load without --trust
        state = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": numpy, "cuda": cuda}
        ranks_per_model = trainer.world_size // hooks_of(trainer.strategy).replica()[0]
        checkpoint[RECORD] = {
            "schema": SCHEMA,
            "config": tree_of(pl_module.settings),
            "classes": list(datamodule.classes),
            "image_identity": dict(datamodule.dataset.identity),
            "random_states": gather(state)[::ranks_per_model],
        }

    def on_load_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        record = checkpoint.get(RECORD)
        if record is not None:
            self._states, self._schedule = record["random_states"], record["config"]["schedule"]["name"]
            _recount(
                checkpoint["loops"]["fit_loop"], record["config"]["accumulate"], pl_module.settings.placement.accumulate
            )

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Sets the random state. If the run is resumed, also sets the learning rates, and prints the step at which the
        run continues."""
        if self._schedule is not None:
            pl_module.resume_rates(self._schedule != "constant")
        replicas, replica = hooks_of(trainer.strategy).replica()
        here = [pl_module.settings.recipe.seed, trainer.global_step, replica]
        seed = int(np.random.SeedSequence(here).generate_state(1)[0])
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        if len(self._states) == replicas:  # a state saved on the CPU has no GPU state
            own = self._states[replica]
            torch.set_rng_state(own["torch"])
            random.setstate(own["python"])
            if "numpy" in own:  # not in checkpoints of version 0.2
                np.random.set_state(own["numpy"])
            if own["cuda"] is not None and torch.cuda.is_available():
                torch.cuda.set_rng_state(own["cuda"])
        if pl_module.settings.output.resume and trainer.is_global_zero:
            say(f"resumed at step {trainer.global_step} of {pl_module.settings.output.resume}")


class LastCheckpoint(Checkpoint):
    """Saves last.ckpt at the end of each epoch, and after the last step if --max_steps or Ctrl-C ends the training in
    mid-epoch. Also saves every `steps` optimizer steps in mid-epoch, unless `steps` is 0. All ranks use the path of
    rank 0.

    ModelCheckpoint(save_last=True) saves the last state only together with a best checkpoint (Lightning 2.6.6).
    """

    failure = ""  # why last.ckpt could not be written, on rank 0; empty if it was written

    def __init__(self, path: Path | None, steps: int = 0):
        self._path, self._steps, self._saved_step = path, steps, 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Broadcasts the path. Notes the current step, so that the resumed checkpoint is not saved again."""
        self._path = trainer.strategy.broadcast(self._path)
        self._saved_step = trainer.global_step

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._save(trainer)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Saves after an optimizer step in mid-epoch if the training ends there, and every `steps` optimizer steps. At
        the end of the training it would be too late, because Lightning has then counted the unfinished epoch as
        done."""
        if (batch_idx + 1) % trainer.accumulate_grad_batches or trainer.is_last_batch:
            return
        is_time = self._steps and trainer.global_step % self._steps == 0
        if is_time or stops(trainer) or trainer.global_step == trainer.max_steps:
            self._save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if stops(trainer) and not trainer.is_last_batch:
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        if self._path is not None and trainer.global_step > self._saved_step:
            self._saved_step = trainer.global_step
            trainer.save_checkpoint(self._path, weights_only=False)
            plugin: Any = trainer.strategy.checkpoint_io
            self.failure = plugin.failure


def stops(trainer: Trainer) -> bool:
    """Returns whether a request to stop ends the training after this optimizer step. Before --trainer.min_epochs and
    min_steps are reached, it does not."""
    return trainer.should_stop and trainer.fit_loop._can_stop_early


def _recount(fit_loop: dict[str, Any], before: int, now: int) -> None:
    """Converts the counts of micro-batches in a checkpoint, in place, for a run that resumes with another --accumulate:
    `now` instead of `before`.

    A validation at a time, or a user's callback, may save within an optimizer step, whose gradients the checkpoint
    lacks. The resumed run begins this step again. With dropout or batch norms it is not exactly the same step, because
    its first micro-batches have already drawn random numbers and changed the running statistics.
    """
    for progress in (fit_loop["epoch_loop.batch_progress"][part] for part in ("total", "current")):
        within_step = progress["processed"] % before > 0
        in_hand = progress["processed"] - progress["completed"]  # 1 if a hook saved at the end of a batch
        for key in ("ready", "started", "processed"):
            progress[key] = progress[key] // before * now
        progress["completed"] = progress["processed"] - (0 if within_step else in_hand)
    for state in fit_loop["state_dict"].get("combined_loader", []):
        state["given"] = state["given"] // before * now
