"""From a settled configuration to Lightning's objects: data module, module, trainer."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger

import run_folder
import sources
import strategies
from batch import micro_batch_size
from callbacks.counts import parameter_count
from callbacks.curves import TrainingCurves
from callbacks.figures import TestFigures
from callbacks.interrupt import Interrupt
from callbacks.memory import Memory
from callbacks.progress import Progress
from callbacks.throughput import Throughput
from cifar_module import CIFARModule
from cli import nearest
from config import Config
from datamodule import CIFARDataModule
from errors import UsageError

WARMUP_STEPS = 10
"""Optimizer steps that the throughput figures leave out."""

BENCH_WARMUP_STEPS = 20
"""Steps before the timed ones of --bench_steps: allocation, autotuning and the page cache settle in them."""


def datamodule(config: Config) -> CIFARDataModule:
    """The images, in batches of this rank."""
    return CIFARDataModule(config.data, batch_size=config.batch_size, accumulate=config.accumulate, seed=config.seed)


def module(config: Config) -> CIFARModule:
    """The network with its loss, optimizer and metrics; the network itself is built by the strategy."""
    return CIFARModule(
        config.model,
        config.optimizer,
        config.schedule,
        num_classes=num_classes(config),
        seed=config.seed,
        compile=config.compile,
    )


def trainer(config: Config, run_dir: Path | None) -> Trainer:
    """Lightning's Trainer for a run.

    Args:
        config: of the run, settled.
        run_dir: the run folder, on rank 0; None on the others, which write nothing by themselves.
    """
    on_cpu = config.accelerator == "cpu"
    strategy = strategies.build(config, on_cpu, micro_batch(config), parameter_count(config.model, num_classes(config)))
    # Under DeepSpeed the strategy brings its own precision.
    precision = {} if hasattr(strategy, "config") else {"precision": config.precision}
    options: dict[str, Any] = {
        "accelerator": config.accelerator,
        "devices": config.devices,
        "num_nodes": config.num_nodes,
        "strategy": strategy,
        **precision,
        "max_epochs": config.epochs,
        "max_steps": BENCH_WARMUP_STEPS + config.bench_steps if config.bench_steps else config.max_steps,
        "accumulate_grad_batches": config.accumulate,
        "gradient_clip_val": config.gradient_clip_val or None,
        "logger": loggers(config, run_dir),
        "callbacks": callbacks(config, run_dir),
        "default_root_dir": run_dir,
        "use_distributed_sampler": False,  # the loaders shard by themselves, whatever the strategy
        "log_every_n_steps": config.log_interval,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    if config.bench_steps:
        options["limit_val_batches"] = 0
    known = inspect.signature(Trainer.__init__).parameters
    for name in config.trainer:
        if name not in known:
            raise UsageError(f"--trainer.{name} is no option of Lightning's Trainer: {nearest(name, known)}")
    try:
        return Trainer(**{**options, **config.trainer})
    except (TypeError, ValueError) as error:  # MisconfigurationException is a ValueError of Lightning's
        raise UsageError(f"Lightning's Trainer refuses its options: {error}") from error


def loggers(config: Config, run_dir: Path | None) -> list[Logger]:
    """Where rank 0 writes its curves; nothing on the other ranks."""
    if run_dir is None:
        return []
    made: list[Logger] = []
    if "tensorboard" in config.logger:
        version, name = run_dir.name, run_dir.parent.name
        made.append(TensorBoardLogger(config.out, name=name, version=version, default_hp_metric=False))
    if "wandb" in config.logger:
        try:
            made.append(WandbLogger(name=run_dir.parent.name, save_dir=run_dir, project="cifar-zero"))
        except ModuleNotFoundError as error:
            raise UsageError("--logger wandb needs the package: pip install wandb") from error
    return made


def callbacks(config: Config, run_dir: Path | None) -> list[Callback]:
    """The observers of a run, the same on every rank."""
    curves = TrainingCurves(config.log_interval)
    warmup = BENCH_WARMUP_STEPS if config.bench_steps else WARMUP_STEPS
    observers: list[Callback] = [
        curves,
        Throughput(config, warmup),
        Memory(config.log_interval),
        Progress(config, curves),
        Interrupt(config.log_interval),
    ]
    if not config.bench_steps:
        observers += [TestFigures(run_dir), *checkpoints(config, run_dir)]
    return observers


def interrupted(trainer: Trainer) -> bool:
    """Whether Ctrl-C ended the training, which has then been saved."""
    return any(isinstance(callback, Interrupt) and callback.stopped for callback in trainer.callbacks)  # pyright: ignore


def checkpoints(config: Config, run_dir: Path | None) -> list[Callback]:
    """The last checkpoint, the best by val/acc where there is a validation split, and the newest by steps on request.

    Rank 0's directory is broadcast to the others by Lightning.
    """
    folder = run_dir / run_folder.CHECKPOINTS if run_dir is not None else None
    best: dict[str, Any] = {"save_top_k": 0}
    if config.data.val_fraction:
        best = {"monitor": "val/acc", "mode": "max", "save_top_k": 1}
    name = "epoch{epoch:02d}-step{step:06d}"
    last = ModelCheckpoint(folder, f"best-{name}", save_last=True, auto_insert_metric_name=False, **best)
    saved: list[Callback] = [last]
    if config.save_every_n_steps:
        every = config.save_every_n_steps
        saved.append(ModelCheckpoint(folder, name, every_n_train_steps=every, auto_insert_metric_name=False))
    return saved


def num_classes(config: Config) -> int:
    """Width of the network's output."""
    return len(sources.class_names(config.data))


def micro_batch(config: Config) -> int:
    """Images per rank and micro-batch."""
    return micro_batch_size(config.batch_size, config.world_size, config.accumulate)


def resume_path(config: Config) -> Path | None:
    """The checkpoint to continue from, None for a fresh start."""
    return run_folder.find_checkpoint(config.resume, config.out, config.run_name) if config.resume else None
