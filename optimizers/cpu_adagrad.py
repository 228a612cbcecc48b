"""Adagrad by DeepSpeed, in C++ for the CPU."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad


class CPUAdagrad(DeepSpeedCPUAdagrad):
    """DeepSpeed's update, with the state of `torch_adagrad.TorchAdagrad`: a checkpoint of either fits the other.

    DeepSpeed (0.19.8) by itself calls the sum of squares exp_avg_sq.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update of all parameters that have a gradient."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state |= {"step": torch.tensor(0.0), "sum": torch.zeros_like(parameter, dtype=torch.float32)}
                state["step"] += 1
                options = group["lr"], group["eps"], group["weight_decay"]
                tensors = parameter.data, parameter.grad, state["sum"]
                self.ds_opt_adagrad.adagrad_update(self.opt_id, int(state["step"]), *options, *tensors)
        return loss
