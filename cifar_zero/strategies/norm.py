"""The norm of gradients that are spread over ranks: those of experts, or of sharded tensors."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, _foreach_mul_  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.tensor import DTensor


def global_norm(parameters: Iterable[Any]) -> Tensor | None:
    """Returns the L2 norm of all gradients, float32, each expert and shard once; None without any. All ranks call it.
    DeepSpeed (0.19.8) marks experts with `allreduce` and `group_name`, pipeline its stages with `norm_group`."""
    squares: dict[tuple[Any, ...], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            groups = [parameter.norm_group] if hasattr(parameter, "norm_group") else []
            if not getattr(parameter, "allreduce", True):
                from deepspeed.utils import groups as of_deepspeed

                groups = [of_deepspeed._get_expert_parallel_group(parameter.group_name)]
            if isinstance(parameter.grad, DTensor):
                # One sum over the ranks for all shards; DTensor's own norm would take one for each.
                of_dimensions = zip(parameter.grad.device_mesh.get_all_groups(), parameter.grad.placements, strict=True)
                groups += [group for group, placement in of_dimensions if not placement.is_replicate()]
            # torch's get_total_norm would round the norm of each gradient to the gradient's type.
            norm = torch.linalg.vector_norm(_local(parameter.grad), dtype=torch.float32)
            squares.setdefault(tuple(groups), []).append(norm.square())
    totals = {groups: torch.stack(values).sum() for groups, values in squares.items()}
    for groups, total in totals.items():
        for group in groups:
            torch.distributed.all_reduce(total, group=group)
    return torch.stack([*totals.values()]).sum().sqrt() if totals else None


def clip_by_global_norm(parameters: Sequence[Any], limit: float) -> None:
    """Clips gradients by that norm. torch's clip_grad_norm_ (2.15) accepts no DTensors of several meshes."""
    norm = global_norm(parameters)
    if norm is not None:
        scale = (limit / (norm + 1e-6)).clamp(max=1)
        _foreach_mul_([_local(each.grad) for each in parameters if each.grad is not None], scale)


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
