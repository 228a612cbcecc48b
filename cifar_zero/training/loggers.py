"""The loggers of a run: TensorBoard, a CSV file and Weights & Biases; only rank 0 has them."""

import os
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger

from cifar_zero.checkpoints import run_folder
from cifar_zero.checkpoints.finetuning import network
from cifar_zero.checkpoints.io import attempt, failure_of
from cifar_zero.config.run import Run
from cifar_zero.config.settings import Settings
from cifar_zero.core.errors import RunError, UsageError, short
from cifar_zero.models import IMAGE_SHAPE

PROJECT = "cifar-zero"  # W&B project, unless --wandb_project or WANDB_PROJECT names another
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
    made: list[Logger] = []
    if run_dir is None:
        return made
    for name in run.output.logger:
        if name == "tensorboard":
            made.append(_tensorboard(run, run_dir))
        elif name == "csv":
            made.append(CSVLogger(run_dir, name="csv", version="", flush_logs_every_n_steps=1))
        elif name == "wandb":
            made.append(wandb_logger(run, run_dir))
    for logger in made:
        guard(logger)
    return made


def guard(logger: Logger) -> None:
    """Keeps an error of a logger that cannot write from ending the training; see `write_to`."""

    def guarded(method: Callable[..., None]) -> Callable[..., None]:
        return lambda *arguments, **options: write_to(logger, partial(method, *arguments, **options))

    for name in ("log_metrics", "save", "finalize"):  # what Lightning (2.6.6) calls during a run
        setattr(logger, name, guarded(getattr(logger, name)))


def write_to(logger: Any, write: Callable[[], Any]) -> None:
    """Runs what writes to a logger. Its first error is reported, and none ends the training."""
    if getattr(logger, "has_failed", False):
        failure_of(write)
    elif not attempt(write, f"what {type(logger).__name__} logs"):
        logger.has_failed = True


def _tensorboard(run: Run, run_dir: Path) -> Logger:
    logger = TensorBoardLogger(run_dir, name="", version="", default_hp_metric=False)
    logger.experiment.add_custom_scalars(LAYOUT)
    if run.output.log_graph:
        # Of a whole copy on the CPU: Lightning's log_graph (2.6.6) would run the model after the strategy sharded it.
        net = network.build(run.recipe.model, run.num_classes, run.recipe.trainable, run.recipe.lora).eval()
        try:
            with warnings.catch_warnings(action="ignore"):  # of values that a trace makes constant
                side = run.data.image_size
                logger.experiment.add_graph(net, torch.zeros(1, IMAGE_SHAPE[0], side, side))
        except Exception as error:  # of any type: whatever the model's code raises
            raise UsageError(
                f"--log_graph: torch cannot trace --model {run.recipe.model.name}: {short(error)}"
            ) from error
    return logger


def show_result(
    logger: TensorBoardLogger, card: str, settings: Mapping[str, Any], results: Mapping[str, float], step: int
) -> None:
    """Adds the end of a run to TensorBoard: a card of Markdown, the results as points at `step`, and a row of the
    HPARAMS table, which shows 4 as 4.0000, so whole numbers are text."""
    texts = {name: value if isinstance(value, float) else str(value) for name, value in settings.items()}
    logger.log_hyperparams(texts, dict(results), step)
    logger.experiment.add_text("run", card)
    logger.experiment.flush()


def wandb_logger(settings: Settings, run_dir: Path) -> WandbLogger:
    """Opens a W&B run in the run folder, with the folder's config.yaml as its configuration. Not by Lightning (2.6.6),
    which passes an option `anonymous` that W&B warns about. Raises UsageError: nobody is logged in and there is no
    terminal. Raises RunError: the server does not answer."""
    import wandb
    from wandb.errors import AuthenticationError
    from wandb.errors import UsageError as WandbUsageError

    try:
        run = wandb.init(
            project=settings.output.wandb_project or os.environ.get("WANDB_PROJECT", PROJECT),
            name=settings.output.wandb_run_name or run_dir.parent.name,
            group=settings.output.wandb_group or None,
            tags=settings.output.wandb_tags or None,
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
