"""Extends Lightning's DeepSpeedStrategy to CPU ranks, and corrects what changes the maths of a step (Lightning
2.6.6)."""

import os
from functools import partial
from itertools import compress
from typing import Any

import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch.nn import Module

from stepcheck.engines.deepspeed import compile_no_collective

GROUP_LISTS = {"param_groups", "base_lrs", "_last_lr", "lr_lambdas", "min_lrs"} | {
    *("max_lrs", "base_momentums", "max_momentums"),  # of CyclicLR
}
"""Attributes of torch's optimizers and schedulers that are lists with one element for each parameter group."""


class CPUDeepSpeedStrategy(DeepSpeedStrategy):
    """Trains any LightningModule under DeepSpeed on CPU ranks, over gloo. Lightning's own strategy accepts only CUDA.

    On GPUs the ranks start as under Lightning's strategy. On every device the class corrects four things:

    - The loss of a micro-batch is divided by `accumulate_grad_batches` once. Both Lightning and `engine.backward`
      (DeepSpeed 0.19.8) divide it.
    - The optimizer does not step while the engine starts. At ZeRO 0 in a low precision DeepSpeed steps once with zero
      gradients (DeepSpeed 0.19.8, fp16/unfused_optimizer.py, `initialize_optimizer_states`; DeepSpeed pull request
      5104). Adam then counts one step too many, and AdamW decays the weights.
    - In bfloat16, gradients are not checked for overflow unless the configuration turns the check on. With the check,
      ZeRO 1 and 2 wait for all gradients in each step and skip a step with NaN (DeepSpeed 0.19.8,
      runtime/precision_config.py). No other strategy does either.
    - A parameter group with only frozen parameters is allowed. ZeRO 1 and 2 (DeepSpeed 0.19.8) raise IndexError.
    """

    config: dict[str, Any]

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.config.setdefault("zero_force_ds_cpu_optimizer", False)  # any optimizer may be offloaded

    @property
    def on_cpu(self) -> bool:
        return isinstance(self.accelerator, CPUAccelerator)

    @property
    def root_device(self) -> torch.device:
        """The rank's device, with an index, which DeepSpeed reads and Lightning's CPU devices lack."""
        return torch.device("cpu", 0) if self.on_cpu else super().root_device

    def setup_environment(self) -> None:
        """Starts the process group, and makes `engine.backward` not divide the loss. On CPU ranks, skips Lightning's
        check for CUDA."""
        precision: Any = self.precision_plugin
        precision.backward = partial(precision.backward, scale_wrt_gas=False)  # Lightning has divided the loss already
        if not self.on_cpu:
            super().setup_environment()
            return
        # DeepSpeed's own launcher sets this variable. Without it the CPU accelerator starts numactl in every step to
        # count the devices (DeepSpeed 0.19.8, accelerator/cpu_accelerator.py).
        os.environ.setdefault("LOCAL_SIZE", str(self.num_processes))
        super(DeepSpeedStrategy, self).setup_environment()  # DDP's method

    def setup_distributed(self) -> None:
        """Starts the process group. On CPU ranks, skips Lightning's check of GPU indices."""
        if not self.on_cpu:
            super().setup_distributed()
            return
        compile_no_collective()
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    def _format_config(self) -> None:
        super()._format_config()
        if "bf16" in self.config:
            self.config["bf16"].setdefault("check_grad_overflow", False)

    def _auto_select_batch_size(self) -> int:
        """Returns the micro-batch size that DeepSpeed only logs, or 1 if Lightning fails to read the attribute
        `batch_sampler`, which a CombinedLoader does not have."""
        try:
            return super()._auto_select_batch_size()
        except AttributeError:
            return 1

    def _setup_model_and_optimizer(self, model: Module, optimizer: Any, lr_scheduler: Any = None) -> Any:
        if optimizer is None:  # DeepSpeed makes the optimizer of its configuration
            return super()._setup_model_and_optimizer(model, optimizer, lr_scheduler)
        _drop_frozen_groups(optimizer, lr_scheduler)
        step, optimizer.step = optimizer.step, lambda *args, **kwargs: None
        started = super()._setup_model_and_optimizer(model, optimizer, lr_scheduler)
        optimizer.step = step
        return started


def _drop_frozen_groups(optimizer: Any, scheduler: Any) -> None:
    """Removes parameter groups without trained parameters from an optimizer and its scheduler, in place, unless this
    would remove all groups. ZeRO 1 and 2 read the first trained parameter of each group (DeepSpeed 0.19.8,
    stage_1_and_2.py)."""
    trained = [any(each.requires_grad for each in group["params"]) for group in optimizer.param_groups]
    if all(trained) or not any(trained):
        return
    for owner in filter(None, (optimizer, scheduler, *getattr(scheduler, "_schedulers", ()))):
        for name in GROUP_LISTS & vars(owner).keys():
            values = getattr(owner, name)
            if isinstance(values, list) and len(values) == len(trained):
                setattr(owner, name, [*compress(values, trained)])
