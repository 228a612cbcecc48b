"""Defines the adapter of PyTorch's FSDP2 (`fully_shard`)."""

import math
from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._pytree import tree_map

from stepcheck.engines.adapter import NotAuditable
from stepcheck.engines.plain import PlainAdapter


class FSDP2Adapter(PlainAdapter):
    """Reads a training under FSDP2, where each rank has some rows of each parameter. In a mesh of two dimensions,
    several ranks have the same rows."""

    gathers = True

    def __init__(self, module: nn.Module, optimizer: Any):
        super().__init__(module, optimizer)
        self.groups: dict[int, Any] = {}  # FSDPParam by id of the sharded parameter
        self.communicating: list[Any] = []  # the groups of parameters that are sent together
        for part in module.modules():
            state = part._get_fsdp_state() if isinstance(part, FSDPModule) else None
            for group in _groups_of(state):
                self.communicating.append(group)
                self.groups |= {id(each.sharded_param): each for each in group.fsdp_params}
        for index, parameter in enumerate(self.parameters):
            if isinstance(parameter, DTensor) and any(
                isinstance(each, Shard) and each.dim for each in parameter.placements
            ):
                raise NotAuditable(f"{self.names[index]} is sharded along another dimension than its first")
        if any(group.mesh_info.mesh.size() != self.ranks.size for group in self.communicating):
            raise NotAuditable("FSDP2 averages the gradients of a group of ranks only")

    @property
    def label(self) -> str:
        return f"FSDP2, {self.ranks}"

    @property
    def device(self) -> torch.device:
        kinds = {each.device_mesh.device_type for each in self.parameters if isinstance(each, DTensor)}
        if "cuda" in kinds:
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def full_weight(self, index: int) -> Tensor:
        parameter = self.parameters[index]
        full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        return full.detach().to(self.device, self.compute_dtype(index), copy=True)

    def prepare_copy(self, copy: nn.Module) -> None:
        for name, part in self.module.named_modules():
            if not isinstance(part, FSDPModule):
                continue
            policy, own = part._get_fsdp_state()._mp_policy, copy.get_submodule(name)
            if policy.cast_forward_inputs and policy.param_dtype:
                into = partial(_cast, policy.param_dtype)
                own.register_forward_pre_hook(
                    lambda _, args, kwargs, into=into: (tree_map(into, args), tree_map(into, kwargs)), with_kwargs=True
                )
            if policy.output_dtype:
                out = partial(_cast, policy.output_dtype)
                own.register_forward_hook(lambda _, args, output, out=out: tree_map(out, output))

    def own_part(self, index: int) -> tuple[Tensor, int]:
        parameter = self.parameters[index]
        local, start = self.local(parameter).detach(), 0
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            _, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
            start = offset[0] * math.prod(parameter.shape[1:]) if offset else 0
        return local, start

    def replica(self, index: int) -> tuple[int, int]:
        parameter = self.parameters[index]
        if not isinstance(parameter, DTensor):
            return self.ranks.rank, self.ranks.size
        mesh, number, count = parameter.device_mesh, 0, 1
        for dim, each in enumerate(parameter.placements):
            if not isinstance(each, Shard):
                number = number * mesh.size(dim) + mesh.get_local_rank(dim)
                count *= mesh.size(dim)
        return number, count

    def begin_micro_batch(self) -> str:
        several = len({group.gradient_divide_factor for group in self.communicating}) > 1
        return "modules divide their gradients by different factors (set_gradient_divide_factor)" if several else ""

    def gradients_before_pass(self, summed: Collection[int]) -> dict[int, Tensor | None]:
        """Continues the sum of a sharded parameter while gradients wait to be reduced, or if the script has not changed
        the reduced gradient since the last pass. So a wrong reduction after an earlier micro-batch is seen."""
        before = super().gradients_before_pass(summed)
        changed = self.clipped_to or self.clips_others or self.scaled_by != 1
        unchanged = set() if changed else {*summed} - self.modified_gradients()
        for_replicas = any(getattr(each, "_partial_reduce_output", None) is not None for each in self.communicating)
        for index, gradient in [*before.items()]:
            own = self.groups.get(id(self.parameters[index]))
            continues = for_replicas or (gradient is not None and index in unchanged)
            if own and (continues or _waits(own)):
                del before[index]
        return before

    def compute_dtype(self, index: int) -> torch.dtype:
        own = self.groups.get(id(self.parameters[index]))
        return (own.mp_policy.param_dtype if own else None) or self.parameters[index].dtype

    def rounding_dtypes(self) -> set[torch.dtype]:
        chosen = [_sum_dtype(each) for each in self.groups.values()]
        return super().rounding_dtypes() | {dtype for dtype in chosen if dtype}

    def reduction_factor(self) -> float:
        factor = self.communicating[0].gradient_divide_factor if self.communicating else None
        return 1.0 if factor is None else self.ranks.size / factor

    def local(self, tensor: Any) -> Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _waits(parameter: Any) -> bool:
    """Returns whether a parameter has gradients that FSDP2 has not reduced yet. Older releases of torch keep them in
    another attribute if they must cast them to the policy's reduce_dtype."""
    gradient = getattr(getattr(parameter, "_unsharded_param", None), "grad", None)
    return gradient is not None or parameter.unsharded_accumulated_grad is not None


def _sum_dtype(parameter: Any) -> torch.dtype | None:
    """Returns the dtype in which the gradients of a parameter are added and sent, or None for the parameter's own. If
    the policy names no reduce_dtype, torch 2.15 uses the parameter's own, and earlier releases the dtype of the forward
    pass."""
    policy = parameter.mp_policy
    own = hasattr(type(parameter), "unsharded_grad_dtype")
    return policy.reduce_dtype or (None if own else policy.param_dtype)


def _cast(dtype: torch.dtype, value: Any) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _groups_of(state: Any) -> list[Any]:
    """Returns the parameter groups of a module's FSDP state, which has at most one up to torch 2.11. `state` may be
    None."""
    if state is None:
        return []
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]
