"""The run in Weights & Biases, for --logger wandb."""

import os
from pathlib import Path

import yaml
from lightning.pytorch.loggers import WandbLogger

from cifar_zero.checkpoints import run_folder
from cifar_zero.core.errors import RunError, UsageError

PROJECT = "cifar-zero"
"""W&B project, unless WANDB_PROJECT names another."""

TIMEOUT_S = 30.0
"""Time that W&B has to open a run; its default of 90 s is long for a server that cannot be reached."""

OFFLINE = "WANDB_MODE=offline keeps the run on this machine"


def wandb_logger(run_dir: Path) -> WandbLogger:
    """Opens a W&B run in the run folder, with the folder's config.yaml as its configuration.

    Not by Lightning (2.6.6), which passes an option `anonymous` that W&B warns about.

    Raises:
        UsageError: the package is missing, or nobody is logged in and there is no terminal.
        RunError: the server does not answer.
    """
    try:
        import wandb
        from wandb.errors import AuthenticationError
        from wandb.errors import UsageError as WandbUsageError
    except ModuleNotFoundError as error:
        raise UsageError("--logger wandb needs the package: pip install wandb") from error
    try:
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run_dir.parent.name,
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
