"""The options of mixtures of experts on the command line."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from cifar_zero.config import command_line
from cifar_zero.core.errors import UsageError
from cifar_zero.models import NetMoE, ViTMoE
from tests.support.helpers import run_program

MIXTURES: dict[str, type[NetMoE | ViTMoE]] = {"net_moe": NetMoE, "vit_moe": ViTMoE}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("net_moe --model.num_experts []", "num_experts must be numbers from 1, one for each mixture, not []"),
        ("net_moe --model.num_experts [2,0]", "num_experts must be numbers from 1, one for each mixture, not [2, 0]"),
        ("net_moe --model.num_experts [2.5]", "num_experts: expected a list of int, not [2.5]"),
        ("net_moe --model.num_experts two", "num_experts: expected a list of int, not two"),
        ("net_moe --model.ep_size 0", "ep_size must be at least 1, not 0"),
        ("net_moe --model.num_experts [4,2] --model.ep_size 4", "ep_size 4 does not divide num_experts 2"),
        ("net_moe --model.mlp_type dense", "mlp_type: expected one of ['standard', 'residual'], not dense"),
        ("net_moe --model.top_k 3", "top_k: expected one of [1, 2], not 3"),
        (
            "net_moe --model.top_k 2 --model.num_experts [2,1]",
            "top_k 2 needs at least as many experts",
        ),
        ("net_moe --model.capacity_factor 0", "capacity_factor must be over 0"),
        ("net_moe --model.capacity_factor .nan", "capacity_factor must be over 0"),
        ("net_moe --model.capacity_factor .inf", "capacity_factor must be over 0 and finite"),
        ("net_moe --model.eval_capacity_factor -1", "eval_capacity_factor must be at least 0, not -1.0"),
        ("net_moe --model.min_capacity -1", "min_capacity must be at least 0, not -1"),
        ("net_moe --model.min_capacity 1.5", "min_capacity: expected int, not 1.5"),
        ("net_moe --model.load_balance -0.1", "load_balance must be at least 0, not -0.1"),
        ("net_moe --model.load_balance .nan", "load_balance must be at least 0 and finite, not nan"),
        ("net_moe --model.noisy_gate_policy rsample", "expected one of ['none', 'RSample', 'Jitter'], not rsample"),
        ("net_moe --model.noisy_gate_policy RSample --model.top_k 2", "noisy_gate_policy RSample is for top_k 1 only"),
        ("net_moe --model.size tiny", "unknown option --model.size"),
        ("net --model.num_experts [2]", "unknown option --model.num_experts"),
        ("vit_moe --model.num_experts [2,4]", "num_experts must be one number, or one for each of 6 mixtures"),
        ("vit_moe --model.size huge", "size: expected one of ['tiny', 'small', 'base', 'large', '1b', '13b']"),
        ("vit_tiny --model.size base", "unknown option --model.size"),
    ],
)
def test_mistakes_are_one_clear_line(flags: str, message: str):
    with pytest.raises(UsageError) as error:
        command_line.parse(["--model", *flags.split()])
    assert message in str(error.value)
    assert "--model." in str(error.value)
    assert "\n" not in str(error.value)


def test_help_names_every_option_and_its_default():
    model = "vit_moe"
    done = run_program("-X", "importtime", "train.py", "--model", model, "--help", "all")
    assert done.returncode == 0
    options = {text.split()[0].rstrip(","): " ".join(text.split()) for text in re.split(r"\n  (?=--)", done.stdout)}
    for option in fields(MIXTURES[model]):
        assert f"(default: {getattr(MIXTURES[model](), option.name)})" in options[f"--model.{option.name}"]
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert not imported & {"torch", "numpy", "deepspeed"}


@pytest.mark.parametrize(
    "flags", ["net_moe --model.num_experts [2,4] --model.mlp_type residual", "vit_moe --model.size small"]
)
def test_a_recipe_has_every_option(flags: str, tmp_path: Path):
    config = command_line.parse(["--model", *flags.split(), "--model.top_k", "2"])
    assert set(config.recipe.model.options) == {option.name for option in fields(MIXTURES[config.recipe.model.name])}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(command_line.dump(config))
    assert command_line.parse(["--config", str(recipe)]) == config
