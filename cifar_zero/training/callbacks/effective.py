"""The settings actually in effect: dtypes, bucket sizes, skipped steps."""

import json
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy

from cifar_zero.checkpoints import run_folder
from cifar_zero.strategies.mesh import MeshStrategy

KEYS = ("compute_dtype", "parameter_dtype", "skipped_steps", "reduce_bucket_size", "allgather_bucket_size")
"""Keys of metrics.json, known after the fit. Bucket sizes are in elements, and only of DeepSpeed's stages 1 to 3."""


class Effective(Callback):
    """Reads them from the engine and the model; under DeepSpeed rank 0 also writes the engine's configuration.

    Args:
        run_dir: the run folder, on rank 0.
    """

    def __init__(self, run_dir: Path | None):
        self._run_dir = run_dir
        self._first_step = 0
        self._applied_steps: int | None = None
        self.totals: dict[str, Any] = dict.fromkeys(KEYS)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reads the settings, and starts to count the steps that a gradient scaler lets through."""
        parameters = next(pl_module.parameters()).dtype
        self.totals["compute_dtype"] = _name(_compute_dtype(trainer, parameters))
        self.totals["parameter_dtype"] = _name(parameters)
        engine = deepspeed_engine(trainer)
        if engine is not None:
            if engine.zero_optimization():
                at_stage_3 = engine.zero_optimization_partition_weights()
                gathered = engine.zero_prefetch_bucket_size() if at_stage_3 else engine.zero_allgather_bucket_size()
                self.totals["reduce_bucket_size"] = engine.zero_reduce_bucket_size()
                self.totals["allgather_bucket_size"] = gathered
            if self._run_dir is not None:
                text = json.dumps(_configuration(engine), indent=1, default=str)
                (self._run_dir / run_folder.DEEPSPEED_CONFIG).write_text(text + "\n")
        elif getattr(trainer.precision_plugin, "scaler", None) is not None:
            self._first_step, self._applied_steps = trainer.global_step, 0
            trainer.optimizers[0].register_step_post_hook(self._count)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Counts the optimizer steps that float16 skipped because a gradient overflowed; 0 in other formats."""
        engine = deepspeed_engine(trainer)
        if engine is not None:
            self.totals["skipped_steps"] = engine.skipped_steps
        elif self._applied_steps is not None:
            self.totals["skipped_steps"] = trainer.global_step - self._first_step - self._applied_steps
        else:
            self.totals["skipped_steps"] = 0

    def _count(self, *_: Any) -> None:
        assert self._applied_steps is not None
        self._applied_steps += 1


def _compute_dtype(trainer: Trainer, parameters: torch.dtype) -> torch.dtype:
    """Returns the dtype of the layers: autocast's, the one that fully_shard casts to, or the parameters'."""
    if isinstance(trainer.strategy, MeshStrategy) and trainer.strategy.casts:
        return torch.bfloat16  # strategies/fsdp2.py
    device = trainer.strategy.root_device.type
    with trainer.precision_plugin.forward_context():
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else parameters


def _configuration(engine: Any) -> dict[str, Any]:
    """Returns what the engine was given, with the ZeRO section as DeepSpeed (0.19.8) has completed it."""
    config = engine._config
    given = {**config._param_dict, "zero_optimization": config.zero_config.model_dump(mode="json")}
    return {**given, "communication_data_type": _name(engine.communication_data_type)}


def deepspeed_engine(trainer: Trainer) -> Any:
    """Returns DeepSpeed's engine; None under another strategy."""
    return trainer.strategy.deepspeed_engine if isinstance(trainer.strategy, DeepSpeedStrategy) else None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
