"""Plants faults into DeepSpeed and torch in ranks, never into this program. Each fault is like one that a release has
had.

A sitecustomize.py on PYTHONPATH calls `plant` with the name of a function, before the rank imports anything else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

STEP = 3
"""Optimizer step of a fault that happens only once, and first step of a fault that persists."""

SITE = """
import os
if "RANK" in os.environ:
    from tests.stepcheck.planted_faults import plant
    plant("{name}")
"""
"""Content of sitecustomize.py, with the name of a fault to fill in."""


def plant(name: str) -> None:
    """Plants a fault of this module into this process."""
    globals()[name]()


def instead_of(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """Returns a decorator that replaces a method by the decorated function, whose first argument is the original
    method."""
    method = getattr(owner, name)

    def replace(broken: Callable[..., Any]) -> None:
        setattr(owner, name, lambda *args, **options: broken(method, *args, **options))

    return replace


def gradients_halved() -> None:
    _losses_times(lambda engine: 0.5)


def micro_batch_lost() -> None:
    _losses_times(lambda engine: engine.micro_steps % 4 != 1)


def bfloat16_gradients_scaled() -> None:
    _losses_times(lambda engine: 1.2 if engine.bfloat16_enabled() else 1)


def bfloat16_micro_batch_lost() -> None:
    _losses_times(lambda engine: not engine.bfloat16_enabled() or engine.micro_steps % 4 != 1)


def _losses_times(factor: Callable[[Any], float]) -> None:
    @instead_of(DeepSpeedEngine, "backward")
    def _(backward, self, loss, *args, **options):
        return backward(self, factor(self) * loss, *args, **options)


def bfloat16_decay_dropped() -> None:
    @instead_of(DeepSpeedZeroOptimizer, "_optimizer_step")
    def _(step, self, group_no):
        for group in self.optimizer.param_groups:
            group["weight_decay"] *= self.dtype != torch.bfloat16
        step(self, group_no)


def stale_weights_of_one_rank() -> None:
    """One rank does not receive the weights that a step has updated."""

    @instead_of(DeepSpeedZeroOptimizer, "step")
    def _(step, self, *args, **options):
        before = [flat.clone() for flat in self.bit16_groups_flat]
        step(self, *args, **options)
        if dist.get_rank() == 1 and _count(self, "steps") == STEP:
            for flat, old in zip(self.bit16_groups_flat, before, strict=True):
                flat.copy_(old)


def bucket_not_reduced() -> None:
    """The first of several buckets of a step is flushed without its all-reduce."""
    _reduced_unless(lambda reductions: reductions == 1)


def all_reduce_left_out() -> None:
    """ZeRO 1 reduces all gradients at the end of a step. In one step, each rank keeps its own gradients instead."""
    _reduced_unless(lambda reductions: reductions == STEP)


def _reduced_unless(left_out: Callable[[int], bool]) -> None:
    @instead_of(DeepSpeedZeroOptimizer, "average_tensor")
    def _(reduce, self, *args, **options):
        if not left_out(_count(self, "reductions")):
            reduce(self, *args, **options)


def shard_changed_at_release() -> None:
    """ZeRO 3 changes a shard when it frees the whole parameter."""

    @instead_of(PartitionedParameterCoordinator, "_PartitionedParameterCoordinator__release_param")
    def _(release, self, param, *args, **options):
        release(self, param, *args, **options)
        if param.dim() and _count(PartitionedParameterCoordinator, "releases") == 5:
            param.ds_tensor.mul_(1.04)


def batch_norm_never_updated() -> None:
    @instead_of(DeepSpeedEngine, "forward")
    def _(forward, self, *args, **options):
        buffers = [(buffer, buffer.clone()) for buffer in self.module.buffers()]
        result = forward(self, *args, **options)
        for buffer, old in buffers:
            buffer.data.copy_(old)
        return result


def batch_norm_put_into_evaluation() -> None:
    @_before_start
    def _(model, optimizer):
        for part in model.modules():
            if isinstance(part, nn.BatchNorm2d):
                part.eval()


def dead_partition() -> None:
    """Stops the updates of one rank's part of the weights from one step on."""

    @instead_of(DeepSpeedZeroOptimizer, "_optimizer_step")
    def _(step, self, group_no):
        if dist.get_rank() != 1 or _count(self, f"steps{group_no}") < STEP:
            step(self, group_no)


def stale_state_of_one_shard() -> None:
    """Keeps the old value of the momentum on one rank in one step."""

    @instead_of(DeepSpeedZeroOptimizer, "_optimizer_step")
    def _(step, self, group_no):
        momenta = [state["momentum_buffer"] for state in self.optimizer.state.values() if "momentum_buffer" in state]
        before = [momentum.clone() for momentum in momenta]
        step(self, group_no)
        if dist.get_rank() == 1 and _count(self, f"steps{group_no}") == STEP:
            for momentum, value in zip(momenta, before, strict=True):
                momentum.copy_(value)


def clipping_by_the_local_norm() -> None:
    @instead_of(DeepSpeedZeroOptimizer, "get_grad_norm_direct")
    def _(norm, self, gradients, params, norm_type=2):
        return torch.stack([gradient.float().norm() for gradient in gradients]).norm()


def tied_weight_updated_on_one_side() -> None:
    """The engine treats the second name of a tied weight as another weight, which is not trained."""

    @_before_start
    def _(model, optimizer):
        second = next((part for name, part in model.named_modules() if name.endswith("second")), None)
        if second is not None:
            second.weight = nn.Parameter(second.weight.detach().clone(), requires_grad=False)


def weight_decay_on_all() -> None:
    """The engine gives all parameter groups the largest weight decay, so that norms and biases decay too."""

    @_before_start
    def _(model, optimizer):
        most = max(group["weight_decay"] for group in optimizer.param_groups)
        for group in optimizer.param_groups:
            group["weight_decay"] = most


def bfloat16_faint_gradient_lost() -> None:
    """A layer whose gradient is much smaller than the other gradients has none."""

    @_before_start
    def _(model, optimizer):
        part = next((part for name, part in model.named_modules() if name.endswith("faint")), None)
        if part is not None:
            part.forward = lambda inputs: F.linear(
                inputs, *(each.detach() if each.dtype == torch.bfloat16 else each for each in part.parameters())
            )


def learning_rate_one_step_late() -> None:
    @instead_of(DeepSpeedZeroOptimizer, "step")
    def _(step, self, *args, **options):
        rates = [group["lr"] for group in self.param_groups]
        for group, late in zip(self.param_groups, getattr(self, "rates", rates), strict=True):
            group["lr"] = late
        self.rates = rates
        step(self, *args, **options)
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate


def module_changed_at_the_start() -> None:
    """The engine replaces the forward of one module."""

    @_before_start
    def _(model, optimizer):
        part = next((part for name, part in model.named_modules() if name.endswith("head")), None)
        if part is not None:
            part.forward = lambda inputs: 1.01 * type(part).forward(part, inputs)


def loss_of_torch_changed() -> None:
    """The loss changes as it might in a release of torch, so that plain PyTorch has the same changed loss."""

    @instead_of(torch._C._nn, "cross_entropy_loss")  # pyright: ignore[reportAttributeAccessIssue]
    def _(loss, *args, **options):
        return 1.001 * loss(*args, **options)


def optimizer_state_not_restored() -> None:
    @instead_of(DeepSpeedZeroOptimizer, "load_state_dict")
    def _(load, self, *args, **options):
        load(self, *args, **options)
        for state in self.optimizer.state.values():
            state["exp_avg"].zero_()


def schedule_position_lost() -> None:
    LRScheduler.load_state_dict = lambda self, state_dict: None


def learning_rate_of_the_epoch_before() -> None:
    """An engine that loads a checkpoint has the learning rate from before the last step of a schedule, which divided it
    by 10."""

    @instead_of(DeepSpeedEngine, "load_checkpoint")
    def _(load, self, *args, **options):
        loaded = load(self, *args, **options)
        for group in self.optimizer.param_groups:
            group["lr"] *= 10
        return loaded


def _before_start(change: Callable[[Any, Any], None]) -> None:
    @instead_of(DeepSpeedEngine, "__init__")
    def _(start, self, args, model, optimizer=None, *others, **options):
        change(model, optimizer)
        start(self, args, model, optimizer, *others, **options)


def _count(owner: Any, name: str) -> int:
    setattr(owner, name, getattr(owner, name, 0) + 1)
    return getattr(owner, name)
