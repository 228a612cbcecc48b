"""DeepSpeedExamples' CIFAR-10 program (training/cifar/cifar10_deepspeed.py): its configuration and its flags."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from cifar_zero.config import ds_config
from cifar_zero.core.usage import FlagParser

Dtype = Literal["fp32", "bf16", "fp16"]

VALUES = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
VALUES |= {str(stage): f"deepspeed_stage_{stage}" for stage in range(4)}
"""Our values of --dtype and --stage."""


def get_ds_config(stage: int, dtype: Dtype) -> dict[str, Any]:
    """Returns the configuration of DeepSpeedExamples' CIFAR-10 program (training/cifar/cifar10_deepspeed.py). Ready for
    `deepspeed.initialize`. A run uses its zero_optimization, bf16 and fp16 sections only."""
    content = json.loads(Path(__file__).with_suffix(".json").read_text())
    content["zero_optimization"]["stage"] = stage
    for key in ("bf16", "fp16"):
        content[key]["enabled"] = key == dtype
    return content


def take(argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Returns the recipe of a command line with --deepspeed, and that command line in train.py's flags. The recipe is
    the program's, unless a DeepSpeed configuration is given; without --deepspeed all stays as it is."""
    if "--deepspeed" not in argv:
        return {}, [*argv]
    parser = FlagParser(argument_default=argparse.SUPPRESS)
    parser.add_argument("--deepspeed", dest="ds_config", nargs="?")  # with a file as for Hugging Face's Trainer
    parser.add_argument("--moe-param-group", action="store_const", const=None)  # experts always have their own groups
    parser.add_argument("--moe", dest="model", action="store_const", const="net_moe")
    parser.add_argument("--num-experts", dest="model.num_experts", nargs="+", type=int)
    for flag, option in (("stage", "strategy"), ("dtype", "precision")):
        parser.add_argument(f"--{flag}", dest=option, type=lambda value: VALUES.get(value, value))
    for option in ("mlp_type", "top_k", "min_capacity", "noisy_gate_policy"):
        parser.add_argument(f"--{option.replace('_', '-')}", dest=f"model.{option}")
    for flag, option in (("-e", "epochs"), ("--log-interval", "log_interval"), ("--ep-world-size", "model.ep_size")):
        parser.add_argument(flag, dest=option)
    given, rest = parser.parse_known_args(argv)
    options = {option: value for option, value in vars(given).items() if value is not None}
    taken = [*ds_config.flags_of(options), *rest]
    if any(flag.startswith(("--ds_config", "--deepspeed_config")) for flag in taken):
        return {}, taken
    recipe = ds_config.options(get_ds_config(0, "fp16"), {}, ())
    recipe |= {"strategy": "deepspeed_stage_0", "precision": "auto", "epochs": 30}
    recipe |= {"data": {"source": "cifar10", "val_fraction": 0.0}}
    recipe |= {"model": {"name": "net_moe", "num_experts": [1], "load_balance": 0.0}} if "model" in options else {}
    return recipe, taken
