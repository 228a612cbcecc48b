"""Defines what other packages read from DeepSpeed's engine, under ZeROStrategy and under Lightning's own
DeepSpeedStrategy."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any

import deepspeed
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero import GatheredParameters, parameter_offload
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.utils import groups, safe_get_full_fp32_param, safe_get_full_grad
from torch import Tensor
from torch.nn import Module
from torch.optim import Adam, AdamW, Optimizer

from cifar_zero.checkpoints.zero_folder import EXPERT
from cifar_zero.launch.collectives import gather
from cifar_zero.optimizers import Implementation
from cifar_zero.optimizers.torch_updates import TorchLion
from cifar_zero.strategies.deepspeed import experts
from cifar_zero.strategies.deepspeed.engine_state import (
    cut_parameter,
    optimizer_groups,
    plain_names_of,
    rewriting,
)
from cifar_zero.strategies.hooks import Hooks, Updated, count_bytes, tensors_in

GRADIENTS = (
    "averaged_gradients",  # deepspeed/runtime/zero/stage_1_and_2.py: gradients of this rank's shard
    "grad_partitions_flat_buffer",  # deepspeed/runtime/zero/stage3.py: the same
    "fp32_groups_gradients_flat",  # deepspeed/runtime/bf16_optimizer.py: float32 gradients
)
"""Attributes in which DeepSpeed 0.19.8's optimizers keep gradients in addition to the model's own tensors."""


class EngineHooks(Hooks):
    """Reads DeepSpeed's engine and the tensors that it has sharded. `Hooks` describes what each method returns."""

    @property
    def engine(self) -> Any:
        return self.strategy.deepspeed_engine

    def optimizer_implementation(self, device_type: str, clips: bool = False) -> Implementation:
        """Returns DeepSpeed's C++ implementation for an offloaded optimizer, else torch's. DeepSpeed's fused optimizer
        is not used, because it would have to be compiled."""
        if self._offload_device != "none":
            return "deepspeed_cpu"
        return "torch" if device_type == "cpu" else "torch_fused"

    @property
    def _offload_device(self) -> str:
        """The device to which the optimizer is offloaded, or "none"."""
        zero = self.strategy.config.get("zero_optimization", {})
        return zero.get("offload_optimizer", {}).get("device", "none")

    def split_groups(self, module: Module, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns the given parameter groups of an optimizer, split so that experts are in separate groups."""
        return experts.split_groups(module, groups)

    def plain_names(self, names: Iterable[str]) -> dict[str, str]:
        return plain_names_of(self.engine, names)

    def by_plain_name(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        of_experts: dict[str, Tensor] = {}
        for name, plain in self.plain_names(tensors).items():
            found[plain] = tensors[name]
            if EXPERT.fullmatch(name):
                of_experts[plain] = tensors[name].cpu()
        if of_experts:
            for of_rank in gather(of_experts):
                found |= of_rank
        return found

    def shape(self, parameter: Any) -> torch.Size:
        """Returns the unsharded shape. At ZeRO 3 it is the shape that zero.Init recorded before it emptied the
        parameter."""
        return getattr(parameter, "ds_shape", parameter.shape)

    def full(self, parameter: Any) -> Tensor:
        """Returns the master weight. At ZeRO 0 with DeepSpeed's FusedAdam, which flattens the master weights, returns
        the module's weight instead."""
        if parameter.requires_grad:
            master = safe_get_full_fp32_param(parameter)  # found at ZeRO 1 to 3 (DeepSpeed 0.19.8)
            for parameters, target, _ in optimizer_groups(self.engine) if master is None else ():
                if len(parameters) == 1 and parameters[0] is parameter:
                    master = target
            if master is not None:
                return master.detach().to(parameter.device, torch.float32, copy=True)
        with GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            return super().full(parameter)

    def full_gradient(self, parameter: Any) -> Tensor:
        gradient = safe_get_full_grad(parameter)
        # With BF16_Optimizer, parameter.grad is the gradient of this rank alone. ZeRO 0 of DeepSpeed 0.17.5 and older,
        # which benchmarks/releases.py tests, has this optimizer.
        gradient = parameter._hp_grad.view_as(parameter) if hasattr(parameter, "_hp_grad") else gradient
        if gradient is None:
            return torch.zeros(self.shape(parameter), device=parameter.device)
        return gradient.detach().float() / self._scale

    def write(self, parameter: Any, value: Tensor) -> None:
        """Overwrites a parameter with an unsharded value. At ZeRO 3 the parameter is gathered first, and then the value
        that rank 0 has written is sharded again."""
        gathered = GatheredParameters([parameter], modifier_rank=0, enabled=hasattr(parameter, "ds_id"))
        with torch.no_grad(), gathered:
            parameter.copy_(value)

    def local(self, parameter: Any) -> Tensor:
        """Returns the parameter itself, or at ZeRO 3 its flat shard without the padding, which may be NaN."""
        return parameter.ds_tensor[: _used(parameter)] if hasattr(parameter, "ds_tensor") else parameter

    def cut(self, whole: Tensor, parameter: Any) -> Tensor:
        return cut_parameter(whole, parameter)[: _used(parameter)] if hasattr(parameter, "ds_tensor") else whole

    def held(self, parameter: Any, whole: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields this rank's shard at ZeRO 3, and also the whole parameter if ZeRO 3 keeps it because it is small."""
        yield from super().held(parameter, whole)
        if hasattr(parameter, "ds_tensor") and parameter.shape == whole.shape:
            yield parameter.detach(), whole.to(parameter.dtype)

    def updated(self, optimizer: Any, at_any_step: bool = False) -> Iterator[Updated]:
        if self._offload_device == "nvme":
            return
        own = self.engine.basic_optimizer
        kind = UpdatedByDeepSpeed if torch_class(own) else Updated
        group_of = getattr(self.engine.optimizer, "sub_group_to_group_id", {})  # only ZeRO 3 has sub-groups
        for number, (parameters, target, cut) in enumerate(optimizer_groups(self.engine)):
            holders = [group for group in own.param_groups if any(each is target for each in group["params"])]
            group = holders[0] if holders else own.param_groups[group_of.get(number, 0)]
            yield kind(target, parameters, cut, own, group)

    def rewriting(self) -> AbstractContextManager[None]:
        return rewriting(self.engine)

    def starts_step(self, batch_idx: int, accumulate: int) -> bool:
        """Returns whether the micro-batch is the first of a step, by the engine's own count. DeepSpeed carries
        micro-batches over from one epoch to the next."""
        return self.engine.micro_steps % self.engine.gradient_accumulation_steps() == 0

    def clip_limit(self, trainer: Any) -> float:
        return trainer.gradient_clip_val or self.strategy.config.get("gradient_clipping") or 0.0

    def ends_step(self) -> bool:
        """Returns whether the engine is at an accumulation boundary. Lightning calls `on_before_optimizer_step` for
        every micro-batch, because DeepSpeed's `step` must be called for every micro-batch, although it updates the
        weights only at a boundary."""
        return self.engine.is_gradient_accumulation_boundary()

    def ranks_of(self, parameter: Any) -> int:
        """Returns the number of ranks that hold different experts of a mixture if the parameter belongs to an expert,
        else 1. DeepSpeed marks the parameters of experts."""
        is_expert = not getattr(parameter, "allreduce", True)
        return groups._get_expert_parallel_world_size(parameter.group_name) if is_expert else 1

    def gradient_norm(self, parameters: Iterable[Any]) -> Tensor | None:
        return None if self.engine.zero_optimization() else self.norm(parameters) / self._scale

    def step_gradient_norm(self) -> float | None:
        """Returns the norm that the engine's last step computed, or None at ZeRO 0 with experts.

        At ZeRO 0, DeepSpeed 0.19.8 computes no norm in float32 (DeepSpeed issue 7255), and in float16 a norm that is
        not divided by the loss scale. With experts in a low precision its norm leaves the experts out (DeepSpeed pull
        request 8613), and `clip_experts_too` does not use it.
        """
        if self.engine.has_moe_layers and not self.engine.zero_optimization():
            return None
        norm = self.engine.get_global_grad_norm()
        return None if norm is None else float(norm)

    def link_master_weights(self) -> None:
        """Links each parameter to its own master weight, gradient and state if round_robin_gradients is on.

        DeepSpeed 0.19.8 (stage_1_and_2.py, `_link_all_hp_params`) links them in the order of the model, although they
        are stored in round-robin order. On several ranks `safe_get_full_fp32_param` then returns values of other
        parameters, and `safe_get_full_grad` raises RuntimeError. The training itself is correct. No upstream issue is
        known.
        """
        optimizer = self.engine.optimizer
        if getattr(optimizer, "round_robin_gradients", False):
            groups, optimizer.bit16_groups = optimizer.bit16_groups, optimizer.round_robin_bit16_groups
            optimizer._link_all_hp_params()
            optimizer.bit16_groups = groups

    def clip_experts_too(self) -> None:
        """Makes ZeRO 0 clip by the norm over all experts.

        In float32 DeepSpeed 0.19.8 uses the mean of the norms of the ranks, which have different experts (DeepSpeed
        issue 8475). In a lower precision it ignores the experts (DeepSpeed pull request 8613). This method can be
        removed with a release that fixes both. ZeRO 1 and 2 are correct.
        """
        engine, optimizer = self.engine, self.engine.optimizer
        limit = engine.gradient_clipping()
        if not engine.has_moe_layers or engine.zero_optimization() or not limit:
            return
        engine.clip_fp32_gradients = lambda: self.clip(engine.module.parameters(), limit)
        if isinstance(optimizer, FP16_UnfusedOptimizer):
            theirs: Any = optimizer.unscale_and_clip_grads
            optimizer.unscale_and_clip_grads = lambda total_norm, apply_scale=True: theirs(
                self.norm(engine.module.parameters()), apply_scale
            )

    @property
    def _scale(self) -> float:
        """The loss scale, by which gradients are multiplied until the step. It is 1 unless the run is in float16."""
        return float(getattr(self.engine.optimizer, "loss_scale", 1.0) or 1.0)

    def loss_scale(self) -> float | None:
        if self.engine.fp16_enabled() and self.engine.dynamic_loss_scale():
            return self.engine.optimizer.loss_scale
        return None

    def skipped_steps(self) -> int:
        return self.engine.skipped_steps

    def state_bytes(self, module: Module, optimizer: Any) -> tuple[int, int, int]:
        parameters = [*module.parameters()]
        parameters += [getattr(each, "ds_tensor", None) for each in parameters]
        master = [target for _, target, _ in optimizer_groups(self.engine)]  # with gradients if it is offloaded
        gradients = [tensor.grad for tensor in tensors_in([parameters, master]) if tensor.is_leaf]
        gradients += [getattr(optimizer, name, None) for name in GRADIENTS]
        return count_bytes(parameters, gradients, [master, getattr(optimizer, "optimizer", optimizer).state])

    def engine_config(self) -> dict[str, Any]:
        """Returns the configuration, including the ZeRO section as DeepSpeed (0.19.8) completed it and the dtype of
        communication."""
        config = self.engine._config
        dtype = str(self.engine.communication_data_type).removeprefix("torch.")
        zero = config.zero_config.model_dump(mode="json")
        return {**config._param_dict, "zero_optimization": zero, "communication_data_type": dtype}

    def free(self) -> None:
        """Destroys the engine. DeepSpeed (0.19.8) keeps references to its tensors in gradient hooks, and at ZeRO 3 also
        in a stack and in the cache of a method."""
        self.engine.destroy()
        with suppress(AttributeError, KeyError):  # another release may have other names
            parameter_offload.FWD_MODULE_STACK.clear()
            cached = vars(PartitionedParameterCoordinator)["_PartitionedParameterCoordinator__params_to_release"]
            cached.__closure__[0].cell_contents.cache_clear()


class UpdatedByDeepSpeed(Updated):
    """A tensor that a compiled optimizer of DeepSpeed updates. A class of torch computes the same update."""

    def optimizer_of(self, twin: torch.nn.Parameter) -> Any:
        kind: Any = torch_class(self.optimizer)
        options = {name: self.group[name] for name in ("lr", "betas", "eps", "weight_decay") if name in self.group}
        other = kind([twin], **options)
        if self.state:
            other.state[twin] = {key: value.clone() for key, value in self.state.items() if isinstance(value, Tensor)}
            if kind is not TorchLion:  # Lion counts no steps
                other.state[twin]["step"] = torch.tensor(float(self.state["step"]))
        return other


def _used(parameter: Any) -> int:
    """Returns the number of elements of this rank's shard at ZeRO 3 that are not padding."""
    size = parameter.ds_tensor.ds_numel
    return max(0, min(size, parameter.ds_numel - deepspeed.comm.get_rank(group=parameter.ds_process_group) * size))


def torch_class(optimizer: Any) -> type[Optimizer] | None:
    """Returns the torch optimizer class that computes the same updates as one of DeepSpeed's compiled optimizers.
    Returns None for any other optimizer."""
    if isinstance(optimizer, (DeepSpeedCPUAdam, FusedAdam)):
        return AdamW if optimizer.adam_w_mode else Adam
    if isinstance(optimizer, (DeepSpeedCPULion, FusedLion)):
        return TorchLion
    return None
