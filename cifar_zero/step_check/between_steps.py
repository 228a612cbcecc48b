"""Compares what a checked step leaves with what the next checked step finds, if no step lies between them."""

import math
import zlib
from collections.abc import Mapping

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from cifar_zero.step_check.findings import Findings
from cifar_zero.step_check.updates import updated_by
from cifar_zero.step_check.user_code import mentions, owners_of_hooks, user_hooks
from cifar_zero.step_check.verdict import Kind
from cifar_zero.strategies import hooks_of
from cifar_zero.strategies.hooks import local_of

STEP_HOOKS = ("on_train_batch_start", "on_train_batch_end")

EPOCH_HOOKS = ("on_train_epoch_start", "on_train_epoch_end")

Sums = dict[tuple[Kind, str], int]
"""Checksums by the kind and the name of the value."""

Modes = dict[tuple[Kind, str], bool]
"""Whether each weight is trained, keyed by "weight" and its name, and whether each submodule is in training mode, keyed
by "training mode" and its name."""


class BetweenSteps:
    """Keeps checksums of the weights and of this rank's optimizer state after a step, and the modes before a step."""

    def __init__(self) -> None:
        self._modes: Modes = {}  # before the last checked step, when all hooks of the start have set them
        self._step, self._epoch = 0, 0  # of the checksums
        self._sums: Sums = {}

    def keep(self, step: int, trainer: Trainer, module: LightningModule, weights: Mapping[str, Tensor]) -> None:
        """Keeps the checksums after a step. `weights` are the unsharded weights."""
        self._step, self._epoch, self._sums = step, trainer.current_epoch, _sums(trainer, module, weights)

    def compare(
        self, findings: Findings, trainer: Trainer, module: LightningModule, weights: Mapping[str, Tensor]
    ) -> None:
        """Compares the values before the step of `findings` with the kept values. The user's own code may have changed
        them, which is only noted. `weights` are the unsharded weights."""
        owners = owners_of_hooks(trainer, module)
        before, self._modes = self._modes, modes_of(module)
        wrong = [name for kind, name in changed_modes(before, self._modes) if kind == "training mode"]
        if wrong and mentions(owners, ".eval()", ".train("):
            findings.verdict.note("training modes, because the module or a callback may set them")
            wrong = []
        for name in wrong:
            now = "in training mode" if self._modes["training mode", name] else "in evaluation mode"
            findings.add("training mode", name or "the module", math.inf, 0.0, 1, f"it is {now}, unlike before")
        if self._step != findings.step - 1 or not self._sums:
            return
        sums = _sums(trainer, module, weights)
        changed = [key for key, own in self._sums.items() if sums.get(key) != own]
        names = STEP_HOOKS if trainer.current_epoch == self._epoch else (*STEP_HOOKS, *EPOCH_HOOKS)
        hooks = user_hooks(owners, *names)
        if changed and hooks:
            why = " or ".join(map(str, hooks))
            findings.verdict.note(f"what changes between two steps, because {why} may change weights")
            return
        for kind, name in changed:
            findings.add(kind, name, math.inf, 0.0, 1, f"it has changed since the end of step {self._step}")


def modes_of(module: LightningModule) -> Modes:
    """Returns the modes of a module."""
    modes: Modes = {("weight", name): parameter.requires_grad for name, parameter in module.named_parameters()}
    for name, part in module.named_modules():
        modes["training mode", name] = part.training
    return modes


def changed_modes(before: Modes, after: Modes) -> list[tuple[Kind, str]]:
    """Returns the keys of the modes that have changed."""
    return [key for key, mode in before.items() if after.get(key, mode) != mode]


def checksum(tensor: Tensor) -> int:
    """Returns a checksum of a tensor's values."""
    return zlib.crc32(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)


def _sums(trainer: Trainer, module: LightningModule, weights: Mapping[str, Tensor]) -> Sums:
    sums: Sums = {("weight", name): checksum(weight) for name, weight in weights.items()}
    for updated, names in updated_by(hooks_of(trainer.strategy), module, trainer.optimizers[0], at_any_step=True):
        for key, value in updated.state.items():
            if isinstance(value, Tensor):
                sums["state", f"{key} of {names[0]}"] = checksum(local_of(value))
    return sums
