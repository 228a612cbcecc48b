"""Tests that `--audit` and `--check_steps` check the steps of a run on two real ranks, and write the verdict."""

import json
from pathlib import Path

import pytest

from cifar_zero.checkpoints.run_folder import STEP_CHECK
from tests.support.helpers import run_folder_of, train_all

FROZEN = ["--model", "resnet18", "--model.width", "0.05", "--trainable", "fc.*", "--optimizer", "adamw"]
"""A model whose batch norms the program puts into evaluation mode. This is no fault of the strategy."""


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("flags", "strategy", "replayed"), [(["--audit"], "deepspeed_stage_3", 0), (["--check_steps", "2"], "ddp", 2)]
)
def test_the_verdict_is_in_the_run_folder(
    flags: list[str], strategy: str, replayed: int, small_data: list[str], tmp_path: Path
):
    recipe = [*small_data, *FROZEN, "--accelerator", "cpu", "--batch_size", "16", "--accumulate", "2"]
    train_all({tmp_path: [*recipe, "--devices", "2", "--strategy", strategy, "--max_steps", "4", *flags]})
    verdict = json.loads((run_folder_of(tmp_path) / STEP_CHECK).read_text())
    assert (verdict["outcome"], verdict["steps"], verdict["replayed"]) == ("agrees", 4, replayed), verdict["summary"]
    assert verdict["notes"] == {}
