"""The norm of gradients that are spread over ranks: those of experts, or of sharded tensors."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def global_norm(parameters: Iterable[Any]) -> Tensor | None:
    """Returns the L2 norm of all gradients, float32, each expert and shard counted once; None if there are none.

    All ranks call it. DeepSpeed (0.19.8) marks the parameters of experts with `allreduce` and `group_name`, pipeline
    those of one rank with `norm_group`.
    """
    squares: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            group = getattr(parameter, "norm_group", None)
            if not getattr(parameter, "allreduce", True):
                group = parameter.group_name
            gradient = parameter.grad
            if isinstance(gradient, DTensor):
                # One sum over the ranks for all shards; DTensor's own norm would take one for each.
                whole = all(placement.is_replicate() for placement in gradient.placements)
                group = None if whole else gradient.device_mesh.get_group()
                gradient = gradient.to_local()
            # torch's get_total_norm would round the norm of each gradient to the gradient's type.
            norm = torch.linalg.vector_norm(gradient, dtype=torch.float32)
            squares.setdefault(group, []).append(norm.square())
    totals = {group: torch.stack(values).sum() for group, values in squares.items()}
    for group, total in totals.items():
        if isinstance(group, str):
            from deepspeed.utils import groups

            group = groups._get_expert_parallel_group(group)
        if group is not None:
            torch.distributed.all_reduce(total, group=group)
    return torch.stack([*totals.values()]).sum().sqrt() if totals else None


def clip_by_global_norm(parameters: Sequence[Any], limit: float) -> None:
    """Clips gradients by that norm.

    torch's clip_grad_norm_ (2.15) does not accept the mixture of DTensors and plain tensors of tensor parallelism.
    """
    norm = global_norm(parameters)
    if norm is not None:
        for sharded in (True, False):
            of_a_kind = [parameter for parameter in parameters if isinstance(parameter, DTensor) == sharded]
            torch.nn.utils.clip_grads_with_norm_(of_a_kind, limit, norm)
