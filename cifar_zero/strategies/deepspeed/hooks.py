"""Defines what other packages read from DeepSpeed's engine, under ZeROStrategy and under Lightning's own
DeepSpeedStrategy."""

from collections.abc import Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils import groups, safe_get_full_grad
from torch import Tensor
from torch.nn import Module

from cifar_zero.checkpoints.zero_folder import EXPERT
from cifar_zero.launch.collectives import gather
from cifar_zero.optimizers import Implementation
from cifar_zero.strategies.deepspeed import experts
from cifar_zero.strategies.hooks import Hooks, count_bytes, tensors_in
from stepcheck.engines.deepspeed import flat_groups, loss_scale, stage_3_part

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
        """Returns DeepSpeed's C++ implementation for an offloaded optimizer, else torch's, fused on CUDA. DeepSpeed's
        own fused one would need a compiler. `clips` has no effect, because DeepSpeed's engine clips."""
        zero = self.strategy.config.get("zero_optimization", {})
        if zero.get("offload_optimizer", {}).get("device", "none") != "none":
            return "deepspeed_cpu"
        return "torch" if device_type == "cpu" else "torch_fused"

    def split_groups(self, module: Module, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return experts.split_groups(module, groups)

    def plain_names(self, names: Iterable[str]) -> dict[str, str]:
        return experts.plain_names_of(self.engine, names)

    def by_plain_name(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        by_plain_name: dict[str, Tensor] = {}
        of_experts: dict[str, Tensor] = {}
        for name, plain in self.plain_names(tensors).items():
            by_plain_name[plain] = tensors[name]
            if EXPERT.fullmatch(name):
                of_experts[plain] = tensors[name].cpu()
        if of_experts:
            for of_rank in gather(of_experts):
                by_plain_name |= of_rank
        return by_plain_name

    def shape(self, parameter: Any) -> torch.Size:
        """Returns the unsharded shape, which zero.Init has recorded at ZeRO 3."""
        return getattr(parameter, "ds_shape", parameter.shape)

    def full_gradient(self, parameter: Any) -> Tensor:
        gradient = safe_get_full_grad(parameter)
        if gradient is None:
            return torch.zeros(self.shape(parameter), device=parameter.device)
        return gradient.detach().float() / loss_scale(self.engine)

    def write(self, parameter: Any, value: Tensor) -> None:
        """Overwrites a parameter with an unsharded value. At ZeRO 3 the parameter is gathered for this, and rank 0's
        value counts."""
        gathered = GatheredParameters([parameter], modifier_rank=0, enabled=hasattr(parameter, "ds_id"))
        with torch.no_grad(), gathered:
            parameter.copy_(value)

    def local(self, parameter: Any) -> Tensor:
        """Returns the parameter itself, or at ZeRO 3 its flat shard without the padding, which may be NaN."""
        if not hasattr(parameter, "ds_tensor"):
            return parameter
        _, length = stage_3_part(parameter)
        return parameter.ds_tensor[:length]

    def shard(self, full: Tensor, parameter: Any) -> Tensor:
        if not hasattr(parameter, "ds_tensor"):
            return full
        start, length = stage_3_part(parameter)
        return full.flatten()[start : start + length]

    def rewriting(self) -> AbstractContextManager[None]:
        return rewriting(self.engine)

    def ends_step(self) -> bool:
        """Returns whether the engine is at an accumulation boundary. Lightning calls `on_before_optimizer_step` for
        every micro-batch, because DeepSpeed's `step` must be called for every micro-batch."""
        return self.engine.is_gradient_accumulation_boundary()

    def ranks_of(self, parameter: Any) -> int:
        """Returns the number of ranks over which a mixture's experts are distributed if the parameter belongs to an
        expert, else 1."""
        is_expert = not getattr(parameter, "allreduce", True)
        return groups._get_expert_parallel_world_size(parameter.group_name) if is_expert else 1

    def gradient_norm(self, parameters: Iterable[Any]) -> Tensor | None:
        return None if self.engine.zero_optimization() else self.norm(parameters) / loss_scale(self.engine)

    def step_gradient_norm(self) -> float | None:
        """Returns the norm that the engine's last step computed. Returns None if it computed none, or at ZeRO 0 with
        experts.

        At ZeRO 0, DeepSpeed 0.19.8 computes no norm in float32 (DeepSpeed issue 7255), and in float16 a norm that is
        not divided by the loss scale. With experts in a low precision its norm leaves the experts out (DeepSpeed pull
        request 8613).
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
        """Makes ZeRO 0 clip by the norm over all experts. ZeRO 1 and 2 do so already.

        In float32 DeepSpeed 0.19.8 uses the mean of the norms of the ranks, which have different experts (DeepSpeed
        issue 8475). In a lower precision it ignores the experts (DeepSpeed pull request 8613). This method can be
        removed with a release that fixes both.
        """
        engine, optimizer = self.engine, self.engine.optimizer
        limit = engine.gradient_clipping()
        if not engine.has_moe_layers or engine.zero_optimization() or not limit:
            return
        engine.clip_fp32_gradients = lambda: self.clip(engine.module.parameters(), limit)
        if isinstance(optimizer, FP16_UnfusedOptimizer):
            clip: Any = optimizer.unscale_and_clip_grads
            optimizer.unscale_and_clip_grads = lambda total_norm, apply_scale=True: clip(
                self.norm(engine.module.parameters()), apply_scale
            )

    def loss_scale(self) -> float | None:
        if self.engine.fp16_enabled() and self.engine.dynamic_loss_scale():
            return loss_scale(self.engine)
        return None

    def skipped_steps(self) -> int:
        return self.engine.skipped_steps

    def state_bytes(self, module: Module, optimizer: Any) -> tuple[int, int, int]:
        parameters = [*module.parameters()]
        parameters += [getattr(each, "ds_tensor", None) for each in parameters]
        master = [target for target, _ in flat_groups(self.engine)]  # with gradients if it is offloaded
        gradients = [tensor.grad for tensor in tensors_in([parameters, master]) if tensor.is_leaf]
        gradients += [getattr(optimizer, name, None) for name in GRADIENTS]
        return count_bytes(parameters, gradients, [master, getattr(optimizer, "optimizer", optimizer).state])

    def engine_config(self) -> dict[str, Any]:
        """Returns the configuration with which DeepSpeed's engine was built, with the ZeRO section and the dtype of
        communication, for example "float16", as DeepSpeed (0.19.8) completed them."""
        config = self.engine._config
        dtype = str(self.engine.communication_data_type).removeprefix("torch.")
        zero = config.zero_config.model_dump(mode="json")
        return {**config._param_dict, "zero_optimization": zero, "communication_data_type": dtype}


@contextmanager
def rewriting(engine: Any) -> Generator[None, None, None]:
    """Context manager in which ZeRO 3 keeps all parameters sharded, small ones too, so that the shards may be
    overwritten. Afterwards it gathers the small ones again and calls `forget_second_copies`. Does nothing below ZeRO
    3."""
    shards = engine.zero_optimization_partition_weights()
    if shards:
        engine.optimizer.checkpoint_event_prologue()
    try:
        yield
    finally:
        if shards:
            engine.optimizer.checkpoint_event_epilogue()
            forget_second_copies(engine.module)


def forget_second_copies(module: Module) -> None:
    """Drops the secondary copies of the parameters, which ZeRO 3 keeps with zero_hpz_partition_size, after the
    parameters were overwritten. Otherwise the old copies would be gathered until the next step (DeepSpeed 0.19.8,
    partition_parameters.py)."""
    for parameter in module.parameters():
        parameter.ds_secondary_tensor = None  # pyright: ignore[reportAttributeAccessIssue]
