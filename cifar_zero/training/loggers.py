"""The loggers of a run: TensorBoard, a CSV file, Weights & Biases and MLflow; only rank 0 has them."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import yaml
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger

from cifar_zero.checkpoints import run_folder
from cifar_zero.checkpoints.finetuning import network
from cifar_zero.config.flags import Config, flat
from cifar_zero.config.run import Run
from cifar_zero.core.errors import RunError, UsageError, short
from cifar_zero.models import IMAGE_SHAPE

PROJECT = "cifar-zero"
"""W&B project, unless --wandb_project or WANDB_PROJECT names another, and MLflow experiment."""

TIMEOUT_S = 30.0
"""Time that W&B has to open a run; its default of 90 s is long for a server that cannot be reached."""

OFFLINE = "WANDB_MODE=offline keeps the run on this machine"


def loggers(run: Run, run_dir: Path | None) -> list[Logger]:
    """Returns the loggers of --logger; none without a run folder. Raises UsageError, RunError: one cannot be opened, or
    torch cannot trace the model for --log_graph."""
    chosen: dict[str, Callable[[Run, Path], Logger]] = {
        "tensorboard": _tensorboard,
        "csv": lambda run, folder: CSVLogger(folder, name="csv", version="", flush_logs_every_n_steps=1),
        "wandb": lambda run, folder: wandb_logger(run.config, folder),
        "mlflow": _mlflow,
    }
    return [chosen[name](run, run_dir) for name in run.config.logger if name != "none" and run_dir is not None]


def _tensorboard(run: Run, run_dir: Path) -> Logger:
    logger = TensorBoardLogger(run_dir, name="", version="", default_hp_metric=False)
    config = run.config
    if config.log_graph:
        # Of a whole copy on the CPU: Lightning's log_graph (2.6.6) would run the model after the strategy sharded it.
        net = network.build(config.model, run.num_classes, config.trainable, config.lora).eval()
        try:
            with warnings.catch_warnings(action="ignore"):  # of values that a trace makes constant
                logger.experiment.add_graph(
                    net, torch.zeros(1, IMAGE_SHAPE[0], config.data.image_size, config.data.image_size)
                )
        except Exception as error:  # of any type: whatever the model's code raises
            raise UsageError(f"--log_graph: torch cannot trace --model {config.model.name}: {short(error)}") from error
    return logger


def _mlflow(run: Run, run_dir: Path) -> Logger:
    """Opens a run in MLflow, in MLFLOW_TRACKING_URI or a database that all runs of --out share."""
    uri, out = os.environ.get("MLFLOW_TRACKING_URI"), run_dir.parent.parent.absolute()
    artifacts = None if uri else f"{out}/mlruns"
    try:
        name = run_dir.parent.name
        logger = MLFlowLogger(PROJECT, name, uri or f"sqlite:///{out}/mlflow.db", artifact_location=artifacts)
        logger.log_hyperparams(flat(run.config))
    except Exception as error:  # MLflow's own and the database's
        raise RunError(f"--logger mlflow: {short(error)}") from error
    return logger


def wandb_logger(config: Config, run_dir: Path) -> WandbLogger:
    """Opens a W&B run in the run folder, with the folder's config.yaml as its configuration.

    Not by Lightning (2.6.6), which passes an option `anonymous` that W&B warns about. Raises UsageError: nobody is
    logged in and there is no terminal. Raises RunError: the server does not answer.
    """
    import wandb
    from wandb.errors import AuthenticationError
    from wandb.errors import UsageError as WandbUsageError

    try:
        run = wandb.init(
            project=config.wandb_project or os.environ.get("WANDB_PROJECT", PROJECT),
            name=config.wandb_run_name or run_dir.parent.name,
            group=config.wandb_group or None,
            tags=config.wandb_tags or None,
            dir=run_dir,
            config=yaml.safe_load((run_dir / run_folder.CONFIG).read_text()),
            settings=wandb.Settings(init_timeout=TIMEOUT_S),
        )
    except (AuthenticationError, WandbUsageError) as error:
        reason = str(error).rstrip(".")
        raise UsageError(f"--logger wandb: {reason}; without an account {OFFLINE}") from error
    except wandb.Error as error:
        reason = str(error).splitlines()[0]
        raise RunError(f"--logger wandb: {reason}; {OFFLINE} for `wandb sync`") from error
    # As Lightning does: curves over optimizer steps.
    run.define_metric("trainer/global_step")
    run.define_metric("*", step_metric="trainer/global_step", step_sync=True)
    return WandbLogger(experiment=run, save_dir=run_dir)
