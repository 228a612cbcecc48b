"""Refuses unknown options, unknown names and values of the wrong type, and suggests what was probably meant."""

import re
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from jsonargparse import ArgumentError, ArgumentParser

from cifar_zero.config.recipe import Recipe
from cifar_zero.config.settings import REGISTRIES
from cifar_zero.core.errors import UsageError
from cifar_zero.core.plain_data import is_plain
from cifar_zero.core.usage import nearest, nearest_flag

BASE_60 = re.compile(r"\d:[0-5]?\d")  # part of a number in base 60, such as 1:30


ELSEWHERE = {
    "gpus": "devices",
    "num_gpus": "devices",
    "nproc_per_node": "devices",
    "nnodes": "num_nodes",
    "learning_rate": "optimizer.lr",
    "gradient_clipping": "gradient_clip_val",
    "fp16": "precision",
    "bf16": "precision",
    "deepspeed": "strategy",
    "deepspeed_config": "ds_config",
    "accumulate_grad_batches": "accumulate",
    "gradient_accumulation_steps": "accumulate",
}
"""Options of other programs, and the options of train that do the same."""

OWNED = {
    "accelerator": "--accelerator",
    "accumulate_grad_batches": "--accumulate",
    "callbacks": "the flag --trainer.callbacks, which no recipe may set, because it loads code",
    "default_root_dir": "--out",
    "devices": "--devices",
    "enable_checkpointing": "--bench_steps for a run without checkpoints",
    "enable_progress_bar": "--log_interval, which sets how often a line of progress is printed",
    "gradient_clip_algorithm": "--gradient_clip_val (clipping is by global norm under every strategy)",
    "gradient_clip_val": "--gradient_clip_val",
    "log_every_n_steps": "--log_interval",
    "logger": "--logger",
    "max_epochs": "--epochs",
    "max_steps": "--max_steps",
    "num_nodes": "--num_nodes",
    "plugins": "--strategy",
    "precision": "--precision",
    "reload_dataloaders_every_n_epochs": "--data.loader",
    "strategy": "--strategy",
    "use_distributed_sampler": "--data.loader (it shards the data itself)",
}
"""Options of Lightning's Trainer that are refused, because this program has its own flag, and what to use instead."""


def choices(key: str) -> list[str]:
    """Returns the names that --model, --optimizer or --schedule (`key`) accepts."""
    others = ["torchvision:NAME", "FILE.py:NAME"] if key == "model" else []
    return [*REGISTRIES[key], *others]


def chosen(options: Mapping[str, Any], key: str) -> str:
    """Returns the name of the model, optimizer or schedule (`key`) that `options` choose, or the default. Raises
    UsageError if the name is unknown. A model in the user's code is known only if the command line has named it (see
    `command_line.allow_code`)."""
    name = str(options.get(key, getattr(Recipe(), key).name))
    if name in REGISTRIES[key]:
        return name
    if key == "model" and name.endswith(".py"):
        raise UsageError(f"--model {name}: name the class too, --model {name}:NAME")
    if key == "model" and ":" in name:
        raise UsageError(f"the recipe's model is your own code: name it on the command line too, --model {name}")
    raise UsageError(f"unknown {key} {name!r}: {nearest(name, choices(key))}")


def refuse_unknown(parser: ArgumentParser, options: Mapping[str, Any]) -> None:
    """Raises UsageError for the first option that `parser` does not know. Unknown options are allowed under
    model.kwargs, if the parser has it, and under trainer, except those in OWNED."""
    known = {flag.lstrip("-") for action in parser._actions for flag in action.option_strings} | {*REGISTRIES}
    known -= {f"{key}.name" for key in REGISTRIES}
    for option in options:
        section, _, name = option.partition(".")
        if section == "trainer" and name in OWNED:
            raise UsageError(f"--{option} is not passed on to the Trainer: use {OWNED[name]}")
        is_free = section == "trainer" or (option.startswith("model.kwargs.") and "model.kwargs" in known)
        if option not in known and not is_free:
            meant = nearest_flag(option, known)
            if (same := ELSEWHERE.get(option.rpartition(".")[2])) in known:
                meant = f"did you mean --{same}?"
            raise UsageError(f"unknown option --{option}: {meant}")


def refuse_base_60(parser: ArgumentParser, options: Mapping[str, Any]) -> None:
    """Raises UsageError for a text such as 1:30 where a number is expected. jsonargparse (4.53) would read it in base
    60, as 90, like YAML 1.1."""
    for action in parser._actions:
        hint = getattr(action, "_typehint", str)
        if BASE_60.search(str(options.get(action.dest, ""))) and not _takes_text(hint):
            raise UsageError(f"--{action.dest}: expected {described(hint)}, not {options[action.dest]}")


def _takes_text(hint: Any) -> bool:
    return hint is str or any(map(_takes_text, get_args(hint)))


def refuse_mistyped(parser: ArgumentParser, options: Mapping[str, Any]) -> None:
    """Raises UsageError for the first value that does not have the type of its option. jsonargparse (4.53) names the
    option only in the text of its error, so each value is parsed alone."""
    for action in parser._actions:
        hint = getattr(action, "_typehint", None)
        if hint is not None and action.dest in options:
            check_type(f"--{action.dest}", options[action.dest], hint)


def check_type(flag: str, value: Any, hint: Any) -> None:
    """Raises UsageError unless jsonargparse can convert `value` to the type `hint`."""
    alone = ArgumentParser(exit_on_error=False)
    alone.add_argument("--value", type=hint)
    try:
        alone.parse_object({"value": value})
    except (ArgumentError, TypeError, ValueError) as error:
        raise UsageError(f"{flag}: expected {described(hint)}, not {value}") from error


def described(hint: Any) -> str:
    """Returns the name of a type for an error message, such as `int or one of ['auto']`."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind is Literal:
        return f"one of {[*inner]}"
    if kind in (Union, UnionType):
        return " or ".join(map(described, inner))
    if kind is list:
        return f"a list of {described(inner[0])}"
    if kind is tuple:
        return f"a list [{', '.join(map(described, inner))}]"
    return getattr(hint, "__name__", str(hint))


def check_plain_type(flag: str, value: Any, hint: Any) -> None:
    """Raises UsageError unless jsonargparse can convert `value` to `hint`. Of a union, only types of plain data
    (`is_plain`) count, because for a class jsonargparse would import what a string in `value` names. A bool is not a
    number."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    plain = [kind for kind in kinds if is_plain(kind) and kind is not NoneType]
    if value is None and NoneType in kinds:
        return
    if isinstance(value, bool) and bool not in plain:  # jsonargparse (4.53) takes it for a number
        raise UsageError(f"{flag}: expected {described(Union[*plain])}, not {value}")
    check_type(flag, value, Union[*plain])
