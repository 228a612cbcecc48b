"""Creates the loggers that --logger selects, and adds the results of a run to them at its end."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger

from cifar_zero.checkpoints import run_folder
from cifar_zero.config.run import Run
from cifar_zero.config.settings import Settings
from cifar_zero.core.atomic import attempt, failure_of
from cifar_zero.core.errors import UsageError

LAYOUT = {
    "Loss": {"loss in training and validation": ["Multiline", ["train/loss$", "val/loss$"]]},
    "Accuracy": {"accuracy in validation, and in the test at the end": ["Multiline", ["val/acc$", "test/acc$"]]},
    "Speed": {
        "images per second": ["Multiline", ["perf/images_per_second$"]],
        "milliseconds per step, in total and waiting for data": [
            "Multiline",
            ["perf/step_time_ms$", "perf/data_time_ms$"],
        ],
    },
    "Memory": {"peak of the fullest rank, GB": ["Multiline", ["mem/peak_gb$"]]},
}
"""The charts in TensorBoard's Custom Scalars tab, keyed by section and title. Each chart shows the curves whose tags
match one of its regular expressions, from the beginning of the tag."""

SETTINGS = ("strategy", "world_size", "batch_size", "model", "accumulate", "precision", "dataset", "seed")
RESULTS = ("test/acc", "val/acc", "test/loss", "perf/images_per_second")
"""SETTINGS and RESULTS are the keys of metrics.json whose values appear in TensorBoard's HPARAMS table."""


def loggers(run: Run, run_dir: Path | None) -> list[Logger]:
    """Creates and returns the loggers that --logger selects. An error while they write does not end the run (see
    `write_to`). Without a run folder, as on all ranks but rank 0, returns an empty list. Raises UsageError if W&B has
    no login or its server does not answer."""
    made: list[Logger] = []
    if run_dir is None:
        return made
    for name in run.output.logger:
        if name == "tensorboard":
            logger = TensorBoardLogger(run_dir, name="", version="", default_hp_metric=False)
            logger.experiment.add_custom_scalars(LAYOUT)
            made.append(logger)
        elif name == "csv":
            made.append(CSVLogger(run_dir, name="csv", version="", flush_logs_every_n_steps=1))
        elif name == "wandb":
            made.append(_wandb(run, run_dir))
    for logger in made:
        for name in ("log_metrics", "save", "finalize"):  # what Lightning (2.6.6) calls during a run
            setattr(logger, name, partial(write_to, logger, getattr(logger, name)))
    return made


def write_to(logger: Any, write: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    """Calls `write`, which writes to `logger`, with `arguments` and `options`. Raises no error, and prints only the
    first one of each logger."""
    write_once = partial(write, *arguments, **options)
    if getattr(logger, "has_failed", False):
        failure_of(write_once)
    elif not attempt(write_once, f"what {type(logger).__name__} logs"):
        logger.has_failed = True


def _wandb(run: Run, run_dir: Path) -> Logger:
    import wandb  # here, because the import takes half a second

    logger = WandbLogger(
        name=run_dir.parent.name,
        save_dir=run_dir,
        project=run.output.wandb_project,
        config=yaml.safe_load((run_dir / run_folder.CONFIG).read_text()),
    )
    try:
        _ = logger.experiment  # opens the run
    except wandb.Error as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise UsageError(f"--logger wandb: {reason}; WANDB_MODE=offline keeps the run on this machine") from error
    return logger


def log_results(trainer: Trainer, run: Settings, metrics: dict[str, Any]) -> None:
    """Adds the results of a run, the content of metrics.json, to its loggers. An error of a logger does not end the
    run."""
    for logger in trainer.loggers:
        write_to(logger, _log_results, logger, run, metrics, trainer.global_step)


def _log_results(logger: Logger, run: Settings, metrics: dict[str, Any], step: int) -> None:
    """Adds the results of a run to one logger: in TensorBoard a row of the HPARAMS table and points at `step`, in W&B
    all of metrics.json. All settings in the table but floats are text, because TensorBoard would show the number 4 as
    4.0000."""
    if isinstance(logger, TensorBoardLogger):
        optimizer, schedule = run.recipe.optimizer, run.recipe.schedule
        shown = {name: metrics[name] for name in SETTINGS}
        shown |= {"optimizer": optimizer.name, **optimizer.options, "schedule": schedule.name}
        for name, value in shown.items():
            shown[name] = value if isinstance(value, float) else str(value)
        results = {name: metrics[name] for name in RESULTS if metrics[name] is not None}
        results["mem/peak_gb"] = max(metrics["mem/peak_rank_bytes"], default=0) / 1e9
        logger.log_hyperparams(shown, results, step)
        logger.experiment.flush()
    elif isinstance(logger, WandbLogger):
        logger.experiment.summary.update(metrics)
