"""Faults to plant into an engine, a script or torch. Each takes a MonkeyPatch, which takes the fault out again."""

import importlib
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.stepcheck import loop

Patch = pytest.MonkeyPatch


def wrap(patch: Patch, owner: Any, name: str, broken: Callable[..., Any]) -> None:
    """Replaces a method by a function whose first argument is the original method."""
    method = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **options: broken(method, *args, **options))


def once_in(step: int) -> Callable[[], bool]:
    """Returns a function that is true at its call number `step`."""
    calls = itertools.count(1)
    return lambda: next(calls) == step


def engine_class() -> Any:
    from deepspeed.runtime.engine import DeepSpeedEngine

    return DeepSpeedEngine


def zero_2_class() -> Any:
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    return DeepSpeedZeroOptimizer


def multiply_losses(patch: Patch, factor: Callable[[Any], float]) -> None:
    """Multiplies each loss by a factor that depends on the engine."""
    wrap(patch, engine_class(), "backward", lambda real, self, loss, **more: real(self, factor(self) * loss, **more))


def change_options(patch: Patch, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes each parameter group before each update."""

    def step(real: Any, self: Any, group: int) -> None:
        for each in self.optimizer.param_groups:
            change(each)
        real(self, group)

    wrap(patch, zero_2_class(), "_optimizer_step", step)


def change_at_the_start(patch: Patch, change: Callable[[Any, Any], None]) -> None:
    """Changes the model and the optimizer when the engine is built."""

    def start(real: Any, self: Any, args: Any, model: Any, optimizer: Any = None, *others: Any, **more: Any) -> None:
        change(model, optimizer)
        real(self, args, model, optimizer, *others, **more)

    wrap(patch, engine_class(), "__init__", start)


def change_after_step(patch: Patch, number: int, change: Callable[[Any], None]) -> None:
    """Changes DeepSpeed's optimizer after a step."""
    is_chosen = once_in(number)

    def step(real: Any, self: Any, *args: Any, **more: Any) -> None:
        real(self, *args, **more)
        if is_chosen():
            change(self)

    wrap(patch, zero_2_class(), "step", step)


def loss_halved(patch: Patch) -> None:
    multiply_losses(patch, lambda engine: 0.5)


def loss_slightly_off(patch: Patch) -> None:
    multiply_losses(patch, lambda engine: 1.0001)


def second_micro_batch_lost(patch: Patch) -> None:
    multiply_losses(patch, lambda engine: engine.micro_steps % 2 != 1)


def plain_backward_not_divided(patch: Patch) -> None:
    """`loss.backward()` is not divided by the micro-batches."""
    patch.setattr(engine_class(), "_backward_prologue_per_tensor", lambda self, gradient: gradient)


def one_bucket_not_reduced(patch: Patch) -> None:
    first = once_in(1)
    wrap(patch, zero_2_class(), "average_tensor", lambda real, *args, **more: None if first() else real(*args, **more))


def gradients_of_one_rank_doubled(patch: Patch) -> None:
    def average(real: Any, self: Any, tensor: Any, *args: Any, **more: Any) -> Any:
        if dist.get_rank() == 1:
            tensor.mul_(2)
        return real(self, tensor, *args, **more)

    wrap(patch, zero_2_class(), "average_tensor", average)


def not_clipped(patch: Patch) -> None:
    def unscale(real: Any, self: Any, groups: Any, norm: Any, *args: Any) -> Any:
        return real(self, groups, torch.zeros(()), *args)

    wrap(patch, zero_2_class(), "unscale_and_clip_grads", unscale)


def clipped_by_local_norm(patch: Patch) -> None:
    def norm(real: Any, self: Any, gradients: Any, *args: Any, **more: Any) -> Any:
        return torch.stack([gradient.float().norm() for gradient in gradients]).norm()

    wrap(patch, zero_2_class(), "get_grad_norm_direct", norm)


def decay_lost(patch: Patch) -> None:
    change_options(patch, lambda group: group.update(weight_decay=0.0))


def decay_on_all_from_the_start(patch: Patch) -> None:
    def decay(model: Any, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.5

    change_at_the_start(patch, decay)


def rate_changed_in_the_step(patch: Patch) -> None:
    change_options(patch, lambda group: group.update(lr=1.01 * group["lr"]))


def schedule_steps_per_micro_batch(patch: Patch) -> None:
    def step(real: Any, self: Any, *args: Any, **more: Any) -> Any:
        if not self.is_gradient_accumulation_boundary():
            self.lr_scheduler.step()
        return real(self, *args, **more)

    wrap(patch, engine_class(), "step", step)


def one_partition_not_updated(patch: Patch) -> None:
    def step(real: Any, self: Any, group: int) -> None:
        before = [target.detach().clone() for target in self.single_partition_of_fp32_groups]
        real(self, group)
        if dist.get_rank() == 1:
            for target, old in zip(self.single_partition_of_fp32_groups, before, strict=True):
                target.data.copy_(old)

    wrap(patch, zero_2_class(), "_optimizer_step", step)


def steps_counted_twice(patch: Patch) -> None:
    """Adam's bias correction is that of a later step."""

    def step(real: Any, self: Any, *args: Any, **more: Any) -> Any:
        for state in self.state.values():
            if "step" in state:
                state["step"] += 1
        return real(self, *args, **more)

    wrap(patch, torch.optim.AdamW, "step", step)


def state_lost_between_steps(patch: Patch) -> None:
    def lose(zero: Any) -> None:
        for state in zero.optimizer.state.values():
            for name in state.keys() & {"exp_avg", "momentum_buffer"}:
                state[name].zero_()

    change_after_step(patch, 3, lose)


def master_weights_rewritten(patch: Patch) -> None:
    def rewrite(zero: Any) -> None:
        for target in zero.single_partition_of_fp32_groups:
            target.data.mul_(1.001)

    change_after_step(patch, 2, rewrite)


def weights_stale_on_one_rank(patch: Patch) -> None:
    def step(real: Any, self: Any, *args: Any, **more: Any) -> Any:
        before = [flat.clone() for flat in self.bit16_groups_flat]
        result = real(self, *args, **more)
        if dist.get_rank() == 1:
            for flat, old in zip(self.bit16_groups_flat, before, strict=True):
                flat.copy_(old)
        return result

    wrap(patch, zero_2_class(), "step", step)


def module_changed_by_the_engine(patch: Patch) -> None:
    def change(model: Any, optimizer: Any) -> None:
        layer = model.bias
        layer.forward = lambda inputs: 1.01 * type(layer).forward(layer, inputs)

    change_at_the_start(patch, change)


def untied_by_the_engine(patch: Patch) -> None:
    def untie(model: Any, optimizer: Any) -> None:
        model.head.weight = nn.Parameter(model.head.weight.detach().clone(), requires_grad=False)

    change_at_the_start(patch, untie)


def batch_norm_frozen(patch: Patch) -> None:
    def forward(real: Any, self: Any, *args: Any, **more: Any) -> Any:
        kept = [(buffer, buffer.clone()) for buffer in self.module.buffers()]
        result = real(self, *args, **more)
        for buffer, old in kept:
            buffer.data.copy_(old)
        return result

    wrap(patch, engine_class(), "forward", forward)


def shard_changed_by_zero_3(patch: Patch) -> None:
    """ZeRO 3 changes a shard when it frees the whole parameter."""
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    def release(real: Any, self: Any, param: Any, *args: Any, **more: Any) -> None:
        real(self, param, *args, **more)
        if len(param.ds_shape) > 1:
            param.ds_tensor.mul_(1.01)

    wrap(patch, PartitionedParameterCoordinator, "_PartitionedParameterCoordinator__release_param", release)


def gradients_scaled_in_zero_3(patch: Patch) -> None:
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    def unscale(real: Any, self: Any, group: int, norm: Any, *args: Any) -> None:
        real(self, group, norm, *args)
        self.fp32_partitioned_groups_flat[group].grad.mul_(1.00001)

    wrap(patch, DeepSpeedZeroOptimizer_Stage3, "unscale_and_clip_grads", unscale)


def all_reduce_of_ddp_left_out(patch: Patch) -> None:
    """DDP does not reduce the gradients of a backward pass, as if it ran under `no_sync`."""
    from torch.nn.parallel import DistributedDataParallel

    def forward(real: Any, self: Any, *args: Any, **more: Any) -> Any:
        with self.no_sync():
            return real(self, *args, **more)

    wrap(patch, DistributedDataParallel, "forward", forward)


def ddp_weights_drift(patch: Patch) -> None:
    def step(real: Any, self: Any, *args: Any, **more: Any) -> Any:
        result = real(self, *args, **more)
        if dist.get_rank() == 1:
            for group in self.param_groups:
                for each in group["params"]:
                    each.data.mul_(1 + 1e-6)
        return result

    wrap(patch, torch.optim.AdamW, "step", step)


def double_shards_of_fsdp2(patch: Patch, is_chosen: Callable[[], bool]) -> None:
    """Doubles the gradients that FSDP2 has reduced, which no clipping does."""
    groups: Any = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_param_group")

    def finalize(real: Any, self: Any, *args: Any) -> None:
        real(self, *args)
        if is_chosen():
            for each in self.fsdp_params:
                if each.sharded_param.grad is not None:
                    each.sharded_param.grad.mul_(2.0)

    wrap(patch, groups.FSDPParamGroup, "finalize_backward", finalize)


def shards_doubled_by_fsdp2(patch: Patch) -> None:
    double_shards_of_fsdp2(patch, lambda: True)


def shards_doubled_by_fsdp2_once(patch: Patch) -> None:
    double_shards_of_fsdp2(patch, once_in(1))


def without_sync_of_fsdp2(patch: Patch, modules: Callable[[Any], Iterable[Any]]) -> None:
    """FSDP2 reduces no gradients of some modules, as if a script had not switched this on again."""

    def forward(real: Any, self: Any, ids: Any) -> Any:
        for module in modules(self):
            module.set_requires_gradient_sync(False)
        return real(self, ids)

    wrap(patch, loop.Model, "forward", forward)


def reduction_of_fsdp2_left_out(patch: Patch) -> None:
    without_sync_of_fsdp2(patch, lambda model: [model])


def reduction_of_blocks_of_fsdp2_left_out(patch: Patch) -> None:
    without_sync_of_fsdp2(patch, lambda model: model.blocks)


def rate_restarts(patch: Patch) -> None:
    """A schedule goes on, and the engine updates with the first rate."""
    change_options(patch, lambda group: group.update(lr=group["initial_lr"]))
