"""The norm of gradients that may be of experts spread over ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def global_norm(parameters: Iterable[Any]) -> Tensor | None:
    """L2 norm of all gradients, a float32 scalar, each expert counted once; None where there are no gradients.

    Args:
        parameters: of the network; DeepSpeed (0.19.8) marks those of experts with `allreduce` and `group_name`. Where
            experts are spread, to be called by all ranks.
    """
    squares: dict[str, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            group = "" if getattr(parameter, "allreduce", True) else parameter.group_name
            # torch's get_total_norm would round the norm of each gradient to the gradient's type.
            norm = torch.linalg.vector_norm(parameter.grad, dtype=torch.float32)
            squares.setdefault(group, []).append(norm.square())
    totals = {group: torch.stack(values).sum() for group, values in squares.items()}
    for group, total in totals.items():
        if group:
            from deepspeed.utils import groups

            torch.distributed.all_reduce(total, group=groups._get_expert_parallel_group(group))
    return torch.stack([*totals.values()]).sum().sqrt() if totals else None
