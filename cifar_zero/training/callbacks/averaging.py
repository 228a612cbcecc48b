"""Averages batch norm statistics over the ranks, and weights over the steps of the training. The averages are what is
evaluated, and they are saved in checkpoints.

Lightning's own callback (WeightAveraging, 2.6.6) is not used. It copies the whole module before the strategy shards it,
so it cannot average the shards of ZeRO 3. Also, DeepSpeed does not save the entries that WeightAveraging adds to a
checkpoint's state_dict.
"""

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

    In training, a rank normalises with the statistics of its own micro-batch, and no step reads the running statistics.
    A rank's running statistics cover only the images that this rank has seen. Only their average over the ranks covers
    all images. Without this callback, torch's DistributedDataParallel would send the statistics of rank 0 to all other
    ranks in every step. DeepSpeed (0.19.8) would evaluate a different model on each rank and save the model of rank 0.
    """

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        average_statistics(pl_module)

    on_test_start = on_validation_start

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Averages the running statistics of the module's batch norms over the ranks, in place, and copies the module's
        buffers into the checkpoint's state_dict, if it has them. Lightning calls this method on every rank."""
        average_statistics(pl_module)
        saved = checkpoint.get("state_dict", {})
        for name, buffer in pl_module.named_buffers():
            if name in saved:
                saved[name].copy_(buffer)


class Averaging(Callback):
    """Averages the trained parameters and the buffers, such as batch norm statistics, over the steps of the training,
    in float32 (see `averaged_tensors`). Each rank averages its own shards.

    The training continues with the unaveraged weights, and a checkpoint has both the averages and the unaveraged
    weights. In validation and test the model has the averages. The exponential average (Polyak and Juditsky 1992;
    Tarvainen and Valpola 2017) is updated after each optimizer step. The decay of a step, counted from 0, is min(1 - 1
    / (step + 1), ema), as in the code of Mean Teacher. The first 1 / (1 - ema) steps therefore count equally, and the
    model's initial weights do not contribute to the average.

    Args:
        ema: Decay of the average.
    """

    def __init__(self, ema: float):
        self._max_count = 1 / (1 - ema) - 1  # new weights count at least 1 / (_max_count + 1)
        self._average_in = get_swa_multi_avg_fn()  # moves averages towards values by 1 / (count + 1) of the difference
        self._count = 0
        self._averages: list[Tensor] = []
        self._averaged: list[Any] = []  # the model's tensors that are averaged, in the order of `_averages`
        self._newest: list[Tensor] = []  # the unaveraged weights, while the model has the averages

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._averaged = [*averaged_tensors(pl_module).values()]

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Adds the current weights to the average after each optimizer step."""
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        with torch.no_grad():
            values = [part.float() for part in map(hooks_of(trainer.strategy).local, self._averaged)]
            if self._count:
                self._average_in(self._averages, values, min(self._count, self._max_count))
            else:
                self._averages = [value.clone() for value in values]
        self._count += 1

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Adds the averages to the checkpoint, keyed by their names in the plain model. Under ZeRO 3 each rank adds its
        own shards. Lightning calls this method on every rank."""
        if not self._count:
            return
        self._agree(pl_module)
        parts, hooks = averaged_tensors(pl_module), hooks_of(trainer.strategy)
        weights = hooks.by_plain_name(dict(zip(parts, self._averages, strict=True)))
        sharded = any(hooks.local(part) is not part for part in parts.values())
        checkpoint[AVERAGE] = {"count": self._count, "weights": weights, "sharded": sharded}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Restores the averages from the checkpoint. If the checkpoint lacks the average of a tensor that this run
        averages, the averaging begins again."""
        saved = checkpoint.get(AVERAGE)
        if saved is None:
            return
        parts, hooks = averaged_tensors(pl_module), hooks_of(trainer.strategy)
        plain = hooks.plain_names(parts)
        if not saved["weights"].keys() >= {*plain.values()}:  # other parameters are trained now
            return
        self._count, self._averages = saved["count"], []
        for name, part in parts.items():
            value = saved["weights"][plain[name]]
            if not saved["sharded"]:
                value = hooks.shard(value, part)
            self._averages.append(value.to(hooks.local(part).device, torch.float32, copy=True))

    # Lightning calls these hooks in inference mode. Inference mode is turned off here, because ZeRO 3 gathers
    # parameters that are trained afterwards.
    @torch.inference_mode(False)
    @torch.no_grad()
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._count:
            return
        self._agree(pl_module)
        hooks = hooks_of(trainer.strategy)
        with hooks.rewriting():
            parts = [hooks.local(part) for part in averaged_tensors(pl_module).values()]
            self._newest = [part.clone() for part in parts]
            for part, average in zip(parts, self._averages, strict=True):
                part.copy_(average)

    @torch.inference_mode(False)
    @torch.no_grad()
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._count:
            return
        hooks = hooks_of(trainer.strategy)
        with hooks.rewriting():
            for part, newest in zip(averaged_tensors(pl_module).values(), self._newest, strict=True):
                hooks.local(part).copy_(newest)
        self._newest = []

    on_test_start, on_test_end = on_validation_start, on_validation_end

    def _agree(self, module: LightningModule) -> None:
        """Replaces the average of each buffer, such as a batch norm statistic, by its mean over the ranks, because each
        rank has seen only its own images. Every rank must call it."""
        pairs = zip(averaged_tensors(module).values(), self._averages, strict=True)
        average_over_ranks([average for part, average in pairs if not isinstance(part, torch.nn.Parameter)])


def average_statistics(module: LightningModule) -> None:
    """Replaces the running mean and variance of each batch norm that training changes (`tracked_batch_norms`) by their
    means over the ranks. Every rank must call it."""
    statistics: list[Tensor] = []
    for norm in tracked_batch_norms(module):
        if norm.running_mean is not None and norm.running_var is not None:
            statistics += [norm.running_mean, norm.running_var]
    average_over_ranks(statistics)


def averaged_tensors(module: LightningModule) -> dict[str, Any]:
    """Returns the tensors of the model that are averaged, by name. These are the trained parameters, and all
    floating-point buffers except the buffers of frozen batch norms."""
    tensors: dict[str, Any] = {name: each for name, each in module.named_parameters() if each.requires_grad}
    fixed = {buffer for norm in frozen_batch_norms(module) for buffer in norm.buffers()}
    for name, buffer in module.named_buffers():
        if buffer.is_floating_point() and buffer not in fixed:
            tensors[name] = buffer
    return tensors
