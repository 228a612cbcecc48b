"""Checks DeepSpeed's configuration: each setting has one owner, and DeepSpeed reads the switches."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import pytest
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors import accelerator_connector

from cifar_zero.config import command_line, ds_config
from cifar_zero.config.ds_config import get_ds_config
from cifar_zero.config.strategy_specs import STRATEGIES
from cifar_zero.core.errors import UsageError
from cifar_zero.models.cast import STATISTICS
from cifar_zero.strategies.deepspeed import ZeROStrategy, engine_config
from cifar_zero.training.resolve import make_run
from tests.support.deepspeed_keys import read_by_deepspeed
from tests.support.helpers import ROOT


def configured(*flags: str) -> dict[str, Any]:
    """Returns the engine's configuration for a model of 62,091 parameters."""
    run = make_run(command_line.parse(["--devices", "1", *flags]))
    return engine_config(replace(run, num_classes=11))


@pytest.mark.parametrize("name", [name for name, spec in STRATEGIES.items() if spec.family == "deepspeed"])
def test_engine_config_follows_the_command_line(name: str):
    made = configured("--strategy", name, "--gradient_clip_val=0.5", "--precision=bf16-mixed", "--nvme_path=/x")
    spec, zero = STRATEGIES[name], made["zero_optimization"]
    assert made["bf16"] == {"enabled": True}
    assert not made["fp16"]["enabled"]
    owned = {"train_batch_size", "gradient_accumulation_steps", "gradient_clipping", "optimizer", "scheduler"}
    assert not owned & set(made)  # of Lightning and of the recipe
    assert "cpu_offload" not in zero  # for which DeepSpeed prints a warning three times
    assert zero["stage"] == spec.stage
    assert zero["reduce_bucket_size"] == zero["allgather_bucket_size"] == 62_092  # an even number
    assert zero.get("offload_optimizer", {}).get("device", "") == spec.offload_optimizer
    assert zero.get("offload_param", {}).get("device", "") == spec.offload_parameters
    assert zero.get("offload_optimizer", {}).get("super_offload", False) == spec.super_offload


def test_data_types_of_a_file_are_merged(tmp_path: Path):
    file = tmp_path / "their.json"
    for own in ({}, {"grad_accum_dtype": "fp32"}, {"buffer_dtype": "fp32"}):
        file.write_text(json.dumps({"bf16": {"enabled": True}, "data_types": own}))
        expected = {"buffer_dtype": "bf16", "keep_in_fp32_modules": [*STATISTICS]} | own
        assert configured("--ds_config", str(file))["data_types"] == expected
    assert "data_types" not in configured("--strategy", "deepspeed_stage_2", "--precision", "32-true")


def test_an_optimizer_of_deepspeeds_configuration_is_refused():
    with pytest.raises(UsageError, match="has an optimizer: return it from configure_optimizers"):
        ZeROStrategy(config={"optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 2}})


def section(*flags: str) -> DeepSpeedZeroConfig:
    """Returns the ZeRO section of a run's configuration as DeepSpeed itself reads it."""
    return DeepSpeedZeroConfig(**configured(*flags)["zero_optimization"])


SWITCHES = {
    "overlap_comm": True,
    "reduce_bucket_size": 1002,  # 1001 were asked for
    "prefetch_bucket_size": 3,
    "max_live_parameters": 4,
    "param_persistence_threshold": 7,
    "sub_group_size": 1000,
}
OFFLOAD = {"pin_memory": True, "cpuadam_cores_perc": 0.5}


def test_switches_reach_deepspeed_key_by_key():
    flags = [f"--zero.{name}={value}".lower() for name, value in SWITCHES.items()]
    flags += [f"--offload.{name}={value}".lower() for name, value in OFFLOAD.items()]
    read = section("--strategy", "deepspeed_stage_3_superoffload", *flags, "--zero.reduce_bucket_size", "1001")
    assert {name: getattr(read, name) for name in SWITCHES} == SWITCHES
    assert read.offload_optimizer is not None
    assert read.offload_param is None
    assert read.offload_optimizer.super_offload
    assert {name: getattr(read.offload_optimizer, name) for name in OFFLOAD} == OFFLOAD
    assert section("--strategy", "deepspeed_stage_1", "--zero.round_robin_gradients=true").round_robin_gradients


def test_lightning_accepts_one_rank_in_a_notebook(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(accelerator_connector, "_IS_INTERACTIVE", True)
    Trainer(accelerator="cpu", devices=1, strategy=ZeROStrategy(3), logger=False)


def test_the_known_keys_are_those_that_the_installed_deepspeed_reads():
    known = json.loads(ds_config.KEYS.read_text())
    assert known == {"release": deepspeed.__version__, "keys": read_by_deepspeed()}, (
        "read what each new key does, add it to ds_config.RESTRICTED if it is not harmless, and write the file again: "
        "python -m tests.support.deepspeed_keys"
    )


def test_the_recipe_has_the_values_of_its_source():
    config = command_line.parse(["--config", str(ROOT / "configs" / "deepspeed.yaml")])
    source = get_ds_config(0, "fp16")
    adam, warmup = source["optimizer"]["params"], source["scheduler"]["params"]
    assert config.recipe.batch_size == source["train_batch_size"]
    assert config.recipe.gradient_clip_val == source["gradient_clipping"]
    assert config.recipe.optimizer.options == {**adam, "betas": tuple(adam["betas"]), "weight_decay_on": "all"}
    assert config.recipe.optimizer.options["lr"] == warmup["warmup_max_lr"]
    assert config.recipe.schedule.options["warmup_num_steps"] == warmup["warmup_num_steps"]
    assert config.recipe.schedule.options["warmup_min_lr"] == warmup["warmup_min_lr"]
