"""Refuses what cannot run, before anything is launched, in one line that says what to use instead.

A check raises UsageError. Nothing here imports torch, except for a model of torchvision or timm.
"""

from collections.abc import Callable

from cifar_zero.config.rules import strategy
from cifar_zero.config.rules.devices import check_here, check_on_cpu, check_sync_batch_norm
from cifar_zero.config.rules.model import check_experts, check_finetuning, check_model
from cifar_zero.config.rules.strategy import check_can_resume
from cifar_zero.config.run import Run

__all__ = ["check", "check_can_resume", "check_finetuning", "check_here", "check_model", "check_strategy"]


def check(run: Run, announce: Callable[[Run], None] | None = None) -> None:
    """Refuses what cannot run on this computer; `announce` is called before what may take seconds."""
    check_strategy(run)
    check_here(run)
    if run.config.trainer.get("sync_batchnorm"):
        check_sync_batch_norm(run)
    if announce is not None:
        announce(run)
    check_model(run)


def check_strategy(run: Run) -> None:
    """Refuses what the strategy cannot do on any computer."""
    config = run.config
    if run.on_cpu:
        check_on_cpu(run)
    if config.cuda_graphs:
        strategy.check_cuda_graphs(run)
    if config.compile == "step":
        strategy.check_compiled_step(run)
    strategy.check_optimizer(run)
    strategy.check_switches(run)
    strategy.check_model_parallel(run)
    if "ep_size" in config.model.options:
        check_experts(run)
    if config.ema or config.swa_from:
        strategy.check_averaging(run)
