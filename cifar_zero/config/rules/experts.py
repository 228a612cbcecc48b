"""What mixtures of experts need of the ranks and the strategy."""

from cifar_zero.config.run import Run
from cifar_zero.core.errors import UsageError


def check_experts(run: Run) -> None:
    """Refuses a mixture of experts that the strategy or the number of ranks does not allow."""
    config, ranks = run.config, run.world_size
    ep_size = config.model.options["ep_size"]
    given = f"--ds_config {config.ds_config}" if config.ds_config else f"--strategy {config.strategy}"
    if run.spec.stage == 3:
        raise UsageError(
            f"{given}: DeepSpeed does not support its mixture of experts with ZeRO stage 3, use deepspeed_stage_2"
        )
    if ep_size > 1 and not run.spec.spreads_experts:
        raise UsageError(
            f"--model.ep_size {ep_size}: {given} keeps all experts on each rank, add --model.ep_size 1; "
            "deepspeed_stage_0, 1 and 2 spread them"
        )
    if ranks % ep_size:
        raise UsageError(f"--model.ep_size {ep_size} does not divide the {ranks} rank{'s'[: ranks > 1]} of --devices")
    raw = run.spec.raw or {}
    for key in ("reduce_scatter", "contiguous_gradients"):
        if raw.get("zero_optimization", {}).get(key) is False:
            raise UsageError(f"{given} sets {key} to false: DeepSpeed needs it for mixtures of experts, take it out")
    if raw.get("use_data_before_expert_parallelism"):
        raise UsageError(
            f"{given} sets use_data_before_expert_parallelism: take it out, neighbouring ranks share experts"
        )
    if config.init != "default" and ep_size > 1:
        raise UsageError(f"--init {config.init} initialises the experts of all ranks: add --model.ep_size 1")
    if config.cuda_graphs:
        raise UsageError(f"--cuda_graphs cannot replay the routing of --model {config.model.name}: use --compile")
