"""What an optimizer needs of the strategy, offloaded or not."""

from __future__ import annotations

from typing import Any

from cifar_zero.config.flags import Config
from cifar_zero.config.strategy_specs import STRATEGIES
from cifar_zero.core.errors import UsageError
from cifar_zero.optimizers import OFFLOADED_BY


def check_optimizer(config: Config, raw: dict[str, Any]) -> None:
    """What an optimizer needs of the strategy; `raw` as in `check_experts`."""
    name, spec = config.optimizer.name, STRATEGIES[config.strategy]
    zero = raw.get("zero_optimization", {})
    stage = zero.get("stage", 0) if config.ds_config else spec.stage
    cuts = spec.family not in ("baseline", "deepspeed") and not config.ds_config
    if name not in OFFLOADED_BY and (stage or cuts):
        raise UsageError(
            f"--optimizer {name} needs whole tensors, and {config.strategy_name} cuts them: "
            "use deepspeed_stage_0, ddp or baseline, or --optimizer adamw"
        )
    if name == "muon_sgd":
        check_muon_sgd(config)
    if name == "adam8bit" and config.accelerator != "gpu":
        raise UsageError("--optimizer adam8bit needs a CUDA GPU: use --optimizer adam")


def check_muon_sgd(config: Config) -> None:
    """Its groups have learning rates of their own, each of which a schedule has to move."""
    if config.schedule.name == "range_test":
        asked = "--find_lr" if config.find_lr else "--schedule range_test"
        raise UsageError(f"{asked} gives all groups one learning rate, and --optimizer muon_sgd has three: use muon")
    if config.optimizer.options["first_bias_share"] < 1 and config.schedule.name == "constant":
        raise UsageError("--optimizer.first_bias_share needs a schedule that ends at 0: add --schedule linear")


def check_offload(config: Config) -> None:
    """What a strategy that offloads the optimizer needs."""
    spec = STRATEGIES[config.strategy]
    if config.ds_config or not spec.offload_optimizer:
        return
    if spec.super_offload and config.optimizer.name not in ("adam", "adamw"):
        raise UsageError(f"--strategy {config.strategy} runs Adam alone: add --optimizer adam")
    if spec.super_offload and config.optimizer.name == "adam" and config.optimizer.options["weight_decay"]:
        # Its process makes a DeepSpeedCPUAdam without adamw_mode=False (DeepSpeed 0.19.8, superoffload_utils.py).
        raise UsageError(f"--strategy {config.strategy} takes weight decay as AdamW does: use --optimizer adamw")
