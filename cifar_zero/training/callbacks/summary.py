"""The results of a run: the contents of metrics.json, read from the trainer, its callbacks and DeepSpeed's engine."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from cifar_zero.checkpoints import run_folder
from cifar_zero.checkpoints.finetuning.network import on_meta
from cifar_zero.checkpoints.io import attempt, failure_of
from cifar_zero.config.run import Run
from cifar_zero.config.settings import Settings
from cifar_zero.core.hardware import cpu_name
from cifar_zero.reports.summary import metrics_json, print_summary, write_json
from cifar_zero.strategies import hooks_of
from cifar_zero.strategies.mesh import MeshStrategy
from cifar_zero.training.callbacks.curves import TrainingCurves
from cifar_zero.training.callbacks.memory import Memory
from cifar_zero.training.callbacks.throughput import Throughput
from cifar_zero.training.loggers import log_results, write_to


class EngineInfo(Callback):
    """Reads the settings in effect from the engine and the model, after the fit: dtypes, skipped steps, bucket sizes.
    Under DeepSpeed rank 0 also writes the engine's configuration. Bucket sizes are in elements, of stages 1 to 3."""

    def __init__(self) -> None:
        self._first_step = self._applied_steps = 0
        self.totals: dict[str, Any] = {}  # settings in effect, of metrics.json

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Reads the settings, and starts to count the steps that a gradient scaler lets through."""
        parameters = next(pl_module.parameters()).dtype
        self.totals["compute_dtype"] = _name(_compute_dtype(trainer, parameters))
        self.totals["parameter_dtype"] = _name(parameters)
        config = hooks_of(trainer.strategy).engine_config()
        zero = config.get("zero_optimization", {})
        if zero.get("stage"):
            gathered = "prefetch_bucket_size" if zero["stage"] == 3 else "allgather_bucket_size"
            self.totals["reduce_bucket_size"] = zero["reduce_bucket_size"]
            self.totals["allgather_bucket_size"] = zero[gathered]
        if config and trainer.is_global_zero:
            text = json.dumps(config, indent=1, default=str)
            file = Path(trainer.default_root_dir) / run_folder.DEEPSPEED_CONFIG
            attempt(lambda: file.write_text(text + "\n"), file)
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            self._first_step, self._applied_steps = trainer.global_step, 0
            trainer.optimizers[0].register_step_post_hook(self._count)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Counts the optimizer steps that float16 skipped because a gradient overflowed; 0 in other formats."""
        skipped = hooks_of(trainer.strategy).skipped_steps()
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            skipped = trainer.global_step - self._first_step - self._applied_steps
        self.totals["skipped_steps"] = skipped

    def _count(self, *_: Any) -> None:
        self._applied_steps += 1


def collect(trainer: Trainer, module: Any, datamodule: Any, settings: Settings) -> dict[str, Any]:
    """Returns the contents of metrics.json after fit and test; None for what a run without test or validation lacks."""
    recipe, device = settings.recipe, trainer.strategy.root_device
    counted = [*on_meta(recipe.model, module.num_classes, recipe.trainable, recipe.lora).parameters()]
    measured = {
        "dataset": datamodule.dataset.name,
        "num_train": datamodule.num_train,
        "num_test": datamodule.num_test,
        "model": recipe.model.name,
        "parameters": sum(parameter.numel() for parameter in counted),
        "trained_parameters": sum(parameter.numel() for parameter in counted if parameter.requires_grad),
        "strategy": settings.placement.strategy_name,
        "world_size": trainer.world_size,
        "num_nodes": trainer.num_nodes,
        "accelerator": device.type,
        "device_name": cpu_name(),
        **{name: settings.option(name) for name in ("precision", "seed", "batch_size", "accumulate")},
        "micro_batch_size": datamodule.micro_batch_size,
        "steps": trainer.global_step,
        **test_metrics(module, datamodule),
    }
    if device.type == "cuda":
        measured |= {"accelerator": "gpu", "device_name": torch.cuda.get_device_name(device)}
    if module.val_metrics.confusion.update_called:
        measured["val/acc"] = module.val_metrics.overall()["acc"]
    for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(callback, (TrainingCurves, Throughput, Memory, EngineInfo)):
            measured |= callback.totals
    return metrics_json(measured, settings.fell_back)


def test_metrics(module: Any, datamodule: Any) -> dict[str, Any]:
    """Returns the test/* of metrics.json that a run has, none without a test. Every rank calls it."""
    metrics: dict[str, Any] = {}
    tested = module.test_metrics
    if tested.confusion.update_called:
        for name, values in tested.per_class().items():
            metrics[f"test/{name}_per_class"] = dict(zip(datamodule.classes, values.tolist(), strict=True))
        for name, value in tested.overall().items():
            metrics[f"test/{name}"] = value
    return metrics


def report(trainer: Trainer, run: Run, metrics: dict[str, Any], run_dir: Path | None) -> str:
    """Writes metrics.json, adds the results to the loggers and prints them, on rank 0, which has a run folder. Returns
    why metrics.json could not be written; empty if it could."""
    if run_dir is None:
        return ""
    file = run_dir / run_folder.METRICS
    failure = failure_of(lambda: write_json(file, metrics))
    for logger in trainer.loggers:
        write_to(logger, partial(log_results, logger, run, metrics, trainer.global_step))
    print_summary(metrics, run_dir)
    return f"{file} could not be written: {failure}" if failure else ""


def _compute_dtype(trainer: Trainer, parameters: torch.dtype) -> torch.dtype:
    """Returns the dtype of the layers: autocast's, the one that fully_shard casts to, or the parameters'."""
    if isinstance(trainer.strategy, MeshStrategy) and trainer.strategy.casts:
        return torch.bfloat16  # strategies/fsdp2.py
    device = trainer.strategy.root_device.type
    with trainer.precision_plugin.forward_context():
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else parameters


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
