"""What an average of the weights needs of the strategy."""

from __future__ import annotations

from typing import Any

from cifar_zero.config.flags import Config
from cifar_zero.config.strategy_specs import STRATEGIES
from cifar_zero.core.errors import UsageError


def check_averaging(config: Config, raw: dict[str, Any]) -> None:
    """The average lies where the weights lie, and is taken after a step; `raw` as in `check_experts`."""
    flag = "--ema" if config.ema else "--swa_from"
    spec, offloaded_to = STRATEGIES[config.strategy], STRATEGIES[config.strategy].offload_parameters
    if config.ds_config:
        offloaded_to = raw.get("zero_optimization", {}).get("offload_param", {}).get("device")
    if offloaded_to == "nvme":
        raise UsageError(f"{flag}: {config.strategy_name} keeps the weights on disk, use deepspeed_stage_3_offload")
    if spec.family not in ("baseline", "deepspeed") and not config.ds_config:
        raise UsageError(f"{flag}: the shards of {config.strategy} cannot be averaged here, use deepspeed_stage_3")
