"""What an average of the weights needs of the strategy."""

from cifar_zero.config.run import Run
from cifar_zero.core.errors import UsageError


def check_averaging(run: Run) -> None:
    """Refuses --ema and --swa_from where the average, which lies where the weights lie, cannot be taken."""
    if run.spec.averages:
        return
    flag, strategy = "--ema" if run.config.ema else "--swa_from", run.config.strategy_name
    if run.spec.offload_parameters == "nvme":
        raise UsageError(f"{flag}: {strategy} keeps the weights on disk, use deepspeed_stage_3_offload")
    raise UsageError(f"{flag}: the shards of {strategy} cannot be averaged here, use deepspeed_stage_3")
