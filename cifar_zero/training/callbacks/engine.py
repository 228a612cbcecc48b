"""Records the peak memory of each rank, the size of its model states (the ZeRO paper's term for parameters, gradients
and optimizer state), and the settings in effect."""

import json
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.optim import Optimizer

from cifar_zero.build_model import create_meta_model
from cifar_zero.checkpoints import run_folder
from cifar_zero.core.atomic import attempt
from cifar_zero.core.hardware import cpu_name
from cifar_zero.launch.collectives import gather
from cifar_zero.strategies import hooks_of
from cifar_zero.training.callbacks.curves import IntervalCallback, log_scalars
from stepcheck.replay.memory import peak

PARTS = ("mem/parameter_rank_bytes", "mem/gradient_rank_bytes", "mem/optimizer_rank_bytes")
"""The keys of metrics.json whose values add up to mem/model_state_rank_bytes."""

MEMORY = ("mem/peak_rank_bytes", "mem/model_state_rank_bytes", *PARTS)


class EngineInfo(IntervalCallback):
    """Records, for metrics.json, the number of parameters, the device, the dtypes and bucket sizes in effect, the
    skipped steps and the memory of each rank. Writes the curve mem/peak_gb, the peak memory of the rank with the
    highest peak, in units of 10^9 bytes. Under DeepSpeed, rank 0 also writes the engine's configuration into the run
    folder."""

    def __init__(self) -> None:
        self._state_step = self._applied_steps = 0
        self._states = (0, 0, 0)  # bytes of parameters, gradients and optimizer state on this rank
        # Values of metrics.json. After the fit mem/* has a value per rank. Bucket sizes (ZeRO 1 to 3) are in elements.
        self.totals_of_run: dict[str, Any] = {key: [] for key in MEMORY}

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        parameters = trained = 0
        for parameter in create_meta_model(pl_module.settings.recipe, pl_module.num_classes).parameters():
            parameters += parameter.numel()
            if parameter.requires_grad:
                trained += parameter.numel()
        self.totals_of_run |= {"parameters": parameters, "trained_parameters": trained}
        device = trainer.strategy.root_device
        self.totals_of_run |= {"accelerator": "cpu", "device_name": cpu_name()}
        if device.type == "cuda":
            self.totals_of_run |= {"accelerator": "gpu", "device_name": torch.cuda.get_device_name(device)}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._applied_steps = trainer.global_step
        # Model states are measured in the second step, when the optimizer has its state, or in a run's only step.
        self._state_step = trainer.global_step + (trainer.estimated_stepping_batches != trainer.global_step + 1)
        parameter, hooks = next(pl_module.parameters()), hooks_of(trainer.strategy)
        device, compute_dtype = trainer.strategy.root_device.type, hooks.compute_dtype(parameter)
        with trainer.precision_plugin.forward_context():
            if torch.is_autocast_enabled(device):
                compute_dtype = torch.get_autocast_dtype(device)
        self.totals_of_run["compute_dtype"] = str(compute_dtype).removeprefix("torch.")
        self.totals_of_run["parameter_dtype"] = str(parameter.dtype).removeprefix("torch.")
        config = hooks.engine_config()
        zero = config.get("zero_optimization", {})
        if zero.get("stage"):
            gathered = "allgather_bucket_size"
            if zero["stage"] == 3:
                gathered = "prefetch_bucket_size"
            self.totals_of_run["reduce_bucket_size"] = zero["reduce_bucket_size"]
            self.totals_of_run["allgather_bucket_size"] = zero[gathered]
        if config and trainer.is_global_zero:
            text = json.dumps(config, indent=1, default=str)
            file = Path(trainer.default_root_dir) / run_folder.DEEPSPEED_CONFIG
            attempt(lambda: file.write_text(text + "\n"), file)
        if _is_scaled(trainer):
            trainer.optimizers[0].register_step_post_hook(self._count)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if trainer.global_step == self._state_step:
            self._states = hooks_of(trainer.strategy).state_bytes(pl_module, trainer.optimizers[0])

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gathers the memory of the ranks, and counts the optimizer steps that float16 skipped because a gradient
        overflowed. In other formats the count is 0."""
        super().on_train_end(trainer, pl_module)
        of_rank = (peak(pl_module.device), sum(self._states), *self._states)
        for key, value in zip(MEMORY, of_rank, strict=True):
            self.totals_of_run[key] = gather(value)
        skipped = hooks_of(trainer.strategy).skipped_steps()
        if _is_scaled(trainer):
            skipped = trainer.global_step - self._applied_steps
        self.totals_of_run["skipped_steps"] = skipped

    def _log(self, trainer: Trainer) -> None:
        device = trainer.strategy.root_device
        highest = trainer.strategy.reduce(torch.tensor(peak(device), device=device), reduce_op="max")
        log_scalars(trainer, {"mem/peak_gb": int(highest) / 1e9})

    def _count(self, *_: Any) -> None:
        self._applied_steps += 1


def _is_scaled(trainer: Trainer) -> bool:
    return getattr(trainer.precision_plugin, "scaler", None) is not None
