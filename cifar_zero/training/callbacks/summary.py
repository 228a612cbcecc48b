"""The results of a run: the contents of metrics.json, read from the trainer, its callbacks and DeepSpeed's engine."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger

from cifar_zero.checkpoints import run_folder
from cifar_zero.checkpoints.finetuning.network import on_meta
from cifar_zero.checkpoints.io import attempt
from cifar_zero.config.flags import Config, flat
from cifar_zero.core.console import say
from cifar_zero.core.hardware import cpu_name
from cifar_zero.core.programs import command
from cifar_zero.reports.summary import IN_EFFECT, MEASURED, card, metrics_json
from cifar_zero.strategies.mesh import MeshStrategy
from cifar_zero.training.callbacks.curves import TrainingCurves, deepspeed_engine
from cifar_zero.training.callbacks.memory import Memory
from cifar_zero.training.callbacks.throughput import Throughput
from cifar_zero.training.loggers import show_result, write_to

Observer = TypeVar("Observer", bound=Callback)


class Effective(Callback):
    """Reads the settings in effect from the engine and the model, after the fit: dtypes, skipped steps, bucket sizes.
    Under DeepSpeed rank 0 also writes the engine's configuration. Bucket sizes are in elements, of stages 1 to 3."""

    def __init__(self) -> None:
        self._first_step = self._applied_steps = 0
        self.totals: dict[str, Any] = dict.fromkeys(IN_EFFECT)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
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
            if trainer.is_global_zero:
                if engine.zero_optimization_partition_weights() and trainer.world_size > 1:
                    say(_persistence(engine, "" if pl_module.config.ds_config else "--zero."))
                config = engine._config  # with the ZeRO section as DeepSpeed (0.19.8) has completed it
                given = {**config._param_dict, "zero_optimization": config.zero_config.model_dump(mode="json")}
                given["communication_data_type"] = _name(engine.communication_data_type)
                text = json.dumps(given, indent=1, default=str)
                file = Path(trainer.default_root_dir) / run_folder.DEEPSPEED_CONFIG
                attempt(lambda: file.write_text(text + "\n"), file)
        elif getattr(trainer.precision_plugin, "scaler", None) is not None:
            self._first_step, self._applied_steps = trainer.global_step, 0
            trainer.optimizers[0].register_step_post_hook(self._count)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Counts the optimizer steps that float16 skipped because a gradient overflowed; 0 in other formats."""
        engine, skipped = deepspeed_engine(trainer), 0
        if engine is not None:
            skipped = engine.skipped_steps
        elif getattr(trainer.precision_plugin, "scaler", None) is not None:
            skipped = trainer.global_step - self._first_step - self._applied_steps
        self.totals["skipped_steps"] = skipped

    def _count(self, *_: Any) -> None:
        self._applied_steps += 1


def collect(trainer: Trainer, module: Any, datamodule: Any, config: Config) -> dict[str, Any]:
    """Returns the contents of metrics.json after fit and test; None for what a run without test or validation lacks."""
    curves, throughput = _observer(trainer, TrainingCurves), _observer(trainer, Throughput)
    memory = _observer(trainer, Memory)
    fell_back = config.data.source == "auto" and datamodule.source == "digits"
    device = trainer.strategy.root_device
    counted = [*on_meta(config.model, module.num_classes, config.trainable, config.lora).parameters()]
    measured = {
        "dataset": datamodule.dataset.name,
        "num_train": datamodule.num_train,
        "num_test": datamodule.num_test,
        "model": config.model.name,
        "parameters": sum(parameter.numel() for parameter in counted),
        "trained_parameters": sum(parameter.numel() for parameter in counted if parameter.requires_grad),
        "strategy": config.strategy_name,
        "world_size": trainer.world_size,
        "num_nodes": trainer.num_nodes,
        "accelerator": "gpu" if device.type == "cuda" else device.type,
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        **{name: getattr(config, name) for name in ("precision", "seed", "batch_size", "accumulate")},
        "micro_batch_size": datamodule.micro_batch_size,
        "epochs": curves.last_epoch,
        "steps": trainer.global_step,
        "train/loss": curves.last_loss,
        "val/acc": module.val_metrics.overall()["acc"] if module.val_metrics.confusion.update_called else None,
        **test_metrics(module, datamodule),
        **throughput.totals,
        **memory.totals,
        **_observer(trainer, Effective).totals,
    }
    warning = "CIFAR-10 is not available: these are the results of the embedded handwritten digits"
    return metrics_json(measured, fallback=warning if fell_back else "")


def test_metrics(module: Any, datamodule: Any) -> dict[str, Any]:
    """Returns the test/* of metrics.json; None without a test, or for an undefined metric. Every rank calls it."""
    metrics: dict[str, Any] = {key: None for key in MEASURED if key.startswith("test/")}
    tested = module.test_metrics
    if tested.confusion.update_called:
        per_class = tested.per_class()
        metrics |= {f"test/{name}": value for name, value in tested.overall(per_class).items()}
        for name, values in per_class.items():
            metrics[f"test/{name}_per_class"] = dict(zip(datamodule.classes, values.tolist(), strict=True))
    return metrics


def log_results(trainer: Trainer, config: Config, metrics: dict[str, Any]) -> None:
    """Adds the run's command and results to TensorBoard, where HPARAMS compares runs, and all of metrics.json to W&B's
    summary of the run; only rank 0 has loggers."""
    options = flat(config)
    settings = {name: options[name] for name in config.hparams}
    settings |= {name: metrics[name] for name in ("strategy", "world_size")}
    settings |= {"lr": config.optimizer.options.get("lr"), "batch_size": config.batch_size}
    settings |= {"optimizer": config.optimizer.name, "schedule": config.schedule.name}
    settings |= {name: metrics[name] for name in ("model", "accumulate", "precision", "dataset", "seed")}
    results = {name: metrics[name] for name in ("test/acc", "val/acc", "test/loss", "perf/images_per_second")}
    results["mem/peak_gb"] = max(metrics["mem/peak_rank_bytes"], default=0) / 1e9
    known = {name: value for name, value in results.items() if value is not None}
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.log_metrics(known, trainer.global_step)
            text = card(command(Path(sys.argv[0]).stem, *sys.argv[1:]), metrics)
            write_to(logger, partial(show_result, logger, text, settings, known))
        elif isinstance(logger, WandbLogger):
            write_to(logger, partial(logger.experiment.summary.update, metrics))


def _persistence(engine: Any, prefix: str) -> str:
    """Returns how many parameters ZeRO 3 shards, in elements; most models under its threshold are not sharded."""
    whole = sum(parameter.ds_numel for parameter in engine.optimizer.persistent_parameters)
    every = [*engine.module.parameters()]
    total = sum(parameter.ds_numel for parameter in every)
    of = f"{total:,} parameters"
    remedy = f"{prefix}param_persistence_threshold 0 shards them"
    if whole == total:
        return f"warning: ZeRO 3 shards nothing, all {of} stay whole on every rank: {remedy}"
    if whole:
        return f"{whole:,} of {of} stay whole on every rank: {remedy}"
    return f"all {of} are sharded: {sum(parameter.ds_tensor.numel() for parameter in every):,} on each rank"


def _observer(trainer: Trainer, kind: type[Observer]) -> Observer:
    return next(callback for callback in trainer.callbacks if isinstance(callback, kind))  # pyright: ignore


def _compute_dtype(trainer: Trainer, parameters: torch.dtype) -> torch.dtype:
    """Returns the dtype of the layers: autocast's, the one that fully_shard casts to, or the parameters'."""
    if isinstance(trainer.strategy, MeshStrategy) and trainer.strategy.casts:
        return torch.bfloat16  # strategies/fsdp2.py
    device = trainer.strategy.root_device.type
    with trainer.precision_plugin.forward_context():
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else parameters


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
