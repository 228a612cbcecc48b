"""Faults that ranks plant into DeepSpeed and torch, each like one that a release has had; never into this program.

A sitecustomize.py on PYTHONPATH calls `plant` with the name of a function, before the rank imports anything else.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import stage_1_and_2
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

STEP = 3
"""Optimizer step at which a fault that happens once happens."""

SITE = """
import os
if "RANK" in os.environ:
    from tests.support.planted_faults import plant
    plant("{name}")
"""
"""Content of sitecustomize.py."""


def plant(name: str) -> None:
    """Plants a fault of this module into this process."""
    globals()[name]()


def gradients_halved() -> None:
    backward = DeepSpeedEngine.backward
    DeepSpeedEngine.backward = lambda self, loss, *args, **options: backward(self, loss / 2, *args, **options)


def micro_batch_lost() -> None:
    backward = DeepSpeedEngine.backward

    def broken(self, loss, *args, **options):
        return backward(self, 0 * loss if self.micro_steps % 4 == 1 else loss, *args, **options)

    DeepSpeedEngine.backward = broken


def bfloat16_gradients_scaled() -> None:
    backward = DeepSpeedEngine.backward

    def broken(self, loss, *args, **options):
        return backward(self, 1.2 * loss if self.bfloat16_enabled() else loss, *args, **options)

    DeepSpeedEngine.backward = broken


def bfloat16_micro_batch_lost() -> None:
    backward = DeepSpeedEngine.backward

    def broken(self, loss, *args, **options):
        lost = self.bfloat16_enabled() and self.micro_steps % 4 == 1
        return backward(self, 0 * loss if lost else loss, *args, **options)

    DeepSpeedEngine.backward = broken


def bfloat16_decay_dropped() -> None:
    step = stage_1_and_2.DeepSpeedZeroOptimizer._optimizer_step

    def broken(self, group_no):
        groups = self.optimizer.param_groups
        kept = [group["weight_decay"] for group in groups]
        for group in groups:
            group["weight_decay"] *= self.dtype != torch.bfloat16
        step(self, group_no)
        for group, decay in zip(groups, kept, strict=True):
            group["weight_decay"] = decay

    stage_1_and_2.DeepSpeedZeroOptimizer._optimizer_step = broken


def stale_weights_of_one_rank() -> None:
    """One rank does not receive the weights that a step has updated."""
    step = stage_1_and_2.DeepSpeedZeroOptimizer.step

    def broken(self, *args, **options):
        before = [flat.clone() for flat in self.bit16_groups_flat]
        step(self, *args, **options)
        if dist.get_rank() == 1 and _count(self, "steps") == STEP:
            for flat, old in zip(self.bit16_groups_flat, before, strict=True):
                flat.copy_(old)

    stage_1_and_2.DeepSpeedZeroOptimizer.step = broken


def bucket_not_reduced() -> None:
    """The first of several buckets of a step is flushed without its all-reduce."""
    reduce = stage_1_and_2.DeepSpeedZeroOptimizer.average_tensor

    def broken(self, *args, **options):
        if _count(self, "reductions") > 1:
            reduce(self, *args, **options)

    stage_1_and_2.DeepSpeedZeroOptimizer.average_tensor = broken


def shard_changed_at_release() -> None:
    """Stage 3 changes a shard when it frees the whole parameter."""
    name = "_PartitionedParameterCoordinator__release_param"
    release = getattr(PartitionedParameterCoordinator, name)

    def broken(self, param, *args, **options):
        release(self, param, *args, **options)
        if param.dim() and _count(PartitionedParameterCoordinator, "releases") == 5:
            param.ds_tensor.mul_(1.04)

    setattr(PartitionedParameterCoordinator, name, broken)


def batch_norm_never_updated() -> None:
    forward = DeepSpeedEngine.forward

    def broken(self, *args, **options):
        buffers = [(buffer, buffer.clone()) for buffer in self.module.buffers()]
        result = forward(self, *args, **options)
        for buffer, old in buffers:
            buffer.data.copy_(old)
        return result

    DeepSpeedEngine.forward = broken


def dead_partition() -> None:
    """One rank no longer updates its part from a step on."""
    step = stage_1_and_2.DeepSpeedZeroOptimizer._optimizer_step

    def broken(self, group_no):
        if dist.get_rank() != 1 or _count(self, f"steps{group_no}") < STEP:
            step(self, group_no)

    stage_1_and_2.DeepSpeedZeroOptimizer._optimizer_step = broken


def all_reduce_left_out() -> None:
    """Stage 1 reduces all gradients at the end of a step: in one step each rank keeps its own."""
    reduce = stage_1_and_2.DeepSpeedZeroOptimizer.average_tensor

    def broken(self, *args, **options):
        if _count(self, "reductions") != STEP:
            reduce(self, *args, **options)

    stage_1_and_2.DeepSpeedZeroOptimizer.average_tensor = broken


def stale_state_of_one_shard() -> None:
    """The momentum of one rank stays what it was before a step."""
    step = stage_1_and_2.DeepSpeedZeroOptimizer._optimizer_step

    def broken(self, group_no):
        momenta = [state["momentum_buffer"] for state in self.optimizer.state.values() if "momentum_buffer" in state]
        before = [momentum.clone() for momentum in momenta]
        step(self, group_no)
        if dist.get_rank() == 1 and _count(self, f"steps{group_no}") == STEP:
            for momentum, value in zip(momenta, before, strict=True):
                momentum.copy_(value)

    stage_1_and_2.DeepSpeedZeroOptimizer._optimizer_step = broken


def clipping_by_the_local_norm() -> None:
    def local(self, gradients, params, norm_type=2):
        return torch.stack([gradient.float().norm() for gradient in gradients]).norm()

    stage_1_and_2.DeepSpeedZeroOptimizer.get_grad_norm_direct = local


def tied_weight_updated_on_one_side() -> None:
    """The engine keeps one of two names of a weight, as if it were another weight."""

    def untie(engine, model):
        second = next((part for name, part in model.named_modules() if name.endswith("second")), None)
        if second is not None:
            second.weight = nn.Parameter(second.weight.detach().clone(), requires_grad=False)

    _before_start(untie)


def weight_decay_on_all() -> None:
    """The engine gives all parameter groups the largest weight decay: norms and biases decay too."""

    def decay(optimizer):
        most = max(group["weight_decay"] for group in optimizer.param_groups)
        for group in optimizer.param_groups:
            group["weight_decay"] = most

    _before_start(lambda engine, model, optimizer=None: decay(optimizer))


def learning_rate_one_step_late() -> None:
    step = stage_1_and_2.DeepSpeedZeroOptimizer.step

    def broken(self, *args, **options):
        rates = [group["lr"] for group in self.param_groups]
        for group, late in zip(self.param_groups, getattr(self, "rates", rates), strict=True):
            group["lr"] = late
        self.rates = rates
        step(self, *args, **options)
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate

    stage_1_and_2.DeepSpeedZeroOptimizer.step = broken


def module_changed_at_the_start() -> None:
    """The engine replaces the forward of one module."""

    def change(engine, model):
        part = next((part for name, part in model.named_modules() if name.endswith("head")), None)
        if part is not None:
            part.forward = lambda inputs: 1.01 * type(part).forward(part, inputs)

    _before_start(change)


def loss_of_torch_changed() -> None:
    """As a release of torch might: a plain PyTorch training has the same loss."""
    functions = torch._C._nn  # pyright: ignore[reportAttributeAccessIssue]
    loss = functions.cross_entropy_loss
    functions.cross_entropy_loss = lambda *arguments, **options: 1.001 * loss(*arguments, **options)


def optimizer_state_not_restored() -> None:
    load = stage_1_and_2.DeepSpeedZeroOptimizer.load_state_dict

    def broken(self, *args, **options):
        load(self, *args, **options)
        for state in self.optimizer.state.values():
            state["exp_avg"].zero_()

    stage_1_and_2.DeepSpeedZeroOptimizer.load_state_dict = broken


def schedule_position_lost() -> None:
    LRScheduler.load_state_dict = lambda self, state_dict: None


def learning_rate_of_the_epoch_before() -> None:
    """An engine that loads a checkpoint has the rate from before the last step of a schedule that divides it by 10."""
    load = DeepSpeedEngine.load_checkpoint

    def broken(self, *args, **options):
        loaded = load(self, *args, **options)
        for group in self.optimizer.param_groups:
            group["lr"] *= 10
        return loaded

    DeepSpeedEngine.load_checkpoint = broken


def _before_start(change) -> None:
    start = DeepSpeedEngine.__init__

    def broken(self, args, model, optimizer=None, *others, **options):
        change(self, model) if change.__code__.co_argcount == 2 else change(self, model, optimizer)
        start(self, args, model, optimizer, *others, **options)

    DeepSpeedEngine.__init__ = broken


def _count(owner, name: str) -> int:
    setattr(owner, name, getattr(owner, name, 0) + 1)
    return getattr(owner, name)
