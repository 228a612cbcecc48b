"""What an optimizer needs of the strategy, offloaded or not."""

from cifar_zero.config.run import Run
from cifar_zero.core.errors import UsageError
from cifar_zero.optimizers import OFFLOADED_BY


def check_optimizer(run: Run) -> None:
    """Refuses an optimizer that the strategy or the device cannot run."""
    name = run.config.optimizer.name
    if name not in OFFLOADED_BY and run.spec.shards_tensors:
        raise UsageError(
            f"--optimizer {name} needs whole tensors, and {run.config.strategy_name} cuts them: "
            "use deepspeed_stage_0, ddp or baseline, or --optimizer adamw"
        )
    if name == "muon_sgd":
        _check_muon_sgd(run)
    if name == "adam8bit" and run.on_cpu:
        raise UsageError("--optimizer adam8bit needs a CUDA GPU: use --optimizer adam")


def _check_muon_sgd(run: Run) -> None:
    """Refuses schedules that cannot move the learning rate of each of its groups."""
    config = run.config
    if config.schedule.name == "range_test":
        given = "--find_lr" if config.find_lr else "--schedule range_test"
        raise UsageError(f"{given} gives all groups one learning rate, and --optimizer muon_sgd has three: use muon")
    if config.optimizer.options["first_bias_share"] < 1 and config.schedule.name == "constant":
        raise UsageError("--optimizer.first_bias_share needs a schedule that ends at 0: add --schedule linear")


def check_offloaded_optimizer(run: Run) -> None:
    """Refuses an optimizer that SuperOffload cannot run."""
    if not run.spec.super_offload:
        return
    optimizer, strategy = run.config.optimizer, run.config.strategy_name
    if optimizer.name not in ("adam", "adamw"):
        raise UsageError(f"--strategy {strategy} runs only Adam and AdamW: add --optimizer adam")
    if optimizer.name == "adam" and optimizer.options["weight_decay"]:
        # Its process makes a DeepSpeedCPUAdam without adamw_mode=False (DeepSpeed 0.19.8, superoffload_utils.py).
        raise UsageError(f"--strategy {strategy} takes weight decay as AdamW does: use --optimizer adamw")
