"""Runs with DeepSpeed's options that need CUDA reach the same weights as runs without them, up to rounding."""

from pathlib import Path

import pytest
import torch

from tests.support.helpers import assert_ok, last_weights, needs_gpu, run_program

pytestmark = needs_gpu

SMALL = ["--model", "vit_tiny", "--optimizer", "adamw", "--precision", "bf16-mixed", "--batch_size", "16"]
SMALL += ["--devices", "1"]
SUPER = ["--strategy", "deepspeed_stage_3_superoffload", "--offload.pin_memory", "true"]
SUB_GROUPS = ["--zero.sub_group_size", "500000"]
ON_ONE_GPU = {
    "superoffload": SUPER,
    "superoffload of many sub-groups": [*SUPER, *SUB_GROUPS, "--offload.cpuadam_cores_perc", "0.5"],
    "pinned": ["--strategy", "deepspeed_stage_2_offload", "--offload.pin_memory", "true"],
}
STEPS = 12
Weights = dict[str, torch.Tensor]


def trained(folder: Path, small_data: list[str], steps: int, *flags: str) -> Weights:
    """Returns the weights after `steps` steps."""
    length = ["--max_steps", str(steps), "--trainer.limit_test_batches", "1"]
    assert_ok(run_program("train.py", *small_data, *SMALL, *flags, *length, "--out", str(folder)))
    return last_weights(folder)


def distance(one: Weights, other: Weights) -> float:
    """Returns the Euclidean distance between all weights of two models."""
    return sum((one[name].double() - other[name].double()).square().sum().item() for name in one) ** 0.5


@pytest.mark.parametrize("name", ON_ONE_GPU)
def test_on_one_gpu(name: str, small_data: list[str], tmp_path: Path):
    """Every parameter has changed since the first step, and the final weights are near the weights without the option.
    A model that is not updated has the distance 1. The distance is over all weights, because the biases of the keys
    have no gradient and follow rounding."""
    stage_3 = ["--strategy", "deepspeed_stage_3"]
    first, expected = (trained(tmp_path / str(steps), small_data, steps, *stage_3) for steps in (1, STEPS))
    switched = trained(tmp_path / "switched", small_data, STEPS, *ON_ONE_GPU[name])
    assert not [name for name in first if torch.equal(switched[name], first[name])]
    assert distance(switched, expected) < 0.2 * distance(expected, first)
