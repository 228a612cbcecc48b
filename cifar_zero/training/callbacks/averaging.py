"""Averages batch norm statistics over the ranks, and weights over the steps of the training. The averages are what is
evaluated, and they are saved in checkpoints.

Lightning's own callback (WeightAveraging, 2.6.6) copies the whole module before the strategy shards it, so it cannot
average the shards of ZeRO 3. Also, DeepSpeed does not save what it adds to a checkpoint's state_dict.
"""

from collections.abc import Collection
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim.swa_utils import get_swa_multi_avg_fn

from cifar_zero.build_model import frozen_batch_norms, tracked_batch_norms
from cifar_zero.checkpoints.zero_folder import AVERAGE
from cifar_zero.launch.collectives import average_over_ranks
from cifar_zero.strategies import hooks_of


class BatchNormStatistics(Callback):
    """Averages the running means and variances of batch norms over the ranks before each validation, test and
    checkpoint.

    In training, no step reads the running statistics. A rank's statistics cover only its own images, and only their
    average covers all images. Without this callback, torch's DistributedDataParallel would send those of rank 0 to all
    other ranks in every step. DeepSpeed (0.19.8) would evaluate a different model on each rank and save the model of
    rank 0.
    """

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        average_statistics(pl_module)

    on_test_start = on_validation_start

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Averages the statistics in place, and copies the module's buffers into the checkpoint's state_dict, if it has
        them. Lightning calls this method on every rank."""
        average_statistics(pl_module)
        saved = checkpoint.get("state_dict", {})
        for name, buffer in pl_module.named_buffers():
            if name in saved:
                saved[name].copy_(buffer)


class Averaging(Callback):
    """Averages the trained parameters and the buffers, such as batch norm statistics, over the steps of the training,
    in float32 (see `averaged_tensors`). Each rank averages its own shards. In validation and test the model has the
    averages. The training continues with the unaveraged weights, and a checkpoint has both.

    The exponential average (Polyak and Juditsky 1992; Tarvainen and Valpola 2017) is updated after each optimizer step.
    The decay of a step, counted from 0, is min(1 - 1 / (step + 1), ema), as in the code of Mean Teacher. The first 1 /
    (1 - ema) steps therefore count equally, and the initial weights do not count.

    A callback may freeze and unfreeze parameters at the start of an epoch. A parameter that is trained only later joins
    with its value after its first step. A parameter that is frozen later is still averaged.

    Args:
        ema: Decay of the average.
    """

    def __init__(self, ema: float):
        self._max_count = 1 / (1 - ema) - 1  # new weights count at least 1 / (_max_count + 1)
        self._average_in = get_swa_multi_avg_fn()  # moves averages towards values by 1 / (count + 1) of the difference
        self._count = 0
        self._averages: dict[str, Tensor] = {}
        self._averaged: dict[str, Any] = {}  # the model's tensors that are averaged; empty until the epoch's first step
        self._newest: dict[str, Tensor] = {}  # the unaveraged weights, while the model has the averages

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._averaged = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        if not self._averaged:
            self._averaged = averaged_tensors(pl_module, self._averages)
        local = hooks_of(trainer.strategy).local
        with torch.no_grad():
            values = {name: local(part).float() for name, part in self._averaged.items()}
            self._averages |= {name: value.clone() for name, value in values.items() if name not in self._averages}
            averages = [self._averages[name] for name in values]
            self._average_in(averages, [*values.values()], min(self._count, self._max_count))
        self._count += 1

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Adds the averages to the checkpoint, keyed by their names in the plain model. Under ZeRO 3 each rank adds its
        own shards. Lightning calls this method on every rank."""
        if not self._count:
            return
        parts, hooks = self._agree(pl_module), hooks_of(trainer.strategy)
        weights = hooks.by_plain_name(self._averages)
        sharded = any(hooks.local(part) is not part for part in parts.values())
        checkpoint[AVERAGE] = {"count": self._count, "weights": weights, "sharded": sharded}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint.get(AVERAGE)
        if saved is None:
            return
        hooks = hooks_of(trainer.strategy)
        tensors: dict[str, Any] = {**dict(pl_module.named_parameters()), **dict(pl_module.named_buffers())}
        self._count, self._averages = saved["count"], {}
        for name, plain_name in hooks.plain_names(tensors).items():
            value = saved["weights"].get(plain_name)
            if value is None:  # not trained so far
                continue
            if not saved["sharded"]:
                value = hooks.shard(value, tensors[name])
            self._averages[name] = value.to(hooks.local(tensors[name]).device, torch.float32, copy=True)

    # Lightning calls these hooks in inference mode. Inference mode is turned off here, because ZeRO 3 gathers
    # parameters that are trained afterwards.
    @torch.inference_mode(False)
    @torch.no_grad()
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._count:
            return
        parts, hooks = self._agree(pl_module), hooks_of(trainer.strategy)
        with hooks.rewriting():
            for name, part in parts.items():
                self._newest[name] = hooks.local(part).clone()
                hooks.local(part).copy_(self._averages[name])

    @torch.inference_mode(False)
    @torch.no_grad()
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._count:
            return
        hooks = hooks_of(trainer.strategy)
        with hooks.rewriting():
            for name, part in self._parts(pl_module).items():
                hooks.local(part).copy_(self._newest.pop(name))

    on_test_start, on_test_end = on_validation_start, on_validation_end

    def _parts(self, module: LightningModule) -> dict[str, Any]:
        tensors = averaged_tensors(module, self._averages)
        return {name: tensors[name] for name in self._averages}

    def _agree(self, module: LightningModule) -> dict[str, Any]:
        """Replaces the average of each buffer, such as a batch norm statistic, by its mean over the ranks, which have
        seen different images. Returns the model's tensors that have an average. Every rank must call it."""
        parts = self._parts(module)
        buffers = [name for name, part in parts.items() if not isinstance(part, torch.nn.Parameter)]
        average_over_ranks([self._averages[name] for name in buffers])
        return parts


def average_statistics(module: LightningModule) -> None:
    """Replaces the running mean and variance of each batch norm that training changes (`tracked_batch_norms`) by their
    means over the ranks. Every rank must call it."""
    statistics: list[Tensor] = []
    for norm in tracked_batch_norms(module):
        if norm.running_mean is not None and norm.running_var is not None:
            statistics += [norm.running_mean, norm.running_var]
    average_over_ranks(statistics)


def averaged_tensors(module: LightningModule, also: Collection[str] = ()) -> dict[str, Any]:
    """Returns the tensors of the model that are averaged, by name: the trained parameters, the floating-point buffers
    except those of frozen batch norms, and the tensors whose names are in `also`."""
    fixed = {buffer for norm in frozen_batch_norms(module) for buffer in norm.buffers()}
    tensors: dict[str, Any] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad or name in also:
            tensors[name] = parameter
    for name, buffer in module.named_buffers():
        if name in also or (buffer.is_floating_point() and buffer not in fixed):
            tensors[name] = buffer
    return tensors
