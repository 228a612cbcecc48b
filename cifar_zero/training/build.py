"""Builds Lightning's Trainer for a resolved run, with its callbacks and loggers."""

import inspect
import math
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning
from jsonargparse import ArgumentError, ArgumentParser
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from cifar_zero import models, strategies
from cifar_zero.checkpoints import run_folder
from cifar_zero.checkpoints.io import AtomicCheckpointIO
from cifar_zero.config.mistakes import OWNED, check_plain_type
from cifar_zero.config.run import Run
from cifar_zero.config.settings import Settings
from cifar_zero.core.errors import FaultFound, UsageError, short
from cifar_zero.core.plain_data import read_json
from cifar_zero.core.usage import nearest
from cifar_zero.launch import rank_environment
from cifar_zero.models import MixtureOptions
from cifar_zero.training import fast_loop, loggers
from cifar_zero.training.callbacks.averaging import Averaging, BatchNormStatistics
from cifar_zero.training.callbacks.checkpoint import LastCheckpoint, RunState
from cifar_zero.training.callbacks.cpu_kernels import CPUKernels
from cifar_zero.training.callbacks.curves import Experts, GradientLogger, TrainingCurves
from cifar_zero.training.callbacks.engine import EngineInfo
from cifar_zero.training.callbacks.figures import TestFigures
from cifar_zero.training.callbacks.monitors import Divergence, EarlyStop
from cifar_zero.training.callbacks.stop import Interrupt, keep_handlers
from cifar_zero.training.callbacks.throughput import ProgressLines, Throughput, training_flops
from stepcheck.lightning import StepCheck

LIGHTNING = Path(lightning.__file__).parent

OVERRIDABLE: dict[str, Any] = {"enable_model_summary": False, "num_sanity_val_steps": 0}
"""Options of Lightning's Trainer with the values that a run uses unless --trainer sets them. --trainer may set none of
OWNED."""

NOT_ZERO = ("check_val_every_n_epoch", "limit_train_batches", "val_check_interval")
"""Options of Lightning's Trainer whose numbers must be above 0."""


def trainer(run: Run, run_dir: Path | None, callbacks: Sequence[Callback] | None = None) -> Trainer:
    """Returns Lightning's Trainer for a run, with the loops of `fast_loop` and without Lightning's signal handlers.
    Raises UsageError if Lightning refuses an option of --trainer. See `trainer_options` for the arguments."""
    options = trainer_options(run, run_dir, callbacks)
    try:
        made = Trainer(**options)
    except Exception as error:  # Lightning raises several types, such as MisconfigurationException
        raise _refused(run, error) from error
    keep_handlers(made)
    fast_loop.install(made, run.placement.fast_loop)
    return made


def trainer_options(run: Run, run_dir: Path | None, callbacks: Sequence[Callback] | None = None) -> dict[str, Any]:
    """Returns all options of Lightning's Trainer for a run. Those of --trainer replace the others. No other function
    sets any.

    Args:
        run_dir: The run folder on rank 0, into which the callbacks and loggers write. None on the other ranks, and if
            nothing is to be written.
        callbacks: Replace all of the run's callbacks, unless None.
    """
    recipe, placement = run.recipe, run.placement
    precision = placement.precision
    if run.spec.family == "deepspeed" or (run.spec.casts and "mixed" in precision):
        precision = None  # DeepSpeed's strategies bring their own precision plugin, and fsdp2 one for mixed precision
    plugins: list[Any] = [AtomicCheckpointIO(run.consent.trust)]
    # LightningEnvironment reads torchrun's variables, which `set_torchrun_variables` sets for any launcher. Otherwise
    # Lightning (2.6.6) reads SLURM's variables, and in a job with one task each rank that `local_launcher` starts would
    # be rank 0 of 1.
    if not rank_environment.by_torchrun():
        plugins.append(LightningEnvironment())
    options = {
        **OVERRIDABLE,
        "accelerator": placement.accelerator,
        "devices": placement.devices,
        "num_nodes": placement.num_nodes,
        "strategy": strategies.build(run),
        "precision": precision,
        "max_epochs": recipe.epochs,
        "max_steps": recipe.max_steps,
        "accumulate_grad_batches": placement.accumulate,
        "gradient_clip_val": recipe.gradient_clip_val or None,
        "logger": loggers.loggers(run, run_dir),
        "callbacks": _callbacks(run, run_dir) if callbacks is None else [*callbacks],
        "default_root_dir": run_dir,
        "plugins": plugins,
        "use_distributed_sampler": False,  # the loaders shard by themselves
        "log_every_n_steps": run.output.log_interval,
        "enable_progress_bar": False,  # ProgressLines prints the same
    }
    if recipe.only_measures:
        steps = run.output.warmup_steps + recipe.bench_steps
        options |= {"max_epochs": -1, "max_steps": steps, "limit_val_batches": 0, "enable_checkpointing": False}
    return options | recipe.trainer


def check_audited(trainer: Trainer, run_dir: Path | None, starts: Sequence[Path]) -> None:
    """Raises FaultFound on rank 0 if a step that --audit or --check_steps has checked has a fault. If torchrun or SLURM
    has restarted the run, the verdicts on the steps before count too. `starts` are the run folders of all its starts.
    """
    callbacks: list[Any] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    for each in callbacks:
        if run_dir is None or not isinstance(each, StepCheck):
            continue
        if each.verdict.findings:
            raise FaultFound(f"{each.verdict.findings[0]} ({run_dir / run_folder.STEP_CHECK} has all faults)")
        for file in (start / run_folder.STEP_CHECK for start in starts):
            check = read_json(file, str(file)) if file.is_file() else {"outcome": "not judged"}
            if check["outcome"] == "different":
                raise FaultFound(f"{check['summary']} ({file} has all faults)")


def _callbacks(run: Run, run_dir: Path | None) -> list[Callback]:
    recipe = run.recipe
    made: list[Callback] = [BatchNormStatistics(), RunState()]
    if recipe.ema:
        made.append(Averaging(recipe.ema))
    curves = TrainingCurves(writes_losses=not recipe.only_measures)
    made += [curves, Divergence(curves), EngineInfo(), Interrupt()]
    if issubclass(models.MODELS[recipe.model.name], MixtureOptions):
        made.append(Experts())
    if run.output.log_gradients:
        made.append(GradientLogger())
    made += _user_callbacks(run.consent.callbacks)

    flops = training_flops(recipe, run.num_classes, run.micro_batch, run.data.image_size)
    # Throughput must come after the other callbacks. Otherwise it would count their work as waiting for data.
    throughput = Throughput(run, flops * run.placement.replicas * run.placement.accumulate)
    made += [throughput, ProgressLines(curves, throughput)]
    if run.on_cpu:
        made.append(CPUKernels(flops, run.placement.precision))
    if run.output.audit or run.output.check_steps:
        file = run_dir and run_dir / run_folder.STEP_CHECK
        made.append(StepCheck(count=run.output.check_steps, on_fault="warn", file=file))
    if recipe.only_measures:
        return made

    if run.output.test_figures:
        made.append(TestFigures())
    folder = run_dir and run_dir / run_folder.CHECKPOINTS  # rank 0 broadcasts its path to the other ranks
    last = folder and folder / run_folder.LAST
    made.append(LastCheckpoint(last, run.output.save_every_n_steps))
    mode = "max"
    if recipe.monitor.endswith(("loss", "error")):
        mode = "min"
    if run.data.val_fraction:
        name = "best-epoch{epoch:02d}-step{step:06d}"
        best = ModelCheckpoint(
            folder,
            name,
            recipe.monitor,
            mode=mode,
            save_top_k=run.output.save_top_k,
            auto_insert_metric_name=False,
            save_on_train_epoch_end=False,  # see EarlyStop
        )
        made.append(best)
    if recipe.early_stopping:
        made.append(EarlyStop(recipe.monitor, recipe.early_stopping, mode, recipe.loss))
    return made


def _user_callbacks(flags: tuple[str, ...]) -> list[Callback]:
    if not flags:
        return []
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--trainer.callbacks", type=list[Callback] | Callback)
    try:
        made = parser.instantiate_classes(parser.parse_args([*flags]))["trainer.callbacks"]
    except (ArgumentError, TypeError, ValueError) as error:
        raise UsageError(f"--trainer.callbacks: {' '.join(str(error).split())}") from error
    return made if isinstance(made, list) else [made]


def check_trainer_options(settings: Settings) -> None:
    """Raises UsageError if --trainer has an option that Lightning's Trainer lacks or that this project sets itself, a
    value of the wrong type, or a number that is negative, infinite or, for NOT_ZERO, 0. Only num_sanity_val_steps may
    be -1, for all batches."""
    options = inspect.signature(Trainer.__init__).parameters
    known = sorted(options.keys() - {"self", *OWNED})
    for name, value in settings.recipe.trainer.items():
        if name not in known:
            raise UsageError(f"--trainer.{name} is not an option of Lightning's Trainer: {nearest(name, known)}")
        check_plain_type(f"--trainer.{name}", value, options[name].annotation)
        least = -1 if name == "num_sanity_val_steps" else 0  # -1 stands for all batches
        if isinstance(value, (int, float)) and not least <= value < math.inf:
            raise UsageError(f"--trainer.{name} must be at least {least} and finite, not {value}")
        if name in NOT_ZERO and value == 0:
            raise UsageError(f"--trainer.{name} must be above 0, not {value}")


@contextmanager
def refusals(settings: Settings) -> Iterator[None]:
    """Context manager that turns an error that Lightning's own code raises within it into UsageError, if the run has
    options of --trainer. Some of these options cannot be checked before Lightning knows the number of batches."""
    try:
        yield
    except (MisconfigurationException, TypeError, ValueError) as error:
        by_lightning = LIGHTNING in Path(traceback.extract_tb(error.__traceback__)[-1].filename).parents
        if not by_lightning or not settings.recipe.trainer:
            raise
        raise _refused(settings, error) from error


def _refused(settings: Settings, error: Exception) -> UsageError:
    given = ", ".join(f"--trainer.{name}" for name in settings.recipe.trainer)
    return UsageError(f"Lightning's Trainer refuses {given or 'an option'}: {short(error, 300)}")
