"""A user's own DeepSpeed configuration (`--ds_config FILE.json`): its meaning in train.py's options, and its strategy.

Names, defaults and meanings are DeepSpeed's (0.19.8); "auto" leaves a value to the flags, as in Hugging Face's Trainer.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from cifar_zero.config.flags import Config, flat
from cifar_zero.config.strategy_specs import Spec
from cifar_zero.core import plain_data
from cifar_zero.core.errors import UsageError
from cifar_zero.core.hardware import gpu_count
from cifar_zero.core.usage import FlagParser

BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")

DEPRECATED = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}
"""Switches of an older form, and the section that replaces each."""

SECTIONS = ("optimizer", "scheduler", "params", "fp16", "bf16", "zero_optimization", *DEPRECATED.values())
"""Keys whose values are objects."""

REFUSED = {
    # These two could run code that a file names: it imports modules, and unpickles "universal" checkpoints unchecked.
    "torch_autocast": "--precision bf16-mixed",
    "checkpoint": "--resume, which reads the checkpoints of every strategy",
}
"""Keys that are refused, and what to use instead."""

REFUSED_IF_ENABLED = {
    # These write files or send the run's figures elsewhere: a file says only how a run computes.
    **dict.fromkeys(("tensorboard", "csv_monitor", "wandb", "comet"), "--logger"),
    "autotuning": "sweep.py",
}
"""Sections that are refused unless their `enabled` is false, and what to use instead."""

NAMES_FILE = ("_file", "_path", "_dir")
"""Ends of the keys that name a file or a folder to write or read: flops_profiler.output_file, data_cluster_path."""

DEVICES = ("none", "cpu", "nvme")  # of offloading: DeepSpeed's OffloadDeviceEnum

OURS: dict[str, dict[str, Any]] = {
    "adam": {"name": "adamw", "weight_decay": 0.0},  # engine._configure_basic_optimizer; adam_w_mode false is Adam
    "adamw": {"name": "adamw", "weight_decay": 0.0},
    "lion": {"name": "lion", "lr": 0.001, "betas": [0.9, 0.999]},
    "sgd": {"name": "sgd", "momentum": 0.0},
    **{name: {"name": name} for name in ("adagrad", "adadelta", "rmsprop")},
    "warmuplr": {"name": "warmup_lr"},
    "warmupdecaylr": {"name": "warmup_decay_lr", "warmup_max_lr": 0.001},
    "warmupcosinelr": {"name": "warmup_cosine_lr"},
}
"""DeepSpeed's and torch's optimizers and schedules, in lower case, with those of their defaults that are not ours."""


def read(file: str) -> dict[str, Any]:
    """Returns the content of a file; raises UsageError if it is no DeepSpeed configuration, or sets what is refused."""
    raw = plain_data.read_json(Path(file), f"--ds_config {file}")
    if not isinstance(raw, dict):
        raise UsageError(f"--ds_config {file} must hold a JSON object")
    zero = raw.get("zero_optimization")
    inside = [item for section in (raw, *raw.values()) if isinstance(section, dict) for item in section.items()]
    wrong = [f"use {instead}, not {key}" for key, instead in REFUSED.items() if key in raw]
    sections = {key: value for key, value in raw.items() if value is not None and key in REFUSED_IF_ENABLED}
    wrong += [
        f"use {REFUSED_IF_ENABLED[key]}, not {key}"
        for key, section in sections.items()
        if not isinstance(section, dict) or section.get("enabled")
    ]
    wrong += [f"leave {name} out, which names a file" for name in _names_of_files(raw)]
    if str(raw.get("gradient_allreduce_op")).lower() == "sum":
        wrong.append(
            "leave gradient_allreduce_op sum out, which multiplies the gradients by the number of ranks, "
            "and choose the learning rate"
        )
    wrong += [f"{key} must be a whole number" for key in BATCH if not isinstance(_settled(raw).get(key, 1), int)]
    wrong += [f"{key} must be an object" for key, value in inside if key in SECTIONS and not isinstance(value, dict)]
    if isinstance(zero, dict) and zero.get("stage", 0) not in (0, 1, 2, 3):
        wrong.append("zero_optimization must have a stage from 0 to 3")
    offloads = {key: value for key, value in inside if key in DEPRECATED.values() and isinstance(value, dict)}
    wrong += [
        f"{key}.device must be one of {', '.join(DEVICES)}"
        for key, offload in offloads.items()
        if _settled(offload).get("device", "none") not in DEVICES
    ]
    if wrong:
        raise UsageError(f"--ds_config {file}: {'; '.join(wrong)}")
    return raw


def options(raw: Mapping[str, Any], recipe: Mapping[str, Any], flags: Sequence[str]) -> dict[str, Any]:
    """Returns what a DeepSpeed configuration says of train.py's options, as a recipe. `recipe` and `flags` say how many
    ranks there are: DeepSpeed multiplies a micro-batch by them. Raises UsageError if the batch is no multiple of the
    micro-batch, or an optimizer or a schedule has no counterpart."""
    said = _settled(raw)
    found = {"gradient_clip_val": said.get("gradient_clipping"), **_batch(said, recipe, flags)}
    enabled = [said.get(key, {}).get("enabled") for key in ("fp16", "bf16")]
    if any(enabled) or enabled == [False, False]:
        found["precision"] = "16-mixed" if enabled[0] else "bf16-mixed" if enabled[1] else "32-true"
    if optimizer := _named(raw, "optimizer"):
        optimizer["weight_decay_on"], by_torch = "all", optimizer.pop("torch_adam", False)
        if not optimizer.pop("adam_w_mode", True) and raw["optimizer"]["type"].lower() == "adam":
            optimizer["name"] = "adam"
        elif by_torch:  # whose AdamW decays by default
            optimizer["weight_decay"] = raw["optimizer"]["params"].get("weight_decay", 0.01)
    if schedule := _named(raw, "scheduler"):
        optimizer |= {"lr": lr} if (lr := schedule.pop("warmup_max_lr", "auto")) != "auto" else {}
        schedule["total_steps"] = schedule.pop("total_num_steps", "auto")
    found |= {"optimizer": optimizer or None, "schedule": schedule or None}
    return _settled(found)


def check(config: Config, said: Mapping[str, Any]) -> None:
    """Raises UsageError with all options in which flags have overridden what the file `said`."""
    given, theirs = flat(config), flat(said)
    others = [key for key in ("optimizer", "schedule") if given[key] != theirs.get(key, given[key])]
    conflicts = [
        f"--{option} {given[option]} (file: {value})"
        for option, value in theirs.items()
        if given.get(option, value) != value and option.split(".")[0] not in {*others} - {option}
    ]
    if conflicts:
        advice = 'leave out the flag, or write "auto" into the file'
        raise UsageError(f"--ds_config {config.ds_config}: {', '.join(conflicts)}: {advice}")


def flags_of(said: Mapping[str, Any]) -> list[str]:
    """Returns a recipe as flags."""
    return [part for option, value in flat(said).items() for part in (f"--{option}", str(value))]


def for_engine(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what DeepSpeed's engine gets of a configuration: without what becomes options, "auto" and null."""
    translated = (*BATCH, "gradient_clipping", "optimizer", "scheduler")
    raw = {key: value for key, value in _settled(content).items() if key not in translated}
    zero = raw["zero_optimization"] = {**raw.get("zero_optimization", {})}
    for old, new in DEPRECATED.items():
        if zero.pop(old, False):  # even if it is false, DeepSpeed prints a warning three times
            zero.setdefault(new, {"device": "cpu"})
    return raw


def spec_of(file: str) -> Spec:
    """Returns the strategy that a file stands for; raises UsageError, see `read`."""
    raw = for_engine(read(file))
    zero = raw["zero_optimization"]
    devices = [zero.get(section, {}).get("device", "").replace("none", "") for section in DEPRECATED.values()]
    return Spec(
        "deepspeed",
        "a raw DeepSpeed configuration",
        casts=True,
        spreads_experts=True,
        stage=zero.get("stage", 0),
        offload_optimizer=devices[0],
        offload_parameters=devices[1],
        super_offload=bool(zero.get("offload_optimizer", {}).get("super_offload")),
        shards_tensors=zero.get("stage", 0) > 0,
        averages=devices[1] != "nvme",
        raw=raw,
    )


def _names_of_files(section: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Returns the names of all options that name a file, apart from the disk to offload to."""
    found = []
    for key, value in section.items():
        if isinstance(value, dict):
            found += _names_of_files(value, f"{prefix}{key}.")
        elif value and key.endswith(NAMES_FILE) and key != "nvme_path":
            found.append(prefix + key)
    return found


def _settled(value: Any) -> Any:
    """Returns a section without the values that are "auto" or null."""
    if not isinstance(value, dict):
        return value
    return {key: _settled(inner) for key, inner in value.items() if inner not in ("auto", None)}


def _named(raw: Mapping[str, Any], section: str) -> dict[str, Any]:
    """Returns the options of an optimizer or a schedule with its name here; nothing without one."""
    kind = str(raw.get(section, {}).get("type", ""))
    if section in raw and kind.lower() not in OURS:
        raise UsageError(f"--ds_config: {section} {kind} has no counterpart here; these have: {', '.join(OURS)}")
    return {**OURS[kind.lower()], **raw[section].get("params", {})} if kind else {}


def _batch(said: Mapping[str, Any], recipe: Mapping[str, Any], flags: Sequence[str]) -> dict[str, int | None]:
    """Returns global batch and accumulation; with a micro-batch, they follow from the ranks that are asked for."""
    batch, micro, parts = map(said.get, BATCH)
    if not micro:
        return {"batch_size": batch, "accumulate": parts}
    parser = FlagParser()
    for option in ("devices", "num_nodes", "accelerator", "accumulate"):
        parser.add_argument(f"--{option}", type=yaml.safe_load, default=recipe.get(option, getattr(Config, option)))
    asked = parser.parse_known_args(flags)[0]
    gpus = gpu_count() if asked.accelerator != "cpu" else 0
    ranks = (max(1, gpus) if asked.devices == "auto" else asked.devices) * asked.num_nodes
    if "LOCAL_WORLD_SIZE" in os.environ:  # set by the launcher that started this rank
        ranks = int(os.environ["WORLD_SIZE"])
    parts = parts or (batch and max(1, batch // (micro * ranks))) or asked.accumulate
    if batch not in (None, micro * ranks * parts):
        identity = f"micro-batch {micro} x {ranks} ranks x accumulation {parts}"
        raise UsageError(f"--ds_config: train_batch_size {batch} is not {identity}")
    return {"batch_size": micro * ranks * parts, "accumulate": parts}
