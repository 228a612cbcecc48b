"""Builds Lightning's Trainer of a resolved run, with its callbacks and loggers."""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from cifar_zero import models, strategies
from cifar_zero.checkpoints import run_folder
from cifar_zero.checkpoints.io import AtomicCheckpointIO
from cifar_zero.config.flags import Config
from cifar_zero.config.run import Run
from cifar_zero.config.suggestions import OWNED
from cifar_zero.core.errors import UsageError
from cifar_zero.core.usage import nearest
from cifar_zero.launch import rank_environment
from cifar_zero.models.mixture_options import MixtureOptions
from cifar_zero.training import fast_loop, loggers
from cifar_zero.training.callbacks.averaging import Averaging, BatchNormStatistics
from cifar_zero.training.callbacks.checkpoint import LastCheckpoint, Resume
from cifar_zero.training.callbacks.cpu_kernels import CPUKernels
from cifar_zero.training.callbacks.curves import Layers, TrainingCurves
from cifar_zero.training.callbacks.divergence import Divergence
from cifar_zero.training.callbacks.experts import Experts
from cifar_zero.training.callbacks.figures import TestFigures
from cifar_zero.training.callbacks.flops import training_flops
from cifar_zero.training.callbacks.heartbeat import Heartbeat
from cifar_zero.training.callbacks.learning_rate import FIND_LR_STEPS, LearningRateFinder, ReduceOnPlateau
from cifar_zero.training.callbacks.memory import Memory
from cifar_zero.training.callbacks.progress import Progress
from cifar_zero.training.callbacks.stop import EarlyStop, Interrupt, keep_handlers
from cifar_zero.training.callbacks.summary import Effective
from cifar_zero.training.callbacks.throughput import Throughput


def trainer(run: Run, run_dir: Path | None, callbacks: Sequence[Callback] | None = None, elements: int = 0) -> Trainer:
    """Returns Lightning's Trainer for a run, whose callbacks write into `run_dir` on rank 0; or with other callbacks,
    or for another model of so many elements. Raises UsageError: Lightning refuses an option of --trainer."""
    config = run.config
    strategy = strategies.build(run, elements)
    # DeepSpeed's strategies bring their own precision plugin, and fsdp2 one for mixed precision.
    own = run.spec.family == "deepspeed" or (run.spec.casts and "mixed" in config.precision)
    # From torchrun's variables, which `rank_environment.adopt` sets for any launcher. Otherwise Lightning (2.6.6) reads
    # SLURM's: in a job with one task, our own ranks would all be rank 0 of 1.
    environment = [] if rank_environment.by_torchrun() else [LightningEnvironment()]
    options: dict[str, Any] = {
        "accelerator": config.accelerator,
        "devices": config.devices,
        "num_nodes": config.num_nodes,
        "strategy": strategy,
        "precision": None if own else config.precision,
        "max_epochs": config.epochs,
        "max_steps": config.max_steps,
        "accumulate_grad_batches": config.accumulate,
        "gradient_clip_val": config.gradient_clip_val or None,
        "logger": loggers.loggers(run, run_dir),
        "callbacks": _callbacks(run, run_dir) if callbacks is None else [*callbacks],
        "default_root_dir": run_dir,
        "plugins": [AtomicCheckpointIO(run.consent.trust, config.save_weights), *environment],
        "use_distributed_sampler": False,  # the loaders shard by themselves
        "log_every_n_steps": config.log_interval,
        "enable_model_summary": False,
        "enable_progress_bar": False,  # callbacks/progress.py has its own
        "num_sanity_val_steps": 0,
    }
    if config.only_measures:
        steps = config.warmup_steps + config.bench_steps
        if config.find_lr:
            steps = FIND_LR_STEPS if config.max_steps == -1 else config.max_steps
        options |= {"max_epochs": -1, "max_steps": steps, "limit_val_batches": 0, "enable_checkpointing": False}
    try:
        made = Trainer(**{**options, **config.trainer})
    except Exception as error:  # of several types, such as MisconfigurationException
        raise UsageError(f"Lightning's Trainer refuses an option of --trainer: {error}") from error
    keep_handlers(made)
    fast_loop.install(made, config.fast_loop, config.compile == "step", config.cuda_graphs)
    return made


def _callbacks(run: Run, run_dir: Path | None) -> list[Callback]:
    """Returns the callbacks of a run. Raises UsageError: one of --trainer.callbacks cannot be made."""
    config = run.config
    curves = TrainingCurves(writes_losses=not config.only_measures)
    progress = Progress(config.batch_size, curves)
    counted = config.model, run.num_classes, run.micro_batch, config.trainable, config.lora, config.data.image_size
    flops = training_flops(*counted)
    recomputed = training_flops(*counted, True) - flops if config.activation_checkpointing else 0
    micro_batches = run.replicas * config.accumulate
    mixtures = issubclass(models.MODELS[config.model.name], MixtureOptions)
    made: list[Callback] = [
        Heartbeat(config.compile == "step"),
        BatchNormStatistics(),
        curves,
        LearningRateFinder() if config.find_lr else Divergence(curves),
        *([Experts()] if mixtures else []),
        *([Layers(config)] if config.log_gradients or config.log_weights else []),
        *([ReduceOnPlateau(config.reduce_on_plateau)] if config.reduce_on_plateau else []),
        Memory(),
        Effective(),
        progress,
        Interrupt(),
        Resume(),
        *([Averaging(config.ema, config.swa_from)] if config.ema or config.swa_from else []),
        *_given(run.consent.callbacks),
        # After the others: it would count their work as waiting.
        Throughput(config, flops * micro_batches, recomputed * micro_batches, progress.line),
    ]
    if run.on_cpu:
        made.append(CPUKernels(flops, config.precision))
    if not config.only_measures:
        made += [*([TestFigures()] if config.test_figures else []), *_checkpoints(config, run_dir)]
        made += [EarlyStop(config.early_stopping, **_monitored(config))] if config.early_stopping else []
    return made


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
    """Returns what writes the last checkpoint, and the best by --monitor if there are validation images. Rank 0's
    directory is broadcast to the others."""
    folder = run_dir / run_folder.CHECKPOINTS if run_dir is not None else None
    last = folder / "last.ckpt" if folder is not None else None
    saved: list[Callback] = [LastCheckpoint(last, config.save_every_n_steps, config.save_every_minutes)]
    if config.data.val_fraction:
        kept = {"save_top_k": config.save_top_k, "auto_insert_metric_name": False}
        saved.append(ModelCheckpoint(folder, "best-epoch{epoch:02d}-step{step:06d}", **_monitored(config), **kept))
    return saved


def _monitored(config: Config) -> dict[str, str]:
    """Returns Lightning's arguments for the metric that says which validation is the best."""
    return {"monitor": config.monitor, "mode": "min" if config.monitor.endswith(("loss", "error")) else "max"}


def check_trainer_options(config: Config) -> None:
    """Raises UsageError for options of --trainer that Lightning's Trainer does not know; it names the nearest one."""
    known = sorted(set(inspect.signature(Trainer.__init__).parameters) - {"self", *OWNED})
    for name in config.trainer:
        if name not in known:
            raise UsageError(f"--trainer.{name} is not an option of Lightning's Trainer: {nearest(name, known)}")


def run_steps(config: Config, datamodule: Any) -> int:
    """Returns the optimizer steps of a run that is not started: of all epochs, or --max_steps; as Lightning counts
    them (`Trainer.estimated_stepping_batches`). Decodes the images if that has not been done, to learn their number.
    """
    datamodule.setup()
    batches = len(datamodule.train_dataloader())
    limit = config.trainer.get("overfit_batches") or config.trainer.get("limit_train_batches", 1.0)
    batches = int(batches * limit) if isinstance(limit, float) else min(batches, limit)
    steps = config.epochs * -(-batches // config.accumulate)
    return steps if config.max_steps == -1 else min(steps, config.max_steps)
