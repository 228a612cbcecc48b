"""Defines what only `step_check` and `comparison` read from a strategy. This file goes with them, and with it the base
classes `CheckHooks`, `EngineCheckHooks` and `MeshCheckHooks` of the hooks.

Each class is a base class of the hooks of a family of strategies, so its methods may call the methods of `Hooks`.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module, Parameter
from torch.optim import Adam, AdamW, Optimizer

from cifar_zero.optimizers.torch_updates import TorchLion


@dataclass(frozen=True)
class Updated:
    """A tensor that an optimizer updates on this rank: a weight, a shard, or a flat part of several master weights."""

    target: Any
    parameters: Sequence[Any]  # the module's parameters that the tensor covers, in order
    # Returns this rank's part, given the unsharded tensors of the parameters. Nothing is communicated.
    cut: Callable[[Sequence[Tensor]], Tensor]
    optimizer: Any
    group: dict[str, Any]  # the options with which the step updates the tensor

    @property
    def state(self) -> Mapping[str, Any]:
        """The optimizer's state of the tensor, which is empty before the first step."""
        return self.optimizer.state.get(self.target, {})

    def optimizer_of(self, twin: Parameter) -> Any:
        """Returns a new optimizer that updates `twin`, a copy of `target`, exactly as the original optimizer updates
        `target`. The new optimizer has a copy of the original optimizer's state of `target`."""
        other = object.__new__(type(self.optimizer))  # copy.copy would drop attributes of subclasses (torch 2.15)
        vars(other).update(vars(self.optimizer))
        other.param_groups = [{**self.group, "params": [twin]}]
        other.state = defaultdict(dict)
        if self.state:
            other.state[twin] = copy.deepcopy({**self.state})
        return other


class DeepSpeedUpdate(Updated):
    """A tensor that a compiled optimizer of DeepSpeed updates. A class of torch computes the same update."""

    def optimizer_of(self, twin: Parameter) -> Any:
        kind: Any = torch_class(self.optimizer)
        options = {name: self.group[name] for name in ("lr", "betas", "eps", "weight_decay") if name in self.group}
        other = kind([twin], **options)
        if self.state:
            other.state[twin] = {key: value.clone() for key, value in self.state.items() if isinstance(value, Tensor)}
            if kind is not TorchLion:  # Lion counts no steps
                other.state[twin]["step"] = torch.tensor(float(self.state["step"]))
        return other


class CheckHooks:
    """What the check reads from a strategy that uses plain tensors or DTensors as parameters."""

    strategy: Any
    by_plain_name: Any
    local: Any
    shard: Any
    unshard: Any

    def weights(self, module: Module) -> dict[str, Tensor]:
        """Returns `full` for every parameter of a module, on the CPU, keyed by the names in the plain model.
        Collective."""
        return self.by_plain_name({name: self.full(each).cpu() for name, each in module.named_parameters()})

    def full(self, parameter: Any) -> Tensor:
        """Returns a float32 copy of the unsharded parameter, with the values that the optimizer updates. Under mixed
        precision they are the float32 master weight. A frozen parameter has no master weight. Collective; call it only
        during a fit."""
        return self.unshard(parameter, parameter)

    def cut(self, whole: Tensor, parameter: Any) -> Tensor:
        """Returns this rank's shard of an unsharded tensor, without communication."""
        return self.shard(whole, parameter)

    def held(self, parameter: Any, whole: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields each tensor that this rank stores of a parameter and computes with. Yields with it the value that the
        tensor must have if the unsharded parameter is `whole`."""
        local = self.local(parameter).detach()
        yield local, self.shard(whole, parameter).to(local.dtype)

    def updated(self, optimizer: Any, at_any_step: bool = False) -> Iterator[Updated]:
        """Yields the tensors that this rank's optimizer updates in the coming step. With `at_any_step`, yields all
        tensors that the optimizer ever updates. Yields nothing if the tensors cannot be read, as on NVMe."""
        from cifar_zero.strategies.hooks import shard_like

        own = getattr(optimizer, "optimizer", optimizer)  # removes Lightning's wrapper
        for group in own.param_groups:
            for parameter in group["params"]:
                if at_any_step or parameter.grad is not None:
                    part = partial(_first, lambda whole, parameter=parameter: shard_like(whole, parameter))
                    yield Updated(parameter, [parameter], part, own, group)

    def starts_step(self, batch_idx: int, accumulate: int) -> bool:
        """Returns whether the micro-batch is the first of a step. Must be called before the forward pass."""
        return batch_idx % accumulate == 0

    def clip_limit(self, trainer: Any) -> float:
        """Returns the norm to which the gradient is clipped, or 0 if it is not clipped."""
        return trainer.gradient_clip_val or 0.0

    def free(self) -> None:
        """Frees memory that would outlive the fit. Must be called before another fit in the same process."""


class MeshCheckHooks(CheckHooks):
    """What the check reads from the strategies that split the model themselves."""

    def weights(self, module: Module) -> dict[str, Tensor]:
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()  # after a validation, the outermost module is still gathered, in the low precision
        return super().weights(module)


class EngineCheckHooks(CheckHooks):
    """What the check reads from DeepSpeed's engine."""

    engine: Any

    def full(self, parameter: Any) -> Tensor:
        """Returns the master weight. At ZeRO 0 with DeepSpeed's FusedAdam, which flattens the master weights, returns
        the module's weight instead."""
        from deepspeed.runtime.zero import GatheredParameters
        from deepspeed.utils import safe_get_full_fp32_param

        from stepcheck.engines.deepspeed import flat_groups

        if parameter.requires_grad:
            master = safe_get_full_fp32_param(parameter)  # found at ZeRO 1 to 3 (DeepSpeed 0.19.8)
            for target, parts in flat_groups(self.engine) if master is None else ():
                if len(parts) == 1 and parts[0][0] is parameter:
                    master = target
            if master is not None:
                return master.detach().to(parameter.device, torch.float32, copy=True)
        with GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            return super().full(parameter)

    def held(self, parameter: Any, whole: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields this rank's shard at ZeRO 3, and also the whole parameter if ZeRO 3 keeps it because it is small."""
        yield from super().held(parameter, whole)
        if hasattr(parameter, "ds_tensor") and parameter.shape == whole.shape:
            yield parameter.detach(), whole.to(parameter.dtype)

    def updated(self, optimizer: Any, at_any_step: bool = False) -> Iterator[Updated]:
        from stepcheck.engines.deepspeed import flat_groups

        zero = self.strategy.config.get("zero_optimization", {})
        if zero.get("offload_optimizer", {}).get("device") == "nvme":
            return
        own = self.engine.basic_optimizer
        kind = DeepSpeedUpdate if torch_class(own) else Updated
        group_of = getattr(self.engine.optimizer, "sub_group_to_group_id", {})  # only ZeRO 3 has sub-groups
        for number, (target, parts) in enumerate(flat_groups(self.engine)):
            holders = [group for group in own.param_groups if any(each is target for each in group["params"])]
            group = holders[0] if holders else own.param_groups[group_of.get(number, 0)]
            yield kind(target, [parameter for parameter, *_ in parts], partial(_parts, parts, target), own, group)

    def starts_step(self, batch_idx: int, accumulate: int) -> bool:
        """Returns whether the micro-batch is the first of a step, by the engine's own count. DeepSpeed carries
        micro-batches over from one epoch to the next."""
        return self.engine.micro_steps % self.engine.gradient_accumulation_steps() == 0

    def clip_limit(self, trainer: Any) -> float:
        return trainer.gradient_clip_val or self.strategy.config.get("gradient_clipping") or 0.0

    def free(self) -> None:
        from stepcheck.engines.deepspeed import free

        free(self.engine)


def _first(cut: Callable[[Tensor], Tensor], wholes: Sequence[Tensor]) -> Tensor:
    return cut(wholes[0])


def _parts(parts: Sequence[tuple[Any, int, int, int]], target: Tensor, wholes: Sequence[Tensor]) -> Tensor:
    flat = wholes[0].new_zeros(target.numel())
    for whole, (_, start, offset, length) in zip(wholes, parts, strict=True):
        flat[offset : offset + length] = whole.flatten()[start : start + length]
    return flat


def torch_class(optimizer: Any) -> type[Optimizer] | None:
    """Returns the torch optimizer class that computes the same updates as one of DeepSpeed's compiled optimizers.
    Returns None for any other optimizer."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion

    if isinstance(optimizer, (DeepSpeedCPUAdam, FusedAdam)):
        return AdamW if optimizer.adam_w_mode else Adam
    if isinstance(optimizer, (DeepSpeedCPULion, FusedLion)):
        return TorchLion
    return None
