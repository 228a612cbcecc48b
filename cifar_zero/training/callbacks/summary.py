"""The results of a run: the contents of metrics.json, read from the trainer and its callbacks."""

from typing import Any, TypeVar

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from cifar_zero.config.flags import Config, flat
from cifar_zero.core.hardware import cpu_name
from cifar_zero.reports.summary import MEASURED, metrics_json
from cifar_zero.training.callbacks.counts import parameter_count, trained_count
from cifar_zero.training.callbacks.curves import TrainingCurves
from cifar_zero.training.callbacks.effective import Effective
from cifar_zero.training.callbacks.memory import Memory
from cifar_zero.training.callbacks.throughput import Throughput

Observer = TypeVar("Observer", bound=Callback)


def collect(trainer: Trainer, module: Any, datamodule: Any, config: Config) -> dict[str, Any]:
    """Returns the contents of metrics.json after fit and test; None for what a run without test or validation lacks."""
    curves, throughput = _observer(trainer, TrainingCurves), _observer(trainer, Throughput)
    memory = _observer(trainer, Memory)
    fell_back = config.data.source == "auto" and datamodule.source == "digits"
    device = trainer.strategy.root_device
    measured = {
        "dataset": datamodule.dataset.name,
        "num_train": datamodule.num_train,
        "num_test": datamodule.num_test,
        "model": config.model.name,
        "parameters": parameter_count(module.model, module.num_classes, config.lora),
        "trained_parameters": trained_count(module.model, module.num_classes, config.trainable, config.lora),
        "strategy": config.strategy_name,
        "world_size": trainer.world_size,
        "num_nodes": trainer.num_nodes,
        "accelerator": "gpu" if device.type == "cuda" else device.type,
        "device_name": device_name(device),
        "precision": config.precision,
        "seed": config.seed,
        "batch_size": config.batch_size,
        "micro_batch_size": datamodule.micro_batch_size,
        "accumulate": config.accumulate,
        "epochs": curves.last_epoch,
        "steps": trainer.global_step,
        "train/loss": curves.last_loss,
        "val/acc": module.val_metrics.overall()["acc"] if module.val_metrics.update_called else None,
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
    if tested.update_called:
        per_class = tested.per_class()
        metrics |= {f"test/{name}": value for name, value in tested.overall(per_class).items()}
        for name, values in per_class.items():
            metrics[f"test/{name}_per_class"] = dict(zip(datamodule.classes, values.tolist(), strict=True))
    return metrics


def log_hparams(trainer: Trainer, config: Config, metrics: dict[str, Any]) -> None:
    """Adds the run to TensorBoard's HPARAMS table, which compares runs; only rank 0 has loggers.

    Args:
        trainer: of the run.
        config: of the run.
        metrics: of metrics.json.
    """
    settings = ("strategy", "model", "batch_size", "accumulate", "precision", "world_size", "dataset", "seed")
    hparams = {name: metrics[name] for name in settings}
    hparams |= {"optimizer": config.optimizer.name, "schedule": config.schedule.name}
    hparams["lr"] = config.optimizer.options.get("lr")
    options = flat(config)
    hparams |= {name: options[name] for name in config.hparams}
    results = {name: metrics[name] for name in ("val/acc", "test/acc", "test/loss", "perf/images_per_second")}
    results["mem/peak_gb"] = max(metrics["mem/peak_rank_bytes"], default=0) / 1e9
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            known = {name: value for name, value in results.items() if value is not None}
            logger.log_hyperparams(hparams, known, trainer.global_step)
            logger.experiment.flush()


def device_name(device: torch.device) -> str:
    """Returns the name of a GPU, or of this machine's processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def _observer(trainer: Trainer, kind: type[Observer]) -> Observer:
    return next(callback for callback in trainer.callbacks if isinstance(callback, kind))  # pyright: ignore
