"""Defines `ResumeCheck`, which compares a resumed run with the uninterrupted run that saved its checkpoint, and checks
each step of the resumed run.

In both runs, the step after the checkpoint must start from exactly the same values: weights, state and options of the
optimizer, averages of the weights, buffers, and the positions of loops and schedules. The batches of this step and of
later steps must be the same. `StepCheck` judges what a step computes from these values.

Tensors are compared bit by bit, in unsharded form, so the resumed run may have another strategy and number of ranks. If
the resumed run keeps a value in a lower precision, the value must equal the saved value rounded to this precision.
"""

import math
import re
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils._pytree import keystr, tree_leaves_with_path

from cifar_zero.step_check.between_steps import checksum
from cifar_zero.step_check.callback import StepCheck
from cifar_zero.step_check.findings import Findings, off_by
from cifar_zero.step_check.guard import exchange
from cifar_zero.step_check.updates import parameters_of, updated_by
from cifar_zero.step_check.verdict import Kind
from cifar_zero.strategies import hooks_of
from cifar_zero.strategies.hooks import local_of, tensors_in

CHECKPOINT = "checkpoint.ckpt"

STATE = "state.pt"
"""File that the uninterrupted run writes. It has the values from which the step after the checkpoint started, and the
checksums of the batches of all steps."""

NOT_RESTORED = (
    "Lightning restores a position in mid-epoch only for a loader with state_dict, but never restores a shuffle's order"
)

Batch = list[list[int]]  # the batch of a step: for each rank, a checksum of each row of each tensor

State = dict[tuple[Kind, str], Tensor]  # values by kind and name; a number is a tensor without dimensions


class ResumeCheck(StepCheck):
    """Saves a checkpoint of an uninterrupted run, or judges the run that resumes from this checkpoint. Every rank must
    have this callback."""

    comes_first = False  # other callbacks must have finished the step when its checkpoint is saved

    def __init__(self, folder: Path, save_at: int = 0):
        """Chooses whether to save a checkpoint or to judge a resumed run.

        Args:
            folder: The folder that has the checkpoint and the file STATE.
            save_at: The optimizer step after which to save, which must not be the last step. 0 means that this run
                resumes from the checkpoint in `folder` and is judged.
        """
        super().__init__(every=1, on_fault="warn")
        self._folder, self._save_at = folder, save_at
        self._saved: dict[str, Any] = {}  # the content of STATE
        if not save_at:
            self._saved = torch.load(folder / STATE)
            self.resumed_at, self.checkpoint = self._saved["step"], folder / CHECKPOINT
        self._begins = not save_at  # whether the next step is the first one after the checkpoint
        self._batches: dict[int, list[int]] = {}  # of this rank, by step

    def on_micro_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Handles the values from which the first step after the checkpoint starts. The uninterrupted run keeps them,
        and the resumed run compares them with the saved values. Also keeps checksums of the batch."""
        if self._begins:
            self._begins = False
            state = _state(trainer, pl_module)
            if self._save_at:
                self._saved = {"step": self._save_at, "state": state}
            else:
                self._compare(trainer, state)
        self._batches.setdefault(trainer.global_step + 1, []).extend(_rows(batch))
        super().on_micro_batch_start(trainer, pl_module, batch, batch_idx)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Saves the checkpoint if step `save_at` has ended but its epoch has not."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if not trainer.is_last_batch:  # a checkpoint saved here would not count the epoch as done
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves the checkpoint if step `save_at` was the last step of the epoch."""
        self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        if trainer.global_step == self._save_at and not self._saved and not self._begins:
            trainer.save_checkpoint(self._folder / CHECKPOINT, weights_only=False)
            self._begins = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the file STATE in the uninterrupted run. In the resumed run, compares the batches of all its steps
        with the batches of the uninterrupted run."""
        of_ranks = exchange(self._batches)
        batches = {step: [each[step] for each in of_ranks] for step in self._batches}
        if not self._save_at:
            self._compare_batches(trainer, batches)
        elif self._saved and trainer.is_global_zero:
            torch.save({**self._saved, "batches": batches}, self._folder / STATE)
        super().on_train_end(trainer, pl_module)

    def _compare(self, trainer: Trainer, state: State) -> None:
        """Compares the values from which the first step of the resumed run starts with the saved values."""
        self._findings = Findings(self.resumed_at, self.verdict)
        for (kind, name), wanted in self._saved["state"].items():
            found = state.get((kind, name))
            if found is not None:
                known = ~wanted.isnan()
                off = off_by(found[known], wanted[known].to(found.dtype))
                how = "it differs from the saved value" if wanted.dim() else f"it is {found:g} instead of {wanted:g}"
                self._findings.add(kind, name, off, 0.0, wanted.numel(), how)
            elif wanted.dim():  # else an option that another implementation of the optimizer lacks
                self._findings.add(kind, name, 1.0, 0.0, wanted.numel(), "it is missing")
        self._finish(trainer, only_rank_0=True)

    def _compare_batches(self, trainer: Trainer, batches: Mapping[int, Batch]) -> None:
        self._findings, saved = Findings(0, self.verdict), self._saved["batches"]
        for step in range(self.resumed_at + 1, max(saved) + 1):
            self._findings.step, found, pattern = step, batches.get(step), ""
            if found is None:
                pattern = "the resumed training ended before this step"
            elif not _are_same(found, saved[step]):
                earlier = [f"step {other}" for other in saved if _are_same(found, saved[other])]
                pattern = f"it is the batch of {next(iter(earlier), 'no step')}: {NOT_RESTORED}"
                if not self.verdict.faults:
                    pattern += "; the first step starts from exactly the saved values"
            self._findings.add("batch", "", math.inf if pattern else 0.0, 0.0, 1, pattern)
        self._finish(trainer, only_rank_0=True)


def _are_same(one: Batch, other: Batch) -> bool:
    """Returns whether each rank had the same rows in both batches. If the batches come from different numbers of ranks,
    returns whether all ranks together had the same rows, in any order."""
    return one == other or (len(one) != len(other) and {*chain(*one)} == {*chain(*other)})


def _rows(batch: Any) -> list[int]:
    """Returns a checksum of each row of each tensor in a micro-batch. Floating-point values are rounded to bfloat16,
    because an engine may have cast them."""
    found: list[int] = []
    for tensor in tensors_in(batch):
        values = tensor.detach().cpu().to(torch.bfloat16 if tensor.is_floating_point() else tensor.dtype)
        for row in torch.atleast_1d(values):
            found.append(checksum(row))
    return found


def _state(trainer: Trainer, module: LightningModule) -> State:
    """Returns the values from which the next step starts, as flattened unsharded tensors. Elements that no rank keeps
    are NaN, and elements for which ranks have different values are infinite. Buffers come from rank 0, as in most
    checkpoints. Every rank must call it."""
    hooks = hooks_of(trainer.strategy)
    buffers = {name: buffer.detach().flatten().cpu() for name, buffer in module.named_buffers()}
    weights = hooks.weights(module)
    found: State = {("buffer", name): buffer for name, buffer in exchange(buffers)[0].items()}
    for name, parameter in parameters_of(hooks, module).items():  # with frozen weights, which no optimizer has
        found["weight", name] = weights[name].flatten().to(hooks.compute_dtype(parameter))
    positions: dict[str, float] = {"step": trainer.global_step, "epoch": trainer.current_epoch}
    for config in trainer.lr_scheduler_configs:
        positions |= _numbers(config.scheduler.state_dict())
    for name, value in positions.items():
        if name[-1].isalpha():  # a list has an element per parameter group, and a strategy may split the groups
            found["position", name] = _scalar(value)

    shapes = {name: whole.shape for name, whole in sorted({**weights, **dict(module.named_buffers())}.items())}
    sizes = [math.prod(shape) for shape in shapes.values()]
    numbers = zip(shapes, torch.arange(1, sum(sizes) + 1).split(sizes), strict=True)
    tensors: list[tuple[str, Tensor, Tensor]] = []  # a key in the optimizer, the numbers of the elements, their values
    for names, numbered, values in _kept(trainer, module, {name: each.view(shapes[name]) for name, each in numbers}):
        used = numbered > 0  # padding is 0
        for key, value in values.items():
            if isinstance(value, Tensor) and value.dim():
                part = local_of(value).detach().flatten().cpu()[: len(used)]
                tensors.append((key, numbered[used] - 1, part[used]))
            elif isinstance(value, (Tensor, float, int)):
                found |= {_label(key, name): _scalar(value) for name in names}
    wholes: dict[str, Tensor] = {}
    for key, places, values in chain(*exchange(tensors)):
        whole = wholes.setdefault(key, torch.full((sum(sizes),), math.nan, dtype=values.dtype))
        agrees = whole[places].isnan() | (whole[places] == values)
        whole[places] = torch.where(agrees, values, math.inf)  # inf where ranks have different values
    for key, whole in wholes.items():
        for name, part in zip(shapes, whole.split(sizes), strict=True):
            if not part.isnan().all():
                found[_label(key, name)] = part.clone()
    return found


def _kept(
    trainer: Trainer, module: LightningModule, numbers: Mapping[str, Tensor]
) -> Iterator[tuple[list[str], Tensor, dict[str, Any]]]:
    """Yields the values that this rank keeps in order to update and average weights, such as its shards of the
    optimizer state. Each item has the names of one or more weights, this rank's part of the `numbers` of their
    elements, and the kept tensors and scalars by name.

    Args:
        trainer: The Trainer.
        module: The module that the strategy trains.
        numbers: A number for each element of each weight and buffer, in unsharded tensors by name.
    """
    hooks = hooks_of(trainer.strategy)
    for updated, own in updated_by(hooks, module, trainer.optimizers[0], at_any_step=True):
        options = _numbers({**updated.group, "params": None})
        values = {"weight": updated.target, **updated.state, **options}
        yield own, _flat(updated.cut([numbers[name] for name in own])), values
    held: dict[str, Any] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    plain = hooks.plain_names(held)
    callbacks: list[Any] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    for callback in callbacks:
        if averages := getattr(callback, "averages", None):  # of --ema and --swa_from
            for name, values in averages(module).items():
                yield [plain[name]], _flat(hooks.cut(numbers[plain[name]], held[name])), values


def _flat(tensor: Any) -> Tensor:
    return local_of(tensor).flatten().cpu().long()


def _scalar(value: Any) -> Tensor:
    return torch.tensor(float(value), dtype=torch.float64)


def _label(key: str, name: str) -> tuple[Kind, str]:
    """Returns the kind and the name of the finding for a value that is kept for a weight.

    Args:
        key: Name of the value, such as lr or exp_avg.
        name: Name of the weight.
    """
    kinds: dict[str, Kind] = {"lr": "learning rate", "weight": "weight"}
    return (kinds[key], name) if key in kinds else ("state", f"{key} of {name}")


def _numbers(container: Any) -> dict[str, float]:
    """Returns the numbers in nested containers, keyed by their paths, such as lr or betas.0."""
    found: dict[str, float] = {}
    for path, value in tree_leaves_with_path(container):
        if type(value) in (int, float) or (isinstance(value, Tensor) and not value.dim()):
            found[re.sub(r"\W+", ".", keystr(path)).strip(".")] = float(value)
    return found
