"""Reads the DeepSpeed configuration of DeepSpeedExamples, and a user's own configuration (`--ds_config FILE.json`).
Global batch size, accumulation, clipping, precision, optimizer and scheduler of the user's file become options of
train, and `for_engine` returns the rest for the engine.

Names, defaults and meanings are DeepSpeed's (0.19.8). The value "auto" leaves an option to the flags, as in Hugging
Face's Trainer.
"""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from cifar_zero.config.placement import Placement
from cifar_zero.config.settings import Settings, flat
from cifar_zero.config.strategy_specs import STRATEGIES, Device, Spec
from cifar_zero.core import plain_data
from cifar_zero.core.errors import UsageError
from cifar_zero.core.usage import nearest

Dtype = Literal["fp32", "bf16", "fp16"]

# The configuration of DeepSpeedExamples (training/cifar/cifar10_deepspeed.py).
EXAMPLES = Path(__file__).with_name("deepspeed_examples.json")

KEYS = Path(__file__).with_name("deepspeed_keys.json")
"""A file with DeepSpeed's release and the keys that it reads, by section. null stands for a value, or for a section
that may have any key. `python -m tests.support.deepspeed_keys` writes the file."""

RENAMED = {
    "gradient_clipping": "gradient_clip_val",
    "train_batch_size": "batch_size",
    "gradient_accumulation_steps": "accumulate",
}
"""DeepSpeed keys that become an option of train, and the name of that option."""

OFFLOADS = ("offload_optimizer", "offload_param")  # sections of `zero_optimization`

RESTRICTED: dict[str, tuple[Any, str]] = {
    # The first imports modules that the file names. The second unpickles "universal" checkpoints unchecked.
    "torch_autocast.enabled": (False, "use --precision bf16-mixed"),
    "checkpoint": (
        {"load_universal": False, "tag_validation": "Warn"},
        "use --resume, which reads the checkpoints of every strategy",
    ),
    # These write files or send metrics elsewhere, whereas the configuration may only change how a run computes.
    **dict.fromkeys(
        ("tensorboard.enabled", "csv_monitor.enabled", "wandb.enabled", "comet.enabled"), (False, "use --logger")
    ),
    "autotuning.enabled": (False, "use Optuna (docs/sweep.py)"),
    "flops_profiler.output_file": (None, "remove it, because it names a file"),
    # From this old name of bf16 no precision would be read.
    "bfloat16": (None, "use bf16"),
    # These change the gradients or the updates.
    "gradient_allreduce_op": ("mean", "the gradients would be multiplied by the number of ranks"),
    "gradient_predivide_factor": (1, "use prescale_gradients"),  # wrong at ZeRO 3 if it is the number of ranks
    "managed_gradient_accumulation": (True, "use --accumulate"),
    "fp16.auto_cast": (False, "soft labels would be rounded"),
    "data_efficiency": ({"enabled": False}, "remove it, because it drops tokens or images"),
    "weight_quantization": ({"enabled": False}, "remove it, because it rounds the initial weights"),
    "zero_optimization.zenflow": (None, "remove it, because it updates weights with old gradients"),
    "zero_optimization.compute_grad_norm": (True, "clipping and --check_steps need the norm"),
    # The other part is updated by an optimizer that no schedule changes and no checkpoint contains (zero/stage3.py).
    "zero_optimization.offload_optimizer.ratio": (1, "the other part would keep its first learning rate"),
    # These change the model's layers, or which ranks share data or experts. Loaders and checkpoints do not expect it.
    "use_data_before_expert_parallelism": (False, "use --model.ep_size"),
    "expert_parallel": (None, "use --model.ep_size"),
    "tensor_parallel": ({"autotp_size": 0}, "use --strategy tensor_parallel"),
    "sequence_parallel_size": (1, "use --strategy tensor_parallel"),
    "hybrid_engine.enabled": (False, "remove it, because it is for generating text"),
    "compile.deepcompile": (False, "use --compile"),
    # Checkpoints could not be read, or would lose precision.
    "datastates_ckpt": (None, "remove it, because its checkpoints cannot be read"),
    "zero_optimization.elastic_checkpoint": (False, "its checkpoints cannot be read"),
    "zero_optimization.legacy_stage1": (False, "DeepSpeed no longer has it"),
    "zero_optimization.load_from_fp32_weights": (True, "a resumed run would round its weights to 16 bits"),
    "zero_optimization.pipeline_loading_checkpoint": (False, "ranks on several nodes would wait for each other"),
    "zero_optimization.zero_quantized_nontrainable_weights": (False, "checkpoints would hold quantized weights"),
}
"""The keys that would change what a run computes, break its checkpoints, load code or name a file. Each has the
accepted value (None: the key must not be set), and what to use instead or the reason. The key of a section stands for
all keys in it. If its value is a dict, only the keys of this dict may be set, to these values. The table is complete
for DeepSpeed 0.19.8: as read in its code, all other keys of KEYS do none of this, but some lower the precision, as
their names say."""

READ_ALTHOUGH_OFF = ("fp16", "data_efficiency", "weight_quantization")
"""Sections of which DeepSpeed reads some keys also if `enabled` is false, such as `fp16.auto_cast`."""

DEVICES: dict[str, Device] = {"none": "", "cpu": "cpu", "nvme": "nvme"}  # values of DeepSpeed's OffloadDeviceEnum

EQUIVALENTS: dict[str, dict[str, Any]] = {
    "adam": {"name": "adamw", "weight_decay": 0.0},  # see DeepSpeed's engine._configure_basic_optimizer
    "adamw": {"name": "adamw", "weight_decay": 0.0},
    "lion": {"name": "lion", "lr": 0.001, "betas": [0.9, 0.999]},
    "sgd": {"name": "sgd", "momentum": 0.0},
    **{name: {"name": name} for name in ("adagrad", "adadelta", "rmsprop")},
    "warmuplr": {"name": "warmup_lr"},
    "warmupdecaylr": {"name": "warmup_decay_lr", "warmup_max_lr": 0.001},
}
"""Maps the name of an optimizer or scheduler of DeepSpeed or torch, in lower case, to options of this project: the name
in this project's registry, and each default of DeepSpeed or torch that differs from the registry's default."""


def get_ds_config(stage: int, dtype: Dtype) -> dict[str, Any]:
    """Returns the configuration of DeepSpeedExamples' CIFAR-10 program with this ZeRO stage and precision, ready for
    `deepspeed.initialize`. A run uses all of it except batch size, clipping, optimizer and scheduler, which are options
    of the run."""
    content = json.loads(EXAMPLES.read_text())
    content["zero_optimization"]["stage"] = stage
    for key in ("bf16", "fp16"):
        content[key]["enabled"] = key == dtype
    return content


def options_of(file: str) -> dict[str, Any]:
    """Returns the options of train that a DeepSpeed configuration file sets, keyed by flag. For an optimizer or
    scheduler, they include the options whose default in DeepSpeed is not this project's. Raises UsageError if the file
    is refused (see `_read`), or if its optimizer or scheduler has no counterpart."""
    raw = _read(file)
    content = _without_auto(raw)
    options = {option: content[key] for key, option in RENAMED.items() if key in content}
    fp16, bf16 = (_section(content, key).get("enabled") for key in ("fp16", "bf16"))
    if fp16:
        options["precision"] = "16-mixed"
    elif bf16:
        options["precision"] = "bf16-mixed"
    elif fp16 is False and bf16 is False:
        options["precision"] = "32-true"
    optimizer, schedule = (_equivalent(raw, key, f"--ds_config {file}: {key}") for key in ("optimizer", "scheduler"))
    if optimizer:
        optimizer["weight_decay_on"] = "all"
        adam_w_mode, by_torch = optimizer.pop("adam_w_mode", True), optimizer.pop("torch_adam", False)
        if not adam_w_mode and raw["optimizer"]["type"].lower() == "adam":  # without decoupled weight decay it is Adam
            optimizer["name"] = "adam"
        elif by_torch and "weight_decay" not in raw["optimizer"]["params"]:  # torch's AdamW decays the weights
            optimizer["weight_decay"] = 0.01
    if "warmup_max_lr" in schedule:
        optimizer["lr"] = schedule.pop("warmup_max_lr")
    if "total_num_steps" in schedule:
        schedule["total_steps"] = schedule.pop("total_num_steps")
    return options | flat({"optimizer": optimizer, "schedule": schedule})


def summary(file: str) -> str:
    """Returns a line that says which keys of a DeepSpeed configuration file take effect, and how."""
    raw, options = _without_auto(_read(file)), options_of(file)
    engine = [name for name, _ in _leaves(for_engine(raw))]
    zero = _section(raw, "zero_optimization")
    parts = [f"{file}: ZeRO {zero.get('stage', 0)}"]
    if options:
        parts.append(f"sets {' '.join(flags_of(options))}")
    if engine:
        parts.append(f"passed on to DeepSpeed: {', '.join(engine)}")
    if zero.get("stage", 0) < 3 and (zero.get("offload_param") or zero.get("cpu_offload_param")):
        parts.append("offload_param is ignored, because it needs ZeRO stage 3")
    return "; ".join(parts)


def flags_of(options: Mapping[str, Any]) -> list[str]:
    return [part for option, value in options.items() for part in (f"--{option}", str(value))]


def check_flags(settings: Settings) -> None:
    """Raises UsageError for the first option whose value differs from the DeepSpeed configuration file. Call it only if
    the flag --ds_config names the file, because flags may override a file that a recipe names."""
    chosen, file = flat(settings), settings.placement.ds_config
    for option, value in options_of(file).items():
        if chosen[option] != value:
            raise UsageError(
                f"--ds_config {file}: --{option} {chosen[option]} is not the file's {value}: "
                'leave out the flag, or write "auto" into the file'
            )


def for_engine(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the part of a DeepSpeed configuration that the engine gets, without the keys of RENAMED, optimizer and
    scheduler. The old keys `cpu_offload` and `cpu_offload_param` become sections. Below ZeRO 3 `offload_param` is left
    out, as DeepSpeed ignores it."""
    raw = {key: value for key, value in content.items() if key not in (*RENAMED, "optimizer", "scheduler")}
    zero = raw["zero_optimization"] = {**_section(raw, "zero_optimization")}
    for section, old in zip(OFFLOADS, ("cpu_offload", "cpu_offload_param"), strict=True):
        if zero.pop(old, False):  # DeepSpeed prints a warning three times, even if it is false
            zero.setdefault(section, {"device": "cpu"})
    if zero.get("stage", 0) != 3:
        zero.pop("offload_param", None)
    return raw


def spec_of(placement: Placement) -> Spec:
    """Returns the `Spec` of a placement's strategy, or of the raw configuration that replaces it. Raises UsageError if
    the file is refused (see `_read`), if its ZeRO stage or an offload device is unknown, or if the stage is too low to
    offload to that device."""
    file = placement.ds_config
    if not file:
        return STRATEGIES[placement.strategy]
    raw = for_engine(_without_auto(_read(file)))
    zero = raw["zero_optimization"]
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise UsageError(f"--ds_config {file}: zero_optimization must have a stage from 0 to 3")
    devices = []
    for section in OFFLOADS:
        device = _section(zero, section).get("device", "none")
        if device not in DEVICES:
            raise UsageError(f"--ds_config {file}: {section}.device must be one of {', '.join(DEVICES)}")
        least = 1 if (section, device) == ("offload_optimizer", "cpu") else 3
        if DEVICES[device] and stage < least:  # DeepSpeed (0.19.8) would ignore the section, or fail in the first step
            raise UsageError(f"--ds_config {file}: {section} to {device} needs ZeRO stage {least}, not {stage}")
        devices.append(DEVICES[device])
    return Spec(
        "deepspeed",
        "a raw DeepSpeed configuration",
        stage=stage,
        offload_optimizer=devices[0],
        offload_parameters=devices[1],
        super_offload=bool(zero.get("offload_optimizer", {}).get("super_offload")),
        raw=raw,
    )


def nvme_paths(placement: Placement, spec: Spec) -> dict[str, str]:
    """Returns the directories (empty if not given) to which a run offloads on NVMe, keyed by the option that names
    them."""
    if spec.raw is None:
        return {"--nvme_path": placement.nvme_path} if spec.offload_optimizer == "nvme" else {}
    zero = spec.raw["zero_optimization"]
    return {
        f"--ds_config {placement.ds_config}: {section}.nvme_path": str(zero[section].get("nvme_path", ""))
        for section in OFFLOADS
        if zero.get(section, {}).get("device") == "nvme"
    }


def _read(file: str) -> dict[str, Any]:
    """Returns the content of a DeepSpeed configuration file. Raises UsageError if it is not a DeepSpeed configuration
    or sets a refused key."""
    raw = plain_data.read_json(Path(file), f"--ds_config {file}")
    if not isinstance(raw, dict):
        raise UsageError(f"--ds_config {file} must hold a JSON object")
    if isinstance(is_on := raw.get("zero_optimization"), bool):  # an old form, which DeepSpeed still reads
        raw["zero_optimization"] = {"stage": int(is_on)}
    _check_keys(raw, known_keys(), f"--ds_config {file}")
    for name, value in _leaves(_switched_on(_without_auto(raw), known_keys())):
        for key, (accepted, advice) in RESTRICTED.items():
            if isinstance(accepted, dict):
                accepted = accepted.get(name.removeprefix(f"{key}."))
            if f"{name}.".startswith(f"{key}.") and value != accepted:
                raise UsageError(f"--ds_config {file}: {name} {json.dumps(value)} is refused: {advice}")
    return raw


@cache
def known_keys() -> dict[str, Any]:
    """Returns the keys that DeepSpeed reads: a dictionary for each section, and None for each null in KEYS."""
    return json.loads(KEYS.read_text())["keys"]


def _check_keys(section: Mapping[str, Any], known: Mapping[str, Any], what: str, prefix: str = "") -> None:
    """Raises UsageError for the first key in a section that DeepSpeed does not read. The message begins with `what`."""
    for key in section:
        if key not in known:
            elsewhere = [name for name, _ in _leaves(known_keys()) if name.split(".")[-1] == key]
            meant = nearest(key, known, cutoff=0.65, otherwise="remove it")
            if len(elsewhere) == 1:
                meant = f"did you mean {elsewhere[0]}?"
            raise UsageError(f"{what}: DeepSpeed does not read {prefix}{key}, so it has no effect: {meant}")
        if known[key]:
            _check_keys(_section(section, key, f"{what}: {prefix}"), known[key], what, f"{prefix}{key}.")


def _switched_on(section: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a section without its inner sections that DeepSpeed ignores, because their key `enabled` is false."""
    active = dict[str, Any]()
    for key, value in section.items():
        keys = known[key] or {}
        if isinstance(value, dict) and keys and key not in READ_ALTHOUGH_OFF:
            if "enabled" in keys and value.get("enabled") is False:
                continue
            value = _switched_on(value, keys)
        active[key] = value
    return active


def _section(content: Mapping[str, Any], key: str, what: str = "") -> dict[str, Any]:
    """Returns the object under a key, or an empty dict if the key is missing, null or "auto". Raises UsageError for
    another value. Its message begins with `what`, which names the file and the section that has the key."""
    section = content.get(key)
    if section in (None, "auto"):
        return {}
    if not isinstance(section, dict):
        raise UsageError(f"{what}{key} must be an object, not {section}")
    return section


def _leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _without_auto(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: _without_auto(inner) for key, inner in value.items() if inner not in ("auto", None)}


def _equivalent(raw: Mapping[str, Any], key: str, what: str) -> dict[str, Any]:
    """Returns the options of the file's optimizer or scheduler (`key`), including its name in this project, or an empty
    dict. An option that is "auto" is left out, so that flags and this project's default decide it, not DeepSpeed's
    default. Raises UsageError, whose message begins with `what`, if it has no counterpart in this project, or if
    `params` has the key `name`."""
    section = _section(raw, key)
    if not section:
        return {}
    kind = str(section.get("type", ""))
    if kind.lower() not in EQUIVALENTS:
        raise UsageError(f"{what} {kind} is not supported: choose from {', '.join(EQUIVALENTS)}")
    params = _section(section, "params", f"{what}.")
    if "name" in params:  # this project's name for the optimizer or scheduler is under this key
        raise UsageError(f"{what} {kind} has no parameter `name`: remove it from params")
    return _without_auto({**EQUIVALENTS[kind.lower()], **params})
