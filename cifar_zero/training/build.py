"""Builds Lightning's objects of a resolved run: data module, module, trainer."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger, TensorBoardLogger

from cifar_zero import strategies
from cifar_zero.checkpoints.finetuning.load import Match
from cifar_zero.checkpoints.io import AtomicCheckpointIO
from cifar_zero.config.command_line import OWNED
from cifar_zero.config.flags import Config, SourceName
from cifar_zero.config.run import Run
from cifar_zero.core.errors import UsageError
from cifar_zero.core.usage import nearest
from cifar_zero.launch import rank_environment
from cifar_zero.training import fast_loop
from cifar_zero.training.callbacks.counts import parameter_count
from cifar_zero.training.callbacks.learning_rate_finder import FIND_LR_STEPS
from cifar_zero.training.run_callbacks import BENCH_WARMUP_STEPS, callbacks
from cifar_zero.training.wandb_logger import wandb_logger

Module = TypeVar("Module")
Datamodule = TypeVar("Datamodule")


def datamodule(make: Callable[..., Datamodule], config: Config, source: SourceName | None = None) -> Datamodule:
    """Returns the data module of a run.

    Args:
        make: the LightningDataModule's class, called as CIFARDataModule.
        config: of the run.
        source: of a resumed run's images, see `starting_point.check_resume`.
    """
    return make(
        replace(config.data, source=source or config.data.source),
        config.augment,
        batch_size=config.batch_size,
        accumulate=config.accumulate,
        seed=config.seed,
        channels_last=config.channels_last,
    )


def module(make: Callable[..., Module], run: Run, start: Match | None = None) -> Module:
    """Returns the LightningModule of a run.

    Args:
        make: its class, called as CIFARModule.
        run: to train or test.
        start: weights that it starts from.
    """
    config = run.config
    return make(
        config.model,
        config.optimizer,
        config.schedule,
        num_classes=run.num_classes,
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


def trainer(run: Run, run_dir: Path | None, figures: bool = True) -> Trainer:
    """Returns Lightning's Trainer for a run.

    Args:
        run: to train.
        run_dir: the run folder, on rank 0.
        figures: whether to draw the figures of the test.

    Raises:
        UsageError: Lightning refuses an option of --trainer.
    """
    config = run.config
    strategy = strategies.build(run, parameter_count(config.model, run.num_classes))
    # DeepSpeed's strategies bring their own precision plugin, and fsdp2 one for mixed precision.
    own = run.spec.family == "deepspeed" or (run.spec.casts and "mixed" in config.precision)
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
        "logger": _loggers(config, run_dir),
        "callbacks": callbacks(run, run_dir, figures),
        "default_root_dir": run_dir,
        "plugins": [AtomicCheckpointIO(run.consent.trust, config.save_weights), *environment()],
        "use_distributed_sampler": False,  # the loaders shard by themselves
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
    except Exception as error:  # of several types, such as MisconfigurationException
        raise UsageError(f"Lightning's Trainer refuses an option of --trainer: {error}") from error
    fast_loop.install(made, config.fast_loop)
    return made


def environment() -> list[ClusterEnvironment]:
    """Makes Lightning read the ranks from torchrun's variables, which `rank_environment.adopt` sets for any launcher.

    Otherwise Lightning (2.6.6) reads SLURM's in every SLURM job: in a job with one task, all ranks that this program
    starts would be rank 0 of 1.
    """
    return [] if rank_environment.by_torchrun() else [LightningEnvironment()]


def check_trainer_options(config: Config) -> None:
    """Refuses options of --trainer that Lightning's Trainer does not know.

    Raises:
        UsageError: names the nearest option.
    """
    known = set(inspect.signature(Trainer.__init__).parameters) - {"self", *OWNED}
    for name in config.trainer:
        if name not in known:
            raise UsageError(
                f"--trainer.{name} is not an option of Lightning's Trainer: {nearest(name, sorted(known))}"
            )


def _loggers(config: Config, run_dir: Path | None) -> list[Logger]:
    """Returns the loggers, which only rank 0 has."""
    if run_dir is None:
        return []
    made: list[Logger] = []
    if "tensorboard" in config.logger:
        version, name = run_dir.name, run_dir.parent.name
        made.append(TensorBoardLogger(config.out, name=name, version=version, default_hp_metric=False))
    if "wandb" in config.logger:
        made.append(wandb_logger(run_dir))
    return made
