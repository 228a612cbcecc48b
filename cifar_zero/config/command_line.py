"""Parses the command line and YAML recipes into a checked `Config`, with jsonargparse; no torch, no Lightning.

The options of the chosen model, optimizer and schedule are typed flags like all others (`--optimizer adam
--optimizer.betas '[0.8, 0.999]'`), so their names are read first, and then the parser is built for them.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace, set_parsing_settings

from cifar_zero.config import deepspeed_examples, ds_config, help
from cifar_zero.config.flags import (
    SECTIONS,
    Choice,
    Config,
    DataConfig,
    DeviceConfig,
    FineTuneConfig,
    OutputConfig,
    RegularizationConfig,
    TrainingConfig,
    check_no_consent,
    config_of,
)
from cifar_zero.config.run import Consent
from cifar_zero.config.strategy_specs import AUTO
from cifar_zero.config.suggestions import choices, chosen, one_line, refuse_unknown, with_meant
from cifar_zero.config.values import REGISTRIES, check_values
from cifar_zero.core import plain_data, user_code
from cifar_zero.core.errors import UsageError
from cifar_zero.core.programs import command
from cifar_zero.core.usage import FlagParser
from cifar_zero.models import MODELS, add_own

SWITCHES = ("trust", *(field.name for field in fields(Config) if field.default is False))  # flags that need no value
CALLBACKS = r"--trainer\.callbacks([.+=]|$)"  # flags of the callbacks, in all forms of LightningCLI
LISTS = ("logger", "hparams", "trainable", "wandb_tags", "lora.target")  # flags that take several values
PLOT = "OUT/schedule.png"  # what --plot_schedule without a value names, with the folder --out
NAMED = ("strategy", "ds_config", "plot_schedule")  # flags that name something, and are read before the others

OF_STRATEGY = (
    "strategy",
    "ds_config",
    "nvme_path",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "zero",
    "offload",
)
"""Options that another strategy may refuse."""

Before = Callable[[Config], dict[str, Any] | None]
"""Returns the configuration of the run that a command line continues; gets what it says of that run."""


def parse(argv: Sequence[str] | None = None, before: Before | None = None) -> Config:
    """Returns the configuration of a command line. Recipes (`--config`) override the defaults in their order, and flags
    override the recipes. `--help` and `--print_config` print and exit.

    Recipes and flags override what `before` returns: the configuration of an earlier run, as `read_recipe` does. That
    run's options of its strategy do not count under another one, and `--strategy auto` is its own. Raises UsageError
    for an unknown key, a value of the wrong type, or an unreadable recipe.
    """
    examples, argv = deepspeed_examples.take(sys.argv[1:] if argv is None else argv)
    short, rest = _short_forms().parse_known_args(argv)
    rest = split(rest, CALLBACKS)[1]
    if transform := vars(short)["augment.transform"]:
        user_code.allow(transform, "--augment.transform")
    if ":" in (short.model or "") and short.model not in MODELS:
        add_own(short.model)
    recipes = [*map(read_recipe, short.config)]
    tree, said = _collected(examples, recipes, short, rest)
    if before is not None and (earlier := before(_asked(tree, rest))) is not None:
        tree, said = _collected(examples, [_under(earlier, short), *recipes], short, rest)
    names = {key: chosen(tree, key) for key in REGISTRIES}

    parser = _parser(names, with_help=short.help is not None)
    if short.help is not None:
        print(parser.format_help() if short.help == "all" else help.short(parser), end="")
        raise SystemExit(0)
    refuse_unknown(parser, rest, tree)
    try:
        parser.set_defaults(parser.parse_object(tree, defaults=False).as_flat().__dict__)
        namespace = parser.parse_args(rest)
    except (ArgumentError, argparse.ArgumentError, TypeError, ValueError) as error:
        raise UsageError(with_meant(one_line(error))) from error
    config = _config(namespace, names)
    if config.plot_schedule == PLOT:
        config = replace(config, plot_schedule=str(Path(config.out, Path(PLOT).name)))
    ds_config.check(config, said)
    check_values(config)
    if short.print_config:
        print(dump(config), end="")
        raise SystemExit(0)
    return config


def _collected(
    examples: dict[str, Any], recipes: Sequence[dict[str, Any]], short: argparse.Namespace, flags: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns all recipes and short forms as one recipe, and what --ds_config says; `flags` are the other flags."""
    tree = {**examples}
    for recipe in recipes:
        if Path(theirs := recipe.get("ds_config") or "").is_file():  # what a finished run needs no more
            _overlay(tree, ds_config.options(ds_config.read(theirs), recipe, flags))
        _overlay(tree, recipe)
    said = ds_config.options(ds_config.read(short.ds_config), tree, flags) if short.ds_config else {}
    _overlay(tree, said)
    given = {key: value for key, value in vars(short).items() if value is not None}
    for section, option in (("augment", "transform"), ("lora", "target")):
        if (key := f"{section}.{option}") in given:
            _overlay(tree, {section: {option: given[key]}})
    _overlay(tree, {key: {"name": given[key]} for key in REGISTRIES if key in given})
    return tree | {key: given[key] for key in (*LISTS[:-1], *NAMED, *SWITCHES) if key in given}, said


def _asked(tree: dict[str, Any], flags: Sequence[str]) -> Config:
    """Returns what a command line says of an earlier run; its other options are not looked at yet."""
    parser = FlagParser()
    for option in ("resume", "out", "name"):
        parser.add_argument(f"--{option}", default=tree.get(option, getattr(Config, option)))
    parser.add_argument("--bench_steps", type=yaml.safe_load, default=tree.get("bench_steps", 0))
    parser.add_argument("--data.source", dest="data", default=tree.get("data", {}).get("source", "auto"))
    given = vars(parser.parse_known_args(flags)[0])
    named = {key: tree[key] for key in ("strategy", "ds_config", "find_lr") if key in tree}
    return Config(**{**given, **named, "data": DataConfig(given["data"]), "model": Choice(chosen(tree, "model"))})


def choosing(strategy: str) -> list[str]:
    """Returns the flags that choose a strategy, or a raw DeepSpeed configuration (*.json)."""
    raw = ["--strategy", Config.strategy, "--ds_config", strategy]
    return raw if strategy.endswith(".json") else ["--strategy", strategy]


def consent(argv: list[str] | None = None) -> Consent:
    """Returns the consent to run code that a command line gives; see `parse` for errors in it."""
    short, rest = _short_forms().parse_known_args(sys.argv[1:] if argv is None else argv)
    return Consent(short.trust is True, tuple(split(rest, CALLBACKS)[0]))


def dump(config: Config) -> str:
    """Returns the configuration as a YAML recipe, from which `--config` repeats the run."""
    tree = asdict(config)
    for key in REGISTRIES:
        choice: Choice = getattr(config, key)
        tree[key] = {"name": choice.name, **choice.options}
    return yaml.safe_dump(json.loads(json.dumps(tree)), sort_keys=False)  # by JSON, because YAML has no tuples


def _short_forms() -> argparse.ArgumentParser:
    """Parses what jsonargparse cannot: names of choices, lists without brackets, switches without a value."""
    parser = FlagParser()
    parser.add_argument("--config", action="extend", nargs="+", default=[])
    for key in REGISTRIES:
        parser.add_argument(f"--{key}", f"--{key}.name", dest=key)
    for key in LISTS:
        parser.add_argument(f"--{key}", nargs="+")
    parser.add_argument("--augment.transform")
    parser.add_argument("-h", "--help", nargs="?", const="")
    parser.add_argument("--strategy")
    parser.add_argument("--ds_config", "--deepspeed_config")
    parser.add_argument("--plot_schedule", nargs="?", const=PLOT)
    parser.add_argument("--local_rank")  # given by DeepSpeed's launcher, which sets LOCAL_RANK too
    for switch in SWITCHES:
        parser.add_argument(f"--{switch}", nargs="?", const="true", type=yaml.safe_load)
    parser.add_argument("--print_config", action="store_true")
    return parser


def split(flags: Sequence[str], pattern: str) -> tuple[list[str], list[str]]:
    """Returns the flags of which a regular expression matches the beginning, with their values, and the others."""
    found: list[str] = []
    others: list[str] = []
    matches = False
    for flag in flags:
        matches = re.match(pattern, flag) is not None if flag.startswith(("--", "-h")) else matches
        (found if matches else others).append(flag)
    return found, others


def _parser(names: dict[str, str], with_help: bool) -> ArgumentParser:
    set_parsing_settings(docstring_parse_attribute_docstrings=with_help)  # which take a third of the time
    parser = ArgumentParser(
        prog=command("train"),
        usage=help.USAGE,
        description="Trains and tests a CIFAR classifier with plain PyTorch, DDP, DeepSpeed ZeRO, FSDP2 and others.",
        epilog=help.epilog(),
        formatter_class=help.Formatter,
        exit_on_error=False,
        allow_abbrev=False,
    )
    recipes = parser.add_argument_group("recipes")
    recipes.add_argument("--config", metavar="FILE", help="YAML recipe; of several, the later ones override.")
    recipes.add_argument("--print_config", action="store_true", help="Print the configuration as a recipe and exit.")
    parser.add_argument_group("consent (on the command line only, never in a recipe)").add_argument(
        "--trust",
        type=bool,
        default=False,
        help="Load checkpoints that could run code. Only if you trust their author.",
    )
    for section in (DeviceConfig, TrainingConfig, RegularizationConfig, FineTuneConfig, OutputConfig):
        parser.add_class_arguments(section)
    for key, section in SECTIONS.items():
        parser.add_argument_group(section.__doc__).add_class_arguments(section, key, as_group=False)
    for key, registry in REGISTRIES.items():
        entry = registry[names[key]]
        group = parser.add_argument_group(f"{key} {names[key]}", description=help.summary(entry))
        described = f"Name, also as --{key} NAME; one of {', '.join(choices(key))}."
        group.add_argument(f"--{key}.name", default=names[key], help=described)
        group.add_class_arguments(entry, key, as_group=False)
    parser.add_argument_group("Lightning").add_argument(
        "--trainer",
        type=dict[str, plain_data.Plain],
        default={},
        help="Any other option of Lightning's Trainer, such as --trainer.limit_test_batches 10.",
    )
    return parser


def read_recipe(file: str | Path) -> dict[str, Any]:
    """Returns the content of a recipe or of a run's config.yaml. Raises UsageError: it cannot be one."""
    tree = plain_data.read_yaml(Path(file), f"--config {file}")
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise UsageError(f"--config {file} has no options: it must be a mapping such as 'epochs: 2'")
    check_no_consent(tree, f"--config {file}")
    for key, value in tree.items():
        if key in ("config", "print_config", "help"):
            raise UsageError(f"--config {file}: {key} is of the command line only: leave it out")
        if value is None:
            raise UsageError(f"--config {file}: {key} has no value")
        if key in (*SECTIONS, "trainer") and not isinstance(value, dict):
            raise UsageError(f"--config {file}: {key} must be a mapping of options")
        if key in REGISTRIES and not (isinstance(value, dict) and isinstance(value.get("name"), str)):
            raise UsageError(f"--config {file}: {key} must be a mapping with a name, such as {key}: {{name: ...}}")
        if key in (*SECTIONS, *REGISTRIES):
            own = key == "model" and ":" in value.get("name", "")  # whose default may be None
            for option in (option for option, set_to in value.items() if set_to is None and not own):
                raise UsageError(f"--config {file}: {key}.{option} has no value")
    texts = {field.name for field in fields(Config) if field.type is str}
    for key in (key for key in texts.intersection(tree) if not isinstance(tree[key], str)):
        raise UsageError(f"--config {file}: {key} must be a text, not {tree[key]}")
    return tree


def _under(base: dict[str, Any], given: argparse.Namespace) -> dict[str, Any]:
    """Returns an earlier run's configuration as far as it holds under the strategy that is given."""
    if given.strategy == AUTO:
        given.strategy = None
    changed = any(named not in (None, base.get(key)) for key, named in vars(given).items() if key in OF_STRATEGY[:2])
    return {key: value for key, value in base.items() if not (changed and key in OF_STRATEGY)}


def _overlay(tree: dict[str, Any], over: dict[str, Any]) -> None:
    """Overrides a recipe by another; a new model, optimizer or schedule drops the old one's options."""
    for key, value in over.items():
        old = tree.get(key)
        another = key in REGISTRIES and len({each["name"] for each in (old or {}, value) if "name" in each}) > 1
        tree[key] = {**old, **value} if isinstance(value, dict) and isinstance(old, dict) and not another else value


def _config(namespace: Namespace, names: dict[str, str]) -> Config:
    values = namespace.as_dict()
    for key, name in names.items():
        options = {option: value for option, value in values[key].items() if option != "name"}
        values[key] = {"name": name, "options": options}
    return config_of({field.name: values[field.name] for field in fields(Config)})
