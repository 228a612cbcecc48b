"""What mixtures of experts need of the ranks and the strategy."""

from __future__ import annotations

from typing import Any

from cifar_zero.config.flags import Config
from cifar_zero.config.strategy_specs import STRATEGIES
from cifar_zero.core.errors import UsageError


def check_experts(config: Config, raw: dict[str, Any]) -> None:
    """What a network with mixtures of experts needs of the ranks and the strategy.

    Args:
        config: of the run.
        raw: the content of --ds_config, empty without one.
    """
    ep_size, ranks = config.model.options["ep_size"], config.world_size
    spec = STRATEGIES[config.strategy]
    given = f"--ds_config {config.ds_config}" if config.ds_config else f"--strategy {config.strategy}"
    stage = raw.get("zero_optimization", {}).get("stage", 0) if config.ds_config else spec.stage
    spreads = spec.family == "deepspeed" or bool(config.ds_config)
    if stage == 3:
        raise UsageError(
            f"{given}: DeepSpeed does not support its mixture of experts with ZeRO stage 3, use deepspeed_stage_2"
        )
    if ep_size > 1 and not spreads:
        raise UsageError(
            f"--model.ep_size {ep_size}: {given} keeps all experts on each rank, add --model.ep_size 1; "
            "deepspeed_stage_0, 1 and 2 spread them"
        )
    if ranks % ep_size:
        raise UsageError(f"--model.ep_size {ep_size} does not divide the {ranks} rank{'s'[: ranks > 1]} of --devices")
    for key in ("reduce_scatter", "contiguous_gradients"):
        if raw.get("zero_optimization", {}).get(key) is False:
            raise UsageError(f"{given} sets {key} to false: DeepSpeed needs it for mixtures of experts, take it out")
    if raw.get("use_data_before_expert_parallelism"):
        raise UsageError(f"{given} sets use_data_before_expert_parallelism: take it out, neighbours share experts here")
    if config.init != "default" and ep_size > 1:
        raise UsageError(f"--init {config.init} draws the experts of all ranks: add --model.ep_size 1")
    if config.cuda_graphs:
        raise UsageError(f"--cuda_graphs cannot replay the routing of --model {config.model.name}: use --compile")
