"""The callbacks of a run, the same on every rank."""

from pathlib import Path
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from cifar_zero import models
from cifar_zero.checkpoints import run_folder
from cifar_zero.config.flags import Config
from cifar_zero.config.run import Run
from cifar_zero.core.errors import UsageError
from cifar_zero.models.mixture_options import MixtureOptions
from cifar_zero.training.callbacks.averaging import Averaging
from cifar_zero.training.callbacks.batch_norm import BatchNormStatistics
from cifar_zero.training.callbacks.counts import training_flops
from cifar_zero.training.callbacks.cpu_kernels import CPUKernels
from cifar_zero.training.callbacks.curves import TrainingCurves
from cifar_zero.training.callbacks.divergence import Divergence
from cifar_zero.training.callbacks.early_stop import EarlyStop
from cifar_zero.training.callbacks.effective import Effective
from cifar_zero.training.callbacks.experts import Experts
from cifar_zero.training.callbacks.figures import TestFigures
from cifar_zero.training.callbacks.heartbeat import Heartbeat
from cifar_zero.training.callbacks.interrupt import Interrupt
from cifar_zero.training.callbacks.last_checkpoint import LastCheckpoint
from cifar_zero.training.callbacks.learning_rate_finder import LearningRateFinder
from cifar_zero.training.callbacks.memory import Memory
from cifar_zero.training.callbacks.progress import Progress
from cifar_zero.training.callbacks.resume import Resume
from cifar_zero.training.callbacks.throughput import Throughput

WARMUP_STEPS = 10
"""Optimizer steps that are not timed."""

BENCH_WARMUP_STEPS = 20
"""Steps before the timed ones of --bench_steps, for allocation, autotuning and the page cache."""


def callbacks(run: Run, run_dir: Path | None, figures: bool) -> list[Callback]:
    """Returns the callbacks of a run.

    Args:
        run: to train.
        run_dir: the run folder, on rank 0.
        figures: whether to draw the figures of the test.

    Raises:
        UsageError: one of --trainer.callbacks cannot be made.
    """
    config = run.config
    curves = TrainingCurves(config.log_interval, None if config.only_measures else run_dir)
    warmup = BENCH_WARMUP_STEPS if config.bench_steps else WARMUP_STEPS
    model_and_batch = config.model, run.num_classes, run.micro_batch, config.trainable, config.lora
    flops = training_flops(*model_and_batch)
    recomputed = training_flops(*model_and_batch, True) - flops if config.activation_checkpointing else 0
    micro_batches = run.replicas * config.accumulate
    mixtures = issubclass(models.MODELS[config.model.name], MixtureOptions)
    made: list[Callback] = [
        Heartbeat(),
        BatchNormStatistics(),
        curves,
        LearningRateFinder(run_dir) if config.find_lr else Divergence(curves, run_dir),
        *([Experts(config.log_interval, run_dir)] if mixtures else []),
        Memory(config.log_interval),
        Effective(run_dir),
        Progress(config, curves),
        Interrupt(),
        Resume(config),
        *([Averaging(config.ema, config.swa_from)] if config.ema or config.swa_from else []),
        *_given(run.consent.callbacks),
        # After the others: it would count their work as waiting.
        Throughput(config, flops * micro_batches, warmup, recomputed * micro_batches),
    ]
    if run.on_cpu:
        made.append(CPUKernels(flops, config.precision))
    if not config.only_measures:
        made += [*([TestFigures(run_dir)] if figures else []), *_checkpoints(config, run_dir)]
        made += [EarlyStop(config.early_stopping)] if config.early_stopping else []
    return made


def stopped_by(trainer: Trainer) -> int | None:
    """Returns the signal that ended the training, which has then been saved; None if none did."""
    observers: list[Any] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    return next((callback.signal for callback in observers if isinstance(callback, Interrupt)), None)


def _given(flags: tuple[str, ...]) -> list[Callback]:
    """Returns the user's own callbacks, which --trainer.callbacks names by class path as LightningCLI does."""
    if not flags:
        return []
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--trainer.callbacks", type=list[Callback] | Callback)
    try:
        made = parser.instantiate_classes(parser.parse_args([*flags]))["trainer.callbacks"]
    except (ArgumentError, TypeError, ValueError) as error:
        raise UsageError(f"--trainer.callbacks: {' '.join(str(error).split())}") from error
    return made if isinstance(made, list) else [made]


def _checkpoints(config: Config, run_dir: Path | None) -> list[Callback]:
    """Returns what writes the last checkpoint, the best by val/acc if there are validation images, and the newest by
    steps on request. Rank 0's directory is broadcast to the others."""
    folder = run_dir / run_folder.CHECKPOINTS if run_dir is not None else None
    name = "epoch{epoch:02d}-step{step:06d}"
    last = folder / "last.ckpt" if folder is not None else None
    saved: list[Callback] = [LastCheckpoint(last, config.save_every_minutes)]
    if config.data.val_fraction:
        best = f"best-{name}"
        saved.append(ModelCheckpoint(folder, best, monitor="val/acc", mode="max", auto_insert_metric_name=False))
    if config.save_every_n_steps:
        every = config.save_every_n_steps
        saved.append(ModelCheckpoint(folder, name, every_n_train_steps=every, auto_insert_metric_name=False))
    return saved
