"""The loggers of a run: TensorBoard, a CSV file, Weights & Biases and MLflow; only rank 0 has them."""

import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData  # pyright: ignore[reportAttributeAccessIssue]
from torch.utils.tensorboard.summary import hparams

from cifar_zero.checkpoints import run_folder
from cifar_zero.checkpoints.finetuning import network
from cifar_zero.checkpoints.io import attempt, failure_of
from cifar_zero.config.flags import Config, flat
from cifar_zero.config.run import Run
from cifar_zero.core.errors import RunError, UsageError, short
from cifar_zero.models import IMAGE_SHAPE

PROJECT = "cifar-zero"  # W&B project, unless --wandb_project or WANDB_PROJECT names another, and MLflow experiment
TIMEOUT_S = 30.0  # time that W&B has to open a run; its default of 90 s is long for a server that cannot be reached

LAYOUT = {
    "Loss": {"loss in training and validation": ["Multiline", ["train/loss$", "val/loss$"]]},
    "Accuracy": {"accuracy in validation, and in the test at the end": ["Multiline", ["val/acc$", "test/acc$"]]},
    "Speed": {
        "images per second": ["Multiline", ["perf/images_per_second$"]],
        "milliseconds of a step, and of it waiting for data": [
            "Multiline",
            ["perf/step_time_ms$", "perf/data_time_ms$"],
        ],
    },
    "Memory": {"peak of the fullest rank, GB": ["Multiline", ["mem/peak_gb$"]]},
}
"""Charts of TensorBoard's Custom Scalars tab, by section and title: expressions that a curve's tag begins with."""

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
    names = [name for name in run.config.logger if name != "none"]
    return [guarded(chosen[name](run, run_dir)) for name in names if run_dir is not None]


def guarded(logger: Logger) -> Logger:
    """Returns the logger, of which an error of writing does not end the training; see `write_to`."""

    def guard(method: Callable[..., None]) -> Callable[..., None]:
        return lambda *arguments, **options: write_to(logger, lambda: method(*arguments, **options))

    for name in ("log_metrics", "save", "finalize"):  # what Lightning (2.6.6) calls during a run
        setattr(logger, name, guard(getattr(logger, name)))
    return logger


def write_to(logger: Any, write: Callable[[], Any]) -> None:
    """Runs what writes to a logger. Its first error is reported, and none ends the training."""
    if getattr(logger, "has_failed", False):
        failure_of(write)
    elif not attempt(write, f"what {type(logger).__name__} logs"):
        logger.has_failed = True


def _tensorboard(run: Run, run_dir: Path) -> Logger:
    logger = TensorBoardLogger(run_dir, name="", version="", default_hp_metric=False)
    logger.experiment.add_custom_scalars(LAYOUT)
    config = run.config
    if config.log_graph:
        # Of a whole copy on the CPU: Lightning's log_graph (2.6.6) would run the model after the strategy sharded it.
        net = network.build(config.model, run.num_classes, config.trainable, config.lora).eval()
        try:
            with warnings.catch_warnings(action="ignore"):  # of values that a trace makes constant
                side = config.data.image_size
                logger.experiment.add_graph(net, torch.zeros(1, IMAGE_SHAPE[0], side, side))
        except Exception as error:  # of any type: whatever the model's code raises
            raise UsageError(f"--log_graph: torch cannot trace --model {config.model.name}: {short(error)}") from error
    return logger


def show_result(
    logger: TensorBoardLogger, card: str, settings: Mapping[str, Any], results: Mapping[str, float]
) -> None:
    """Adds the end of a run to TensorBoard: a card of Markdown, and a row of the HPARAMS table. The table shows five of
    the settings at first. TensorBoard (2.21) takes those that `differ`, which torch's `hparams` never says; here the
    first five. It shows 4 as 4.0000, so whole numbers are text."""
    texts = {name: value if isinstance(value, float) else str(value) for name, value in settings.items()}
    columns, *row = hparams(texts, dict(results))
    plugin = columns.value[0].metadata.plugin_data
    content = HParamsPluginData.FromString(plugin.content)
    for column in content.experiment.hparam_infos[:5]:
        column.differs = True
    plugin.content = content.SerializeToString()
    for summary in (columns, *row):
        logger.experiment._get_file_writer().add_summary(summary)  # pyright: ignore[reportOptionalMemberAccess]
    logger.experiment.add_text("run", card)
    logger.experiment.flush()


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
    """Opens a W&B run in the run folder, with the folder's config.yaml as its configuration. Not by Lightning (2.6.6),
    which passes an option `anonymous` that W&B warns about. Raises UsageError: nobody is logged in and there is no
    terminal. Raises RunError: the server does not answer."""
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
