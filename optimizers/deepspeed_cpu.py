"""DeepSpeed's optimizers in C++ for the CPU, with torch's names of their state: checkpoints fit either.

DeepSpeed (0.19.8) calls Adagrad's sum of squares exp_avg_sq, and keeps an exp_avg_sq for Lion, which has none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.lion import DeepSpeedCPULion
from torch import Tensor


class CPUAdagrad(DeepSpeedCPUAdagrad):
    """DeepSpeed's Adagrad; the state is that of `torch_adagrad.TorchAdagrad`."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update of all parameters that have a gradient."""
        loss = closure() if closure is not None else None
        for group, parameter in _with_gradient(self):
            state = self.state[parameter]
            if not state:
                state |= {"step": torch.tensor(0.0), "sum": torch.zeros_like(parameter, dtype=torch.float32)}
            state["step"] += 1
            options = group["lr"], group["eps"], group["weight_decay"]
            tensors = parameter.data, parameter.grad, state["sum"]
            self.ds_opt_adagrad.adagrad_update(self.opt_id, int(state["step"]), *options, *tensors)
        return loss


class CPULion(DeepSpeedCPULion):
    """DeepSpeed's Lion; the state is that of `torch_lion.TorchLion`."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update of all parameters that have a gradient."""
        loss = closure() if closure is not None else None
        for group, parameter in _with_gradient(self):
            state = self.state[parameter]
            if not state:
                state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32)
            # The number of the step, here 1, is without effect on Lion (deepspeed/ops/csrc/includes/cpu_lion.h).
            options = group["lr"], *group["betas"], group["weight_decay"]
            tensors = parameter.data, parameter.grad, state["exp_avg"]
            self.ds_opt_lion.lion_update(self.opt_id, 1, *options, *tensors)
        return loss


def _with_gradient(optimizer: torch.optim.Optimizer) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """Each parameter that has a gradient, after the options of its group."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield group, parameter
