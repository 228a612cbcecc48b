"""Refuses what cannot run before anything is launched, in one line that says what to use instead.

Nothing here imports torch, except for a model of torchvision or timm.
"""

from cifar_zero.config.rules.averaging import check_averaging
from cifar_zero.config.rules.devices import check_cuda_graphs, check_on_cpu, check_sync_batch_norm
from cifar_zero.config.rules.experts import check_experts
from cifar_zero.config.rules.finetuning import check_finetuning
from cifar_zero.config.rules.here import check_here
from cifar_zero.config.rules.model import check_model
from cifar_zero.config.rules.model_parallel import check_model_parallel
from cifar_zero.config.rules.offload import check_resume, check_switches
from cifar_zero.config.rules.optimizer import check_offloaded_optimizer, check_optimizer
from cifar_zero.config.run import Run

__all__ = ["check", "check_finetuning", "check_here", "check_model", "check_resume", "check_strategy"]


def check(run: Run) -> None:
    """Refuses what cannot run on this computer.

    Raises:
        UsageError: names the option and what to use instead.
    """
    check_strategy(run)
    check_here(run)
    check_model(run)
    if run.config.trainer.get("sync_batchnorm"):
        check_sync_batch_norm(run)


def check_strategy(run: Run) -> None:
    """Refuses what the strategy cannot do on any computer.

    Raises:
        UsageError: names the option and what to use instead.
    """
    config = run.config
    if run.on_cpu:
        check_on_cpu(run)
    if config.cuda_graphs:
        check_cuda_graphs(run)
    check_optimizer(run)
    check_offloaded_optimizer(run)
    check_switches(run)
    check_model_parallel(run)
    if "ep_size" in config.model.options:
        check_experts(run)
    if config.ema or config.swa_from:
        check_averaging(run)
