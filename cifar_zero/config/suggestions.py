"""What a command line with an unknown name may have meant."""

import re
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser

from cifar_zero.config.flags import Config
from cifar_zero.config.values import REGISTRIES
from cifar_zero.core import user_code
from cifar_zero.core.errors import UsageError
from cifar_zero.core.usage import nearest, nearest_flag
from cifar_zero.models import PACKAGES

# Options of Lightning's Trainer that have their own flag here, so that there is only one owner of each setting.
SAME = ("accelerator", "devices", "gradient_clip_val", "logger", "max_steps", "num_nodes", "precision", "strategy")
OWNED = {name: f"--{name}" for name in SAME} | {
    "accumulate_grad_batches": "--accumulate",
    "callbacks": "the flag --trainer.callbacks, which no recipe may set: it loads code",
    "default_root_dir": "--out",
    "enable_checkpointing": "--bench_steps for a run without checkpoints",
    "enable_progress_bar": "2>/dev/null, as the progress bar goes to the standard error",
    "gradient_clip_algorithm": "--gradient_clip_val (clipping is by global norm under every strategy)",
    "log_every_n_steps": "--log_interval",
    "max_epochs": "--epochs",
    "plugins": "--strategy",
    "reload_dataloaders_every_n_epochs": "--data.loader",
    "use_distributed_sampler": "--data.loader (it shards the data itself)",
}

PRECISIONS = {
    **dict.fromkeys(("16", "fp16", "float16", "half"), "16-mixed"),
    **dict.fromkeys(("bf16", "bfloat16", "amp"), "bf16-mixed"),
    **dict.fromkeys(("32", "fp32", "float32", "full"), "32-true"),
}
"""Other names of the formats of --precision."""


def choices(key: str) -> list[str]:
    """Returns the names of all models, optimizers or schedules."""
    return [*REGISTRIES[key], *(f"{source}:NAME" for source in (*PACKAGES, "FILE.py") if key == "model")]


def chosen(tree: dict[str, Any], key: str) -> str:
    """Returns the name of the model, optimizer or schedule of a recipe. Raises UsageError: it is unknown."""
    name = tree.get(key, {}).get("name", getattr(Config(), key).name)
    if name not in REGISTRIES[key]:
        if key == "model" and str(name).endswith(".py"):
            found = user_code.names_in(Path(name)) or ["NAME"]
            raise UsageError(f"--model {name}: did you mean {' or '.join(f'--model {name}:{own}' for own in found)}?")
        if key == "model" and ":" in str(name):
            raise UsageError(f"the recipe's model is your own code: name it on the command line too, --model {name}")
        raise UsageError(f"unknown {key} {name!r}: {nearest(str(name), choices(key))}")
    return name


def refuse_unknown(parser: ArgumentParser, flags: list[str], tree: dict[str, Any]) -> None:
    """Raises UsageError for the first unknown option of flags and recipe."""
    known = {flag.lstrip("-") for action in parser._actions for flag in action.option_strings} | {*REGISTRIES}
    given = [flag[2:].split("=")[0] for flag in flags if flag.startswith("--")]
    for key, value in tree.items():
        given += [f"{key}.{inner}" for inner in value] if isinstance(value, dict) else [key]
    for key in given:
        if key.startswith("trainer.") or key in known or ("model.kwargs" in known and key.startswith("model.kwargs.")):
            if (option := key.removeprefix("trainer.")) != key and option in OWNED:
                raise UsageError(f"--{key} is not passed on to the Trainer: use {OWNED[option]}")
            continue
        raise UsageError(f"unknown option --{key}: {_of_another(key, tree) or nearest_flag(key, known)}")


def _of_another(key: str, tree: dict[str, Any]) -> str:
    """Returns half a sentence with the option of another model, optimizer or schedule that was meant; empty if the
    chosen one has an option like it, or none has."""
    section, _, option = key.partition(".")
    if section not in REGISTRIES or not option:
        return ""
    name, options = chosen(tree, section), {}
    for other, entry in REGISTRIES[section].items():
        for known in get_close_matches(option, [field.name for field in fields(entry)], 1, 0.7):
            options.setdefault(known, []).append(other)
    if not options or any(name in others for others in options.values()):
        return ""
    (meant,) = get_close_matches(option, options, 1, 0.7)
    return f"--{section}.{meant} is an option of {', '.join(options[meant])}, not of {name}"


def with_meant(message: str) -> str:
    """Returns jsonargparse's message, with the choice that was meant if it refuses one."""
    refused = re.search(r"expected one of (\[.*\]), not (.+)", message)
    known = yaml.safe_load(refused[1]) if refused else []
    meant = PRECISIONS.get(refused[2], refused[2]) if refused else ""
    close = get_close_matches(meant, map(str, known), 1, 0.65)
    return f"{message}: did you mean {close[0]}?" if close else message


def one_line(error: Exception) -> str:
    """Returns jsonargparse's message without the names of Python types."""
    text = " ".join(str(error).split())
    text = re.sub(r'^Parser key "(.*?)": ', r"--\1: ", text)
    text = re.sub(r"Does not validate .* Errors: - (.*) Given value type: .* Given value: ", r"\1. Got value: ", text)
    text = re.sub(r"Expected an? (?:<class '(\w+)'>|typing.Literal)", lambda m: f"expected {m[1] or 'one of '}", text)
    text = text.replace("expected list", "expected a list such as [1, 2]")
    return text.replace(" - expected", " or").replace(". Got value:", ", not")
