"""An average of the weights over the training, which is evaluated and exported in place of the newest ones.

Lightning's own callback (WeightAveraging, 2.6.6) copies the whole module before the strategy has it: it cannot average
the shards of ZeRO-3, nor does DeepSpeed save what it puts into a checkpoint's state_dict.
"""

import math
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim.swa_utils import get_swa_multi_avg_fn

from cifar_zero.checkpoints.finetuning.freeze import counting, rest_statistics, resting
from cifar_zero.checkpoints.zero_folder import AVERAGE
from cifar_zero.launch.collectives import average_over_ranks, gather
from cifar_zero.strategies import own

average_in = get_swa_multi_avg_fn()
"""Moves averages, a list, towards values by 1 / (count + 1) of the way, in one call for all of them."""


class Averaging(Callback):
    """Averages what is trained, and the batch norms' statistics, in float32: each rank what it holds, at ZeRO-3 its
    shards. The training itself goes on with its own weights; a checkpoint has both.

    Exponentially (Polyak and Juditsky 1992; Tarvainen and Valpola 2017), after each optimizer step: the first
    1 / (1 - ema) are averaged equally, as by mean teacher's code (min(1 - 1 / (step + 1), decay)), so that the initial
    weights have no part in it. Or equally at the end of each epoch (stochastic weight averaging, Izmailov et al. 2018),
    with the batch norms' statistics computed anew for the average, on the training images.

    Args:
        ema: decay of the exponential average, or 0.
        swa_from: share of the training after which the equal one begins, where there is no exponential one.
    """

    def __init__(self, ema: float, swa_from: float):
        self._kind = "ema" if ema else "swa"
        self._most = 1 / (1 - ema) - 1 if ema else math.inf
        """What the count of an average in which all have the same weight comes to at most."""
        self._swa_from = swa_from
        self._first_step = 0
        self._count = 0
        self._averages: list[Tensor] = []
        self._held: list[Any] = []
        """What is averaged, in the order of `_averages`."""
        self._newest: list[Tensor] = []
        """What the training goes on with, while the network has the averages."""
        self._stale = False
        """Whether the average's batch norms have the statistics of another network."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Looks up what there is to average, and when it begins."""
        self._held = [*held(pl_module).values()]
        if self._kind == "swa":
            self._first_step = round(self._swa_from * trainer.estimated_stepping_batches)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Averages the newest weights in, after an optimizer step or at the end of an epoch."""
        accumulating = (batch_idx + 1) % trainer.accumulate_grad_batches and not trainer.is_last_batch
        if accumulating or (self._kind == "swa" and not self._is_end(trainer)):
            return
        with torch.no_grad():
            values = [part if part.dtype == torch.float32 else part.float() for part in map(own_part, self._held)]
            if self._count:
                average_in(self._averages, values, min(self._count, self._most))
            else:
                self._averages = [value.clone() for value in values]
        self._count += 1
        self._stale = self._kind == "swa"

    def _is_end(self, trainer: Trainer) -> bool:
        ends = trainer.is_last_batch or trainer.global_step == trainer.max_steps
        return ends and trainer.global_step >= self._first_step

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gives the network the averages."""
        self._swap_in(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gives the network its own weights back."""
        self._swap_out(trainer, pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gives the network the averages."""
        self._swap_in(trainer, pl_module)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gives the network its own weights back."""
        self._swap_out(trainer, pl_module)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Adds the averages by the plain network's names, of stage 3 this rank's parts; called on every rank."""
        if not self._count:
            return
        if self._stale:
            self._swap_in(trainer, pl_module)
            self._swap_out(trainer, pl_module)
        self._agree(pl_module)
        parts = held(pl_module)
        plain = own(trainer.strategy).plain_names(parts)
        weights = {plain[name]: value for name, value in zip(parts, self._averages, strict=True)}
        of_experts = {plain[name]: weights[plain[name]].cpu() for name, part in parts.items() if is_spread(part)}
        if of_experts:  # rank 0 writes, and has its own alone
            for experts in gather(of_experts):
                weights |= experts
        sharded = any(own_part(part) is not part for part in parts.values())
        checkpoint[AVERAGE] = {"kind": self._kind, "count": self._count, "weights": weights, "sharded": sharded}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Takes the averages up; where there are none of this kind they begin anew."""
        saved = checkpoint.get(AVERAGE)
        if saved is None or saved["kind"] != self._kind:
            return
        parts = held(pl_module)
        plain = own(trainer.strategy).plain_names(parts)
        if not saved["weights"].keys() >= {*plain.values()}:  # others are trained now
            return
        self._count, self._averages = saved["count"], []
        for name, part in parts.items():
            value, mine = saved["weights"][plain[name]], own_part(part)
            if mine is not part and not saved["sharded"]:
                value = trainer.strategy.cut(value, part)  # pyright: ignore[reportAttributeAccessIssue]
            self._averages.append(value.to(mine.device, torch.float32, copy=True))

    # Not in inference mode, in which Lightning calls these: what stage 3 puts together here is trained with afterwards.
    @torch.inference_mode(False)
    @torch.no_grad()
    def _swap_in(self, trainer: Trainer, module: LightningModule) -> None:
        if not self._count:
            return
        self._agree(module)
        with own(trainer.strategy).rewriting():
            parts = [own_part(part) for part in held(module).values()]
            self._newest = [part.clone() for part in parts]
            for part, average in zip(parts, self._averages, strict=True):
                part.copy_(average)
        if self._stale:
            self._stale = False
            self._renew_statistics(trainer, module)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _swap_out(self, trainer: Trainer, module: LightningModule) -> None:
        if not self._count:
            return
        with own(trainer.strategy).rewriting():
            for part, newest in zip(held(module).values(), self._newest, strict=True):
                own_part(part).copy_(newest)
        self._newest = []

    def _renew_statistics(self, trainer: Trainer, module: LightningModule) -> None:
        """Of the batch norms, for the averages that the network has now: on the training images of epoch 0."""
        norms: list[Any] = counting(module)
        if not norms:
            return
        modes = [(layer, layer.training) for layer in module.modules()]
        before = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms]
        module.train()
        rest_statistics(module)
        for norm in norms:
            norm.num_batches_tracked = torch.zeros_like(norm.num_batches_tracked)  # the training goes on with its own
            norm.reset_running_stats()
            norm.momentum = None  # the plain mean over all batches, as torch's own update_bn has it
        with torch.random.fork_rng():  # the training goes on as if nothing had been drawn
            for images, _ in trainer.datamodule.train_dataloader():  # pyright: ignore[reportAttributeAccessIssue]
                module(images.to(trainer.strategy.root_device))
        for norm, momentum, counted in before:
            norm.momentum, norm.num_batches_tracked = momentum, counted
        for layer, training in modes:
            layer.training = training
        for buffer, average in self._statistics(module):
            average.copy_(buffer)
        self._agree(module)
        for buffer, average in self._statistics(module):
            buffer.copy_(average)

    def _agree(self, module: LightningModule) -> None:
        """Takes the mean over the ranks of averaged statistics: each has those of the images that it has seen."""
        average_over_ranks([average for _, average in self._statistics(module)])

    def _statistics(self, module: LightningModule) -> list[tuple[Tensor, Tensor]]:
        """The buffers of the network, each with its average."""
        pairs = zip(held(module).values(), self._averages, strict=True)
        return [(part, average) for part, average in pairs if not isinstance(part, torch.nn.Parameter)]


def held(module: LightningModule) -> dict[str, Any]:
    """What of a network is averaged, by its names: the parameters that are trained, and buffers of real numbers but the
    statistics of frozen layers."""
    parameters = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    fixed = {buffer for norm in resting(module) for buffer in norm.buffers()}
    buffers = {name: buffer for name, buffer in module.named_buffers() if buffer not in fixed}
    return parameters | {name: buffer for name, buffer in buffers.items() if buffer.is_floating_point()}


def own_part(value: Any) -> Tensor:
    """What this rank has of a parameter or buffer: at ZeRO-3 its flat shard (DeepSpeed 0.19.8)."""
    return getattr(value, "ds_tensor", value)


def is_spread(value: Any) -> bool:
    """Whether other ranks have other values of it: DeepSpeed (0.19.8) marks the parameters of experts so."""
    return not getattr(value, "allreduce", True)
