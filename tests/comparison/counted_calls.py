"""Trains cases as the ranks of `compare --acceptance` do, and counts how often each training calls each of FUNCTIONS.
Rank 0 appends a line of JSON for each training to calls.jsonl in the folder of the comparison."""

from __future__ import annotations

import json
from collections import Counter
from functools import wraps
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from cifar_zero.comparison import jobs
from cifar_zero.launch import rank_environment
from cifar_zero.step_check.callback import StepCheck

ZERO_1_2 = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
COORDINATOR = "deepspeed.runtime.zero.partitioned_param_coordinator:PartitionedParameterCoordinator"

FUNCTIONS = (
    f"{ZERO_1_2}.average_tensor",
    f"{ZERO_1_2}.scaled_global_norm",
    f"{ZERO_1_2}.unscale_and_clip_grads",
    f"{ZERO_1_2}.buffered_reduce_fallback",
    "deepspeed.runtime.bf16_optimizer:BF16_Optimizer._update_hp_grad",
    f"{COORDINATOR}._PartitionedParameterCoordinator__release_param",
    "deepspeed.runtime.zero.partition_parameters:AllReduceCoalescedHandle.wait",
    "deepspeed.moe.sharded_moe:MOELayer.forward",
    "deepspeed.comm:all_to_all_single",
    "cifar_zero.optimizers.torch_updates:TorchMuon._muon",
)


CALLS: Counter[str] = Counter()


def count_calls(name: str) -> None:
    """Replaces a function by one that counts its calls in CALLS."""
    place, _, attribute = name.replace(":", ".", 1).rpartition(".")
    owner: Any = resolve_name(place)
    function = getattr(owner, attribute)

    @wraps(function)
    def counting(*arguments: Any, **options: Any) -> Any:
        CALLS[name] += 1
        return function(*arguments, **options)

    setattr(owner, attribute, counting)


for function in FUNCTIONS:
    count_calls(function)


def train(flags: list[str], folder: Path, check: StepCheck) -> None:
    """Trains a job as the acceptance does, and appends its counts to calls.jsonl."""
    rank = rank_environment.global_rank()  # Lightning removes it from the environment at the end of a training
    CALLS.clear()
    jobs.train_recipe(flags, folder, check)
    if rank == 0:
        with (folder / "calls.jsonl").open("a") as file:
            file.write(json.dumps(CALLS) + "\n")
