"""Compares a run that is resumed from Lightning's checkpoint with the run that saved the checkpoint and continued.

Both runs have the same strategy and ranks, so each rank compares its local shards, bit by bit. Lightning does not
restore random states. Once the resumed run has drawn its first batch, it is therefore given the random states of the
other run.
"""

import hashlib
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils._pytree import keystr, tree_leaves_with_path

from stepcheck.engines import adapter_of
from stepcheck.engines.adapter import RankInfo
from stepcheck.replay.random_state import random_state, set_random_state
from stepcheck.start import PLAIN
from stepcheck.verdict import Finding, Kind

NOT_RESTORED = "Lightning restores a position in an epoch only for loaders with state_dict, and never a shuffled order"

Checksums = dict[tuple[Kind, str], Any]
"""Checksums of tensors, and numbers and strings as they are, by kind and name."""


class StateRecorder(Callback):
    """Records the state in which the first step after `step` begins, and the last weights and optimizer state."""

    def __init__(self, step: int = 0, checkpoint: Path | None = None, random: dict[str, Any] | None = None):
        """Chooses the step to record.

        Args:
            step: Records the state after this many optimizer steps. 0: at this run's first step, also if it is resumed.
            checkpoint: Where to save a checkpoint after `step` steps, or None.
            random: Random states to set when the state is recorded, after the step's first batch was drawn. None leaves
                them as they are, and `self.random` then has them.
        """
        self.step, self.checkpoint, self.random = step, checkpoint, random
        self.first: Checksums = {}
        self.last: Checksums = {}
        self.steps = 0  # of the whole training, at its end
        self._is_saved = False

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step >= self.step and not self.first:
            self.first, self.random = _state(trainer, pl_module, batch), self.random or random_state()
            set_random_state(self.random)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if not trainer.is_last_batch:  # a checkpoint saved now would not count the epoch as done
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        if self.checkpoint and trainer.global_step == self.step and not self._is_saved:
            trainer.save_checkpoint(self.checkpoint, weights_only=False)
            self._is_saved = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.last, self.steps = _weights(trainer, pl_module), trainer.global_step


def differences(saved: StateRecorder, resumed: StateRecorder) -> list[Finding]:
    """Compares a resumed run with the run that continued without an interruption. Returns the differences of all ranks,
    at most 100 findings. A rank compares the ends of the runs only if it has found no difference in the first resumed
    step. Every rank must call it."""
    found = _differences(saved.step + 1, saved.first, resumed.first, "in the first resumed step")
    found = found or _differences(saved.steps, saved.last, resumed.last, "at the end")
    return [each for of_rank in RankInfo.current().all_gather(found) for each in of_rank][:100]


def _differences(step: int, expected: Checksums, actual: Checksums, when: str) -> list[Finding]:
    found = []
    for (kind, name), value in expected.items():
        other = actual.get((kind, name), "missing")
        if other != value:
            how = f": it is {other} instead of {value}" if isinstance(value, (int, float)) else ""
            text = f"{name} {when} differs from the run that was not interrupted{how}"
            if kind == "batch":
                text += f": {NOT_RESTORED}"
            found.append(Finding(step, kind, text, float("inf"), RankInfo.current().rank))
    return found


def _state(trainer: Trainer, module: LightningModule, batch: Any) -> Checksums:
    found = _flat("batch", "the batch", batch) | _weights(trainer, module)
    found["counter", "the number of steps"] = trainer.global_step
    found["counter", "the number of epochs"] = trainer.current_epoch
    for config in trainer.lr_scheduler_configs:
        found |= _flat("schedule", "the schedule", config.scheduler.state_dict())
    return found


def _weights(trainer: Trainer, module: LightningModule) -> Checksums:
    """Returns the weights, options and optimizer state of this rank, and on rank 0 the buffers, as in a checkpoint."""
    found: Checksums = {}
    for name, parameter in module.named_parameters():
        found |= _flat("weight", name, getattr(parameter, "ds_tensor", parameter))
    if trainer.is_global_zero:
        for name, buffer in module.named_buffers():
            found |= _flat("buffer", name, buffer)
    model: Any = trainer.strategy.model
    adapter = adapter_of(model, trainer.optimizers[0])
    for number, group in enumerate(adapter.optimizer.param_groups):
        options = {name: value for name, value in group.items() if name != "params"}
        found |= _flat("options", f"parameter group {number}", options)
    for number, target in enumerate(adapter.targets.values()):  # at ZeRO 3 the groups have no tensors between steps
        names = ", ".join(adapter.names[part.index] for part in target.parts[:3])
        where = f"optimizer tensor {number} ({names})"
        found |= _flat("weight", where, target.tensor)
        found |= _flat("state", where, adapter.optimizer.state.get(target.tensor, {}))
    return found


def _flat(kind: Kind, name: str, tree: Any) -> Checksums:
    """Returns the checksum of each tensor in a tree, and its numbers and strings, by kind and path."""
    found: Checksums = {}
    for path, value in tree_leaves_with_path(tree):
        label = f"{keystr(path)} of {name}" if path else name
        if isinstance(value, Tensor):
            found[kind, label] = _checksum(value)
        elif isinstance(value, PLAIN):
            found[kind, label] = value
    return found


def _checksum(tensor: Any) -> str:
    local = (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()
    if local.layout == torch.sparse_coo:
        local = local.coalesce()
    if local.is_nested or local.layout != torch.strided:
        local = local.values()
    local = local.cpu().contiguous()
    return hashlib.sha256(local.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
