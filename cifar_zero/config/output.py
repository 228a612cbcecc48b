"""The output options: run folders, checkpoints, logging and plots. The docstring under each field is its `--help` text;
numbers are at least 0 unless `limited` sets other limits."""

from dataclasses import dataclass, field
from typing import Literal

from cifar_zero.core.usage import limited

LoggerName = Literal["tensorboard", "csv", "wandb", "none"]


@dataclass(frozen=True)
class Output:
    """output: run folders, checkpoints, logging, plots and checks"""

    out: str = "runs"
    """Directory for run folders."""

    name: str = ""
    """Name of the run; its folder is <out>/<name>/version_N. Empty: <model>-<strategy>."""

    resume: str = ""
    """Resume from a checkpoint: its path, a run folder, last (the newest run of this name), or auto (like last if this
    name has a checkpoint, otherwise from the start). All other options are taken from that run unless flags override
    them; strategy and number of ranks may differ."""

    save_every_n_steps: int = 0
    """Also update last.ckpt every N optimizer steps. 0: only at the end of each epoch."""

    save_top_k: int = limited(1, at_least=-1)
    """How many of the best checkpoints to keep, in addition to last.ckpt. -1: one per validation. 0: none."""

    logger: list[LoggerName] = field(default_factory=lambda: ["tensorboard"])
    """Loggers, one or more: tensorboard, csv (csv/metrics.csv in the run folder), wandb; or none."""

    wandb_project: str = "cifar-zero"
    """Weights & Biases: project."""

    log_gradients: bool = False
    """Also log the norm of each parameter's gradient (grad_norm/*) and its histogram, every --log_interval steps."""

    test_figures: bool = True
    """Draw the confusion matrix and the curves of each class after the test. false: draw nothing, which ends a short
    run seconds earlier."""

    audit: bool = False
    """Audit each optimizer step: the strategy must update the weights as plain PyTorch does with the gradients that
    autograd computed. Writes the verdict to step_check.json."""

    check_steps: int = 0
    """Audit each optimizer step, and also compute N steps, spread over the training, again on a plain copy of the
    model: loss, gradients and buffers must match. Such a step takes several times as long. 0: none."""

    log_interval: int = limited(100, at_least=1)
    """Optimizer steps between two logged points of the training metrics."""

    warmup_steps: int = 20
    """Optimizer steps at the start that speed measurements leave out, at most half of the run; --bench_steps runs them
    before the timed steps."""
