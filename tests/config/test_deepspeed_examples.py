"""The command lines of DeepSpeedExamples' training/cifar: run_ds.sh, run_ds_moe.sh and run_ds_prmoe.sh."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from cifar_zero.config import command_line
from cifar_zero.config.deepspeed_examples import get_ds_config
from cifar_zero.core.errors import UsageError
from tests.support.helpers import ROOT

MOE = "--log-interval 100 --deepspeed --moe --ep-world-size 2 --num-experts 2 --top-k 1 --noisy-gate-policy RSample"
PR_MOE = "--log-interval 100 --deepspeed --moe --ep-world-size 2 --num-experts 2 4 --top-k 1 --mlp-type residual"
OWN = {"--deepspeed_config", "--local_rank"}
"""Flags that train.py knows without --deepspeed too."""


def test_run_ds():
    config = command_line.parse(["--deepspeed", "--dtype=bf16", "--stage=2", "-e", "3", "--local_rank=0"])
    assert (config.strategy, config.precision, config.epochs) == ("deepspeed_stage_2", "bf16-mixed", 3)
    recipe = command_line.parse(["--config", str(ROOT / "configs" / "deepspeed.yaml")])
    ours = command_line.parse(["--deepspeed"])
    assert ours.optimizer.name == "adamw"  # which DeepSpeed's "Adam" is
    assert ours.optimizer.options == recipe.optimizer.options
    for option in ("strategy", "precision", "epochs", "batch_size", "gradient_clip_val", "schedule", "data"):
        assert getattr(ours, option) == getattr(recipe, option)


@pytest.mark.parametrize("line", [MOE, PR_MOE])
def test_run_ds_moe(line: str):
    config = command_line.parse([*line.split(), "--moe-param-group", "--min-capacity", "1", "--devices", "2"])
    options = config.model.options
    assert (config.model.name, config.log_interval) == ("net_moe", 100)
    assert (options["ep_size"], options["top_k"], options["min_capacity"], options["load_balance"]) == (2, 1, 1, 0)
    assert options["num_experts"] == ([2] if line == MOE else [2, 4])
    assert options["mlp_type"] == ("standard" if line == MOE else "residual")


def test_a_configuration_of_the_user_takes_the_place_of_the_programs(tmp_path: Path):
    file = tmp_path / "their.json"
    file.write_text(json.dumps({"train_batch_size": 8, "zero_optimization": {"stage": 1}}))
    for flags in (["--deepspeed", "--deepspeed_config", str(file)], ["--deepspeed", str(file)]):
        config = command_line.parse([*flags, "--epochs", "1"])
        assert (config.ds_config, config.batch_size, config.optimizer.name) == (str(file), 8, "sgd")


def test_the_flags_are_documented_and_known_only_with_deepspeed():
    text = (ROOT / "docs" / "migration.md").read_text()
    rows = re.findall(r"^\| `(-[-\w]+)[^|]*\|", text, re.MULTILINE)
    assert len(rows) == 15
    for flag in {*rows} - OWN - {"--deepspeed", "-e"}:
        with pytest.raises(UsageError, match=flag):
            command_line.parse([flag, "1"])


def test_another_precision_is_one_clear_line():
    with pytest.raises(UsageError, match="--precision: expected one of"):
        command_line.parse(["--deepspeed", "--dtype", "fp8"])


def test_a_configuration_for_each_dtype():
    assert [get_ds_config(0, dtype)["fp16"]["enabled"] for dtype in ("fp32", "bf16", "fp16")] == [False, False, True]
