"""Tests which parts of a user's DeepSpeed configuration become options, are refused, or go to the engine."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cifar_zero.config import command_line, ds_config
from cifar_zero.config.ds_config import get_ds_config
from cifar_zero.config.settings import Settings
from cifar_zero.core.errors import UsageError
from cifar_zero.strategies.deepspeed import engine_config
from cifar_zero.training.resolve import make_run, resolve, resolve_devices
from tests.support.helpers import refused

AUTO = {
    **dict.fromkeys((*ds_config.RENAMED, "train_micro_batch_size_per_gpu"), "auto"),
    "fp16": {"enabled": "auto", "initial_scale_power": 16},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"),
    },
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"},
}
"""What the configurations of transformers' documentation have in common, with a short section for ZeRO 3."""


HF_ZERO_2 = {
    **AUTO,
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 2e8,
        "contiguous_gradients": True,
    },
}
"""The configuration of transformers' documentation for ZeRO 2."""

HF_ZERO_3 = {
    **AUTO,
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}

DEEPSPEED_CHAT = {
    "steps_per_print": 10,
    "zero_optimization": {
        "stage": 2,
        "offload_param": {"device": "cpu"},
        "offload_optimizer": {"device": "cpu"},
        "stage3_param_persistence_threshold": 1e4,
        "stage3_max_live_parameters": 3e7,
        "stage3_prefetch_bucket_size": 3e7,
        "memory_efficient_linear": False,
    },
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "prescale_gradients": False,
    "wall_clock_breakdown": False,
    "hybrid_engine": {
        "enabled": False,
        "max_out_tokens": 512,
        "inference_tp_size": 1,
        "release_inference_cache": False,
        "pin_parameters": True,
        "tp_gather_partition_size": 8,
    },
    "tensorboard": {"enabled": False, "output_path": "logs/", "job_name": "step1"},
}
"""What `get_train_ds_config` of DeepSpeed-Chat returns."""

OFF = {
    "zero_optimization": False,
    "tensor_parallel": {"autotp_size": 0},
    "checkpoint": {"load_universal": False, "tag_validation": "Warn"},
    "data_efficiency": {"enabled": False},
    "weight_quantization": {"enabled": False},
    "expert_parallel": {"enabled": False, "autoep_size": 2},
    "flops_profiler": {"enabled": False, "output_file": "profile.txt"},
}
"""Sections that are switched off, or have DeepSpeed's defaults."""


def on_disk(optimizer: dict[str, Any], parameters: dict[str, Any]) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3, "offload_optimizer": optimizer, "offload_param": parameters}}


@pytest.fixture(autouse=True)
def machine_without_gpus(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("cifar_zero.training.resolve.gpu_count", lambda: 0)


def parsed(folder: Path, content: dict[str, Any], flags: str = "") -> Settings:
    file = folder / "their.json"
    file.write_text(json.dumps(content))
    return command_line.parse(["--ds_config", str(file), *flags.split()])


def test_auto_leaves_a_value_to_the_flags(tmp_path: Path):
    flags = "--batch_size 8 --accumulate 2 --gradient_clip_val 0.5 --precision bf16-mixed --optimizer.lr 0.01"
    config = parsed(tmp_path, AUTO, f"{flags} --schedule.warmup_num_steps 7")
    assert (config.recipe.batch_size, config.placement.accumulate, config.recipe.gradient_clip_val) == (8, 2, 0.5)
    assert (config.placement.precision, config.recipe.optimizer.name) == ("bf16-mixed", "adamw")
    assert config.recipe.optimizer.options["lr"] == 0.01
    assert config.recipe.schedule.options["warmup_num_steps"] == 7
    run = make_run(resolve_devices(config))
    made = engine_config(run)
    assert made["zero_optimization"] == {"stage": 3, "allgather_bucket_size": 62006, "reduce_bucket_size": 62006}
    assert (made["bf16"], made["fp16"]) == ({"enabled": True}, {"enabled": False, "initial_scale_power": 16})


@pytest.mark.parametrize(
    ("content", "flags", "expected"),
    [
        ({"train_batch_size": 32, "gradient_accumulation_steps": 2}, "", {"batch_size": 32, "accumulate": 2}),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, "", {"optimizer": "adam"}),
        ({"optimizer": {"type": "Adam"}}, "", {"optimizer": "adamw", "optimizer.weight_decay": 0.0}),
        ({"optimizer": {"type": "Adam", "params": {"torch_adam": True}}}, "", {"optimizer.weight_decay": 0.01}),
        (
            {"optimizer": {"type": "Adam", "params": {"torch_adam": True, "weight_decay": "auto"}}},
            "--optimizer.weight_decay 0.3",
            {"optimizer.weight_decay": 0.3},
        ),
        ({"optimizer": {"type": "Lion", "params": {"lr": "auto"}}}, "", {"optimizer.lr": 0.0001}),
        ({"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}, "", {"optimizer": "sgd", "optimizer.momentum": 0.0}),
        (
            {
                "scheduler": {
                    "type": "WarmupDecayLR",
                    "params": {"total_num_steps": 90, "warmup_num_steps": 9, "warmup_max_lr": 0.3},
                }
            },
            "--optimizer adam",
            {"schedule": "warmup_decay_lr", "schedule.total_steps": 90, "optimizer.lr": 0.3},
        ),
    ],
)
def test_what_becomes_an_option(content: dict[str, Any], flags: str, expected: dict[str, Any], tmp_path: Path):
    options = ds_config.flat(parsed(tmp_path, content, flags))
    assert {option: options[option] for option in expected} == expected


@pytest.mark.parametrize(
    ("content", "flags", "expected"),
    [
        (get_ds_config(1, "fp32"), "--optimizer sgd", "--optimizer sgd is not the file's adamw: leave out the flag"),
        ({"optimizer": {"type": "OneBitAdam"}}, "", "optimizer OneBitAdam is not supported"),
        ({"optimizer": {"type": "Adam", "params": {"max_coeff": 1}}}, "", "unknown option --optimizer.max_coeff"),
        ({"optimizer": {"type": "Adam", "params": {"name": "muon"}}}, "", "optimizer Adam has no parameter `name`"),
        ({"optimizer": {"type": "Adam", "params": {"lr": 1, "options": {}}}}, "", "unknown option --optimizer.options"),
        (
            {"data_efficiency": {"data_sampling": {"curriculum_learning": {"data_cluster_path": "/etc"}}}},
            "",
            'data_efficiency.data_sampling.curriculum_learning.data_cluster_path "/etc" is refused',
        ),
        ({"tensorboard": True}, "", "their.json: tensorboard must be an object"),
        (
            {"zero_optimization": {"offload_param": "cpu"}},
            "",
            "their.json: zero_optimization.offload_param must be an object",
        ),
        ({"optimizer": {"type": "Adam", "params": 1}}, "", "their.json: optimizer.params must be an object"),
        ({"fp16": {"enabled": False, "auto_cast": True}}, "", "fp16.auto_cast true is refused"),
        ({"data_efficiency": {"enabled": False, "data_routing": {"random_ltd": {"enabled": True}}}}, "", "is refused"),
        ({"zero_optimization": {"offload_optimizer": {"device": 5}}}, "", "must be one of none, cpu, nvme"),
        ({"zero_optimization": {"stage": 7}}, "", "a stage from 0 to 3"),
        ({"zero_optimization": {"stage": 3}}, "--model net_moe", "use deepspeed_stage_2"),
        ({"fp16": {"enabled": True}}, "--accelerator cpu", "--precision 16-mixed needs a GPU"),
        (
            {"zero_optimisation": {"stage": 2}},
            "",
            "DeepSpeed does not read zero_optimisation, so it has no effect: did you mean zero_optimization?",
        ),
        ({"stage": 2}, "", "DeepSpeed does not read stage, so it has no effect: did you mean zero_optimization.stage?"),
        (
            {"zero_optimization": {"gradient_clipping": 1}},
            "",
            "zero_optimization.gradient_clipping, so it has no effect",
        ),
        ({"apex": 3}, "", "DeepSpeed does not read apex, so it has no effect: remove it"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "", "needs ZeRO stage 1, not 0"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}}, "", "needs ZeRO stage 3, not 2"),
        (on_disk({"device": "nvme"}, {}), "", "their.json: offload_optimizer.nvme_path is missing"),
        (
            on_disk({}, {"device": "nvme", "nvme_path": "/nowhere"}),
            "",
            "their.json: offload_param.nvme_path /nowhere is not a writable directory",
        ),
        (
            {"train_micro_batch_size_per_gpu": 4},
            "--devices 2",
            "a micro-batch of 4 x 2 ranks x --accumulate 1 is not --batch_size 4",
        ),
    ],
)
def test_what_is_refused(content: dict[str, Any], flags: str, expected: str, tmp_path: Path):
    with refused(expected):
        resolve(parsed(tmp_path, content, flags))


@pytest.mark.parametrize(
    ("content", "stage", "offloads"),
    [
        (HF_ZERO_2, 2, ("cpu", "")),
        (HF_ZERO_3, 3, ("cpu", "cpu")),
        (DEEPSPEED_CHAT, 2, ("cpu", "")),
        ({"zero_optimization": {"stage": 1, "cpu_offload_param": True}}, 1, ("", "")),
        (get_ds_config(0, "bf16"), 0, ("", "")),
        (OFF, 0, ("", "")),
    ],
    ids=["hf-zero-2", "hf-zero-3", "deepspeed-chat", "old-key", "cifar-example", "off"],
)
def test_files_of_other_projects_are_accepted(
    content: dict[str, Any], stage: int, offloads: tuple[str, str], tmp_path: Path
):
    settings = parsed(tmp_path, content)
    spec = ds_config.spec_of(settings.placement)
    assert (spec.stage, (spec.offload_optimizer, spec.offload_parameters)) == (stage, offloads)
    zero = content["zero_optimization"]
    ignored = stage < 3 and zero and ("offload_param" in zero or "cpu_offload_param" in zero)
    note = "offload_param is ignored, because it needs ZeRO stage 3"
    assert (note in ds_config.summary(settings.placement.ds_config)) == bool(ignored)


@pytest.mark.parametrize(("key", "accepted"), [(key, value) for key, (value, _) in ds_config.RESTRICTED.items()])
def test_a_restricted_key_has_one_value(key: str, accepted: Any, tmp_path: Path):
    def read(value: Any) -> None:
        for section in reversed(key.split(".")):
            value = {section: value}
        file = tmp_path / "their.json"
        file.write_text(json.dumps(value))
        ds_config.options_of(str(file))

    keys, refused_value = ds_config.known_keys(), not accepted
    for section in key.split("."):
        keys = keys[section]
    if keys:  # a section, of which each key is refused
        refused_value = {next(inner for inner in keys if not keys[inner]): 7}
    with refused(key, "is refused: "):
        read(refused_value)
    for value in (accepted, "auto", None):
        read(value)


def test_no_key_but_nvme_path_can_name_a_file():
    def restricted(name: str) -> bool:
        section = name.rpartition(".")[0]
        return any(f"{name}.".startswith(f"{key}.") or key == f"{section}.enabled" for key in ds_config.RESTRICTED)

    names = [".".join((*path, key)) for path, keys in sections(ds_config.known_keys()) for key in keys]
    of_files = {name for name in names if name.endswith(("_file", "_path", "_dir")) and not restricted(name)}
    assert of_files == {f"zero_optimization.{section}.nvme_path" for section in ds_config.OFFLOADS}


def sections(keys: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """Yields the path of each section that has fixed keys, with these keys."""
    yield path, [*keys]
    for key, inner in keys.items():
        if inner:
            yield from sections(inner, (*path, key))


@pytest.mark.parametrize(("path", "keys"), [*sections(ds_config.known_keys())])
def test_a_misspelt_key_of_any_section_is_refused_with_the_nearest_name(
    path: tuple[str, ...], keys: list[str], tmp_path: Path
):
    for key in keys:
        content: dict[str, Any] = {key + "Z": 1}
        for section in reversed(path):
            content = {section: content}
        with pytest.raises(UsageError, match=rf"{re.escape('.'.join((*path, key)))}Z, .* did you mean {key}\?$"):
            parsed(tmp_path, content)


def test_the_summary_names_what_takes_effect(tmp_path: Path):
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}, "overlap_comm": "auto"}
    content = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "zero_optimization": zero}
    file = tmp_path / "their.json"
    file.write_text(json.dumps(content | {"gradient_clipping": 1.0}))
    assert ds_config.summary(str(file)) == (
        f"{file}: ZeRO 2; sets --gradient_clip_val 1.0 --batch_size 32; passed on to DeepSpeed: "
        "train_micro_batch_size_per_gpu, zero_optimization.stage, zero_optimization.offload_optimizer.device"
    )


def test_a_run_is_repeated_as_it_was_whatever_has_become_of_the_file(tmp_path: Path):
    config = parsed(tmp_path, get_ds_config(1, "fp32"))
    recipe, file = tmp_path / "config.yaml", Path(config.placement.ds_config)
    recipe.write_text(command_line.dump(config))
    for content in (get_ds_config(1, "bf16"), None):
        file.write_text(json.dumps(content)) if content else file.unlink()
        assert command_line.parse(["--config", str(recipe)]) == config


def test_flags_override_a_file_that_a_recipe_names(tmp_path: Path):
    file, recipe = tmp_path / "their.json", tmp_path / "recipe.yaml"
    file.write_text(json.dumps({"train_batch_size": 8, "gradient_clipping": 1.0}))
    recipe.write_text(f"ds_config: {file}\nbatch_size: 16\n")
    config = command_line.parse(["--config", str(recipe), "--gradient_clip_val", "2"]).recipe
    assert (config.batch_size, config.gradient_clip_val) == (16, 2.0)
