"""From a settled configuration to Lightning's objects: data module, module, trainer."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger, TensorBoardLogger

from cifar_zero import data, models, strategies
from cifar_zero.checkpoints import run_folder
from cifar_zero.checkpoints.finetuning.delta import together
from cifar_zero.checkpoints.finetuning.freeze import check_patterns
from cifar_zero.checkpoints.finetuning.load import Match, match, read_plain
from cifar_zero.checkpoints.finetuning.network import on_meta
from cifar_zero.checkpoints.io import AtomicCheckpointIO
from cifar_zero.checkpoints.read import RECORD, read
from cifar_zero.checkpoints.resume import check_same_run, source_of
from cifar_zero.checkpoints.weights import check_fits, network, plain_network
from cifar_zero.config.batch import micro_batch_size
from cifar_zero.config.command_line import OWNED
from cifar_zero.config.flags import Config, SourceName
from cifar_zero.config.strategy_specs import replicas
from cifar_zero.core.errors import UsageError
from cifar_zero.core.suggestions import nearest
from cifar_zero.launch import rank_environment
from cifar_zero.launch.collectives import by_rank_0
from cifar_zero.models.mixture_options import MixtureOptions
from cifar_zero.training import fast_loop
from cifar_zero.training.callbacks.averaging import Averaging
from cifar_zero.training.callbacks.batch_norm import BatchNormStatistics
from cifar_zero.training.callbacks.counts import parameter_count, training_flops
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
from cifar_zero.training.callbacks.learning_rate_finder import FIND_LR_STEPS, LearningRateFinder
from cifar_zero.training.callbacks.memory import Memory
from cifar_zero.training.callbacks.progress import Progress
from cifar_zero.training.callbacks.resume import Resume
from cifar_zero.training.callbacks.throughput import Throughput
from cifar_zero.training.wandb_logger import wandb_logger

Module = TypeVar("Module")
Datamodule = TypeVar("Datamodule")

WARMUP_STEPS = 10
"""Optimizer steps that the throughput figures leave out."""

BENCH_WARMUP_STEPS = 20
"""Steps before the timed ones of --bench_steps: allocation, autotuning and the page cache settle in them."""


def datamodule(make: Callable[..., Datamodule], config: Config, source: SourceName | None = None) -> Datamodule:
    """Returns the images of a run, in batches of this rank.

    Args:
        make: the LightningDataModule's class, called as CIFARDataModule.
        config: of the run.
        source: of the images of a resumed run, see `check_resume`.
    """
    return make(
        replace(config.data, source=source or config.data.source),
        config.augment,
        batch_size=config.batch_size,
        accumulate=config.accumulate,
        seed=config.seed,
        channels_last=config.channels_last,
    )


def module(make: Callable[..., Module], config: Config, start: Match | None = None) -> Module:
    """Returns the LightningModule of a run; the strategy builds its model.

    Args:
        make: its class, called as CIFARModule.
        config: of the run.
        start: weights that it starts from.
    """
    return make(
        config.model,
        config.optimizer,
        config.schedule,
        num_classes=num_classes(config),
        seed=config.seed,
        compile=config.compile,
        cuda_graphs=config.cuda_graphs,
        skip_nan=config.on_nan == "skip" and not config.find_lr,
        label_smoothing=config.label_smoothing,
        activation_checkpointing=config.activation_checkpointing,
        activation_offload=config.activation_offload,
        init=config.init,
        trainable=config.trainable,
        lora=config.lora,
        channels_last=config.channels_last,
        tta=config.tta,
        weights=start.loaded if start else None,
    )


def check_resume(config: Config) -> SourceName | None:
    """Refuses a checkpoint that cannot be continued, before anything is made of the run. Each rank must call it.

    Rank 0 alone compares the checksums, and reads names and shapes without the tensors' values.

    Returns:
        The source of its images; None for a run that begins.

    Raises:
        UsageError: it is damaged, of another network or other images, or cannot be trusted.
    """

    def source() -> SourceName | None:
        net = on_meta(config.model, num_classes(config), config.trainable, config.lora)
        checkpoint = read(Path(config.resume), config.trust, device="meta")
        check_fits(net, network(checkpoint), config.resume)
        if RECORD in checkpoint:
            check_same_run(config, checkpoint[RECORD]["config"])
            return source_of(config, checkpoint[RECORD])
        return None

    return by_rank_0(source) if config.resume else None


def finetuning(config: Config) -> Match | None:
    """The weights to start from, None for fresh ones; before anything is made of the run.

    Raises:
        UsageError: they are damaged or of another network, or --trainable or --lora.target names nothing.
    """
    net = on_meta(config.model, num_classes(config), config.trainable, config.lora)
    check_patterns(net, config.trainable, config.model.options.get("ep_size", 1))
    if not config.weights or config.resume:  # a run that goes on has its own
        return None
    file = Path(config.weights)
    if config.delta:
        weights = plain_network(together(file, Path(config.delta), config.trust))
    else:
        weights = read_plain(file, config.trust)
    return match(on_meta(config.model, num_classes(config)), weights, config.weights)


def trainer(config: Config, run_dir: Path | None, figures: bool = True) -> Trainer:
    """Lightning's Trainer for a run.

    Args:
        config: of the run, settled.
        run_dir: the run folder, on rank 0; None on the others, which write nothing by themselves.
        figures: whether the test's are drawn.
    """
    on_cpu = config.accelerator == "cpu"
    strategy = strategies.build(config, on_cpu, micro_batch(config), parameter_count(config.model, num_classes(config)))
    # Under DeepSpeed the strategy brings its own precision, under fsdp2 its own mixed one.
    own = hasattr(strategy, "config") or getattr(strategy, "casts", False)
    precision = {} if own else {"precision": config.precision}
    options: dict[str, Any] = {
        "accelerator": config.accelerator,
        "devices": config.devices,
        "num_nodes": config.num_nodes,
        "strategy": strategy,
        **precision,
        "max_epochs": config.epochs,
        "max_steps": config.max_steps,
        "accumulate_grad_batches": config.accumulate,
        "gradient_clip_val": config.gradient_clip_val or None,
        "logger": loggers(config, run_dir),
        "callbacks": callbacks(config, run_dir, figures),
        "default_root_dir": run_dir,
        "plugins": [AtomicCheckpointIO(config.trust, config.save_weights), *environment()],
        "use_distributed_sampler": False,  # the loaders shard by themselves, whatever the strategy
        "log_every_n_steps": config.log_interval,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    if config.only_measures:
        steps = BENCH_WARMUP_STEPS + config.bench_steps
        if config.find_lr:
            steps = FIND_LR_STEPS if config.max_steps == -1 else config.max_steps
        options |= {"max_epochs": -1, "max_steps": steps, "limit_val_batches": 0, "enable_checkpointing": False}
    try:
        made = Trainer(**{**options, **config.trainer})
    except Exception as error:  # Lightning has several for this, MisconfigurationException among them
        raise UsageError(f"Lightning's Trainer refuses an option of --trainer: {error}") from error
    fast_loop.install(made)
    return made


def environment() -> list[ClusterEnvironment]:
    """Has Lightning read the ranks from torchrun's variables, which `rank_environment.adopt` sets under any launcher.

    By itself (2.6.6) it would take SLURM's wherever there are any: in a job with one task, ranks that this program has
    started there would all be rank 0 of 1.
    """
    return [] if rank_environment.by_torchrun() else [LightningEnvironment()]


def check_trainer_options(config: Config) -> None:
    """Refuses what Lightning's Trainer does not know.

    Raises:
        UsageError: names the nearest option.
    """
    known = set(inspect.signature(Trainer.__init__).parameters) - {"self", *OWNED}
    for name in config.trainer:
        if name not in known:
            raise UsageError(f"--trainer.{name} is no option of Lightning's Trainer: {nearest(name, sorted(known))}")


def loggers(config: Config, run_dir: Path | None) -> list[Logger]:
    """Where rank 0 writes its curves; nothing on the other ranks."""
    if run_dir is None:
        return []
    made: list[Logger] = []
    if "tensorboard" in config.logger:
        version, name = run_dir.name, run_dir.parent.name
        made.append(TensorBoardLogger(config.out, name=name, version=version, default_hp_metric=False))
    if "wandb" in config.logger:
        made.append(wandb_logger(run_dir))
    return made


def callbacks(config: Config, run_dir: Path | None, figures: bool) -> list[Callback]:
    """The observers of a run, the same on every rank."""
    curves = TrainingCurves(config.log_interval, None if config.only_measures else run_dir)
    warmup = BENCH_WARMUP_STEPS if config.bench_steps else WARMUP_STEPS
    network_and_batch = config.model, num_classes(config), micro_batch(config), config.trainable, config.lora
    flops = training_flops(*network_and_batch)
    recomputed = training_flops(*network_and_batch, True) - flops if config.activation_checkpointing else 0
    micro_batches = replicas(config) * config.accumulate
    mixtures = issubclass(models.MODELS[config.model.name], MixtureOptions)
    observers: list[Callback] = [
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
        # After the others, whose work it would take for waiting.
        Throughput(config, flops * micro_batches, warmup, recomputed * micro_batches),
    ]
    if config.accelerator == "cpu":
        observers.append(CPUKernels(flops, config.precision))
    if not config.only_measures:
        observers += [*([TestFigures(run_dir)] if figures else []), *checkpoints(config, run_dir)]
        observers += [EarlyStop(config.early_stopping)] if config.early_stopping else []
    return observers


def stopped_by(trainer: Trainer) -> int | None:
    """The signal that ended the training, which has then been saved."""
    callbacks: list[Any] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    return next((callback.signal for callback in callbacks if isinstance(callback, Interrupt)), None)


def checkpoints(config: Config, run_dir: Path | None) -> list[Callback]:
    """The last checkpoint, the best by val/acc where there is a validation split, and the newest by steps on request.

    Rank 0's directory is broadcast to the others.
    """
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


def num_classes(config: Config) -> int:
    """Width of the network's output."""
    return len(data.class_names(config.data))


def micro_batch(config: Config) -> int:
    """Images per rank and micro-batch."""
    return micro_batch_size(config.batch_size, replicas(config), config.accumulate)
