"""Parses the command line and YAML recipes into a checked `Settings` with jsonargparse, without torch or Lightning.

The options of the chosen model, optimizer and schedule are typed flags like all others (`--optimizer adam
--optimizer.betas '[0.8, 0.999]'`). The names of the three are therefore read first, and the parser is built for them.
Until then, options are untyped values in one flat mapping, keyed by flag. It is filled from the recipes, in their
order, and then from the flags, and later values override earlier ones. The options of a DeepSpeed configuration come
just before those of the recipe or the flags that name it.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings

from cifar_zero.config import ds_config, help
from cifar_zero.config.arguments import Arguments, read_arguments
from cifar_zero.config.mistakes import choices, chosen, refuse_base_60, refuse_mistyped, refuse_unknown
from cifar_zero.config.output import Output
from cifar_zero.config.placement import ComputeOptions, DeviceOptions, Placement, StrategyOptions
from cifar_zero.config.recipe import Choice, DataConfig, FineTuning, Regularization, Training
from cifar_zero.config.rules import check_values
from cifar_zero.config.settings import (
    OWNERS,
    REGISTRIES,
    Consent,
    Settings,
    canonical,
    check_no_consent,
    flat,
    make_settings,
    sections,
    settings_of,
)
from cifar_zero.config.strategy_specs import AUTO
from cifar_zero.core import plain_data
from cifar_zero.core.console import command
from cifar_zero.core.errors import UsageError, short
from cifar_zero.models import MODELS
from cifar_zero.models.user_model import register_user_model
from stepcheck.lightning import user_code

EarlierRun = Callable[[Settings], dict[str, Any] | None]
"""A function that returns the options of the earlier run that a command line continues, keyed by flag, or None for a
new run. Its argument holds the options that identify the earlier run (see `_early_settings`)."""

ONLY_FLAGS = ("config", "print_config", "help", "debug")  # options that a recipe cannot set


def parse(argv: Sequence[str] | None = None, earlier_run: EarlierRun | None = None) -> Settings:
    """Returns the settings of a command line, by default this process's; see `settings_of_arguments`."""
    return settings_of_arguments(read_arguments(sys.argv[1:] if argv is None else argv), earlier_run)


def settings_of_arguments(arguments: Arguments, earlier_run: EarlierRun | None = None) -> Settings:
    """Returns the settings of a command line. Recipes (`--config`) override the defaults in their order, and flags
    override the recipes. A model or transform of the user that a flag names is imported. `--help` and `--print_config`
    print and exit (SystemExit).

    Args:
        arguments: The command line.
        earlier_run: Returns the options of the earlier run that the command line continues. Recipes and flags override
            them. If these choose another strategy, the earlier run's strategy options do not apply. The strategy auto
            keeps the earlier run's strategy.

    Raises:
        UsageError: If an option is unknown, a value is missing, has the wrong type or makes no sense, a recipe or the
            user's code cannot be loaded, or a flag contradicts the DeepSpeed configuration that the flag --ds_config
            names.
    """
    given = {**arguments.options}
    asked_help, prints = given.pop("help", None), given.pop("print_config", False)
    given.pop("trust", None)
    allow_code(given.get("model", ""), given.get("augment.transform", ""))
    recipes = [*map(read_recipe, arguments.recipes)]
    _refuse_empty(given, recipes)
    options = _merged([*recipes, given])
    if earlier_run is not None and (earlier := earlier_run(_early_settings(options, arguments.consent))) is not None:
        kept = {}
        if options.get("strategy") == AUTO:
            kept["strategy"] = earlier.get("strategy", Placement.strategy)
        options = _merged([_inherited(earlier, options | kept), *recipes, given, kept])
    parser = _parser(tuple(chosen(options, key) for key in REGISTRIES), with_help=asked_help is not None)
    if asked_help is not None:
        text = help.short(parser)
        if asked_help == "all":
            text = parser.format_help()
        print(text, end="")
        raise SystemExit(0)
    refuse_unknown(parser, options)
    refuse_base_60(parser, options)
    _refuse_overlap(options)
    nested = _nested(options)
    of_trainer = {
        name: plain_data.load_value(each) if isinstance(each, str) else each  # jsonargparse reads 10:30:00 as a number
        for name, each in nested.pop("trainer", {}).items()
    }
    try:
        tree = parser.parse_object(nested).as_dict()
    except (ArgumentError, TypeError, ValueError) as error:
        refuse_mistyped(parser, options)
        raise UsageError(short(error, 300)) from error
    for key in REGISTRIES:
        tree[key] = {"name": tree[key].pop("name"), "options": tree[key]}
    tree["trainer"] = of_trainer
    for option in (*ONLY_FLAGS, "trust"):
        tree.pop(option, None)
    settings = replace(settings_of(tree), consent=arguments.consent, named=frozenset(options))
    if given.get("ds_config"):
        ds_config.check_flags(settings)
    check_values(settings)
    if prints:
        print(dump(settings), end="")
        raise SystemExit(0)
    return settings


def strategy_flags(strategy: str) -> list[str]:
    """Returns the flags that choose a strategy by its name, or a raw DeepSpeed configuration by its path (*.json)."""
    if strategy.endswith(".json"):
        return ["--strategy", Placement.strategy, "--ds_config", strategy]
    return ["--strategy", strategy]


def dump(given: Settings) -> str:
    """Returns the settings as a YAML recipe that repeats the run with `--config`. It lacks the consent to run code,
    which only flags can give."""
    return yaml.safe_dump(_nested(flat(given)), sort_keys=False)


def read_recipe(file: str | Path) -> dict[str, Any]:
    """Returns the options of a recipe or of a run's config.yaml, keyed by flag and not checked against the known
    options. Raises UsageError if the file cannot be read or has no options, or if it sets an option twice, without a
    value, or although only flags may set it."""
    tree = plain_data.read_yaml(Path(file), f"--config {file}")
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise UsageError(f"--config {file} has no options: it must be a mapping such as 'epochs: 2'")
    check_no_consent(tree, f"--config {file}")
    options: dict[str, Any] = {}
    for key, value in tree.items():
        for option, setting in flat({key: value}).items():
            option = canonical(option)
            if option in options:
                raise UsageError(f"--config {file} sets {option} twice: remove one of the two")
            options[option] = setting
    own_model = ":" in str(options.get("model"))  # an argument of the user's model may have the default None
    for option, value in options.items():
        if option in ONLY_FLAGS:
            raise UsageError(f"--config {file}: {option} works only on the command line: remove it")
        may_be_empty = option.startswith("trainer.") or (own_model and option.startswith("model."))
        if value is None and not may_be_empty:  # jsonargparse (4.53) would accept None for any type
            raise UsageError(f"--config {file}: {option} has no value")
    return options


def _refuse_empty(given: Mapping[str, Any], recipes: Sequence[Mapping[str, Any]]) -> None:
    """Raises UsageError for a flag whose value is an empty text, if this is also its default and no recipe sets the
    option. It comes from an unset shell variable: after `--resume "$RUN"` the training would begin again."""
    for option, default in flat(Settings()).items():
        if given.get(option) == default == "" and not any(recipe.get(option) for recipe in recipes):
            raise UsageError(f"--{option} has an empty value, as from an unset shell variable: leave it out or set it")


def allow_code(model: str, transform: str) -> None:
    """Imports the user's model and transform, if these are names of user's code, so that the run may use them. The
    names must come from the command line. Raises UsageError if the import fails."""
    if transform:
        user_code.allow(transform, "--augment.transform")
    if ":" in model and model not in MODELS:
        register_user_model(model)


def _merged(sources: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merges the options of recipes and the command line. Later sources override earlier ones, and each source
    overrides the DeepSpeed configuration that it names, if that file exists."""
    options: dict[str, Any] = {}
    for source in map(_with_trainer_options, sources):
        file = str(source.get("ds_config", ""))
        if Path(file).is_file():  # a finished run's file may be gone, and is not needed
            options = _overridden(options, ds_config.options_of(file))
        options = _overridden(options, source)
    return options


def _overridden(options: dict[str, Any], by: dict[str, Any]) -> dict[str, Any]:
    """Returns `options`, overridden by `by`. If `by` chooses another model, optimizer or schedule, the options of the
    old one are dropped."""
    for key in REGISTRIES:
        if key in by and by[key] != options.get(key, by[key]):
            options = {option: value for option, value in options.items() if not option.startswith(f"{key}.")}
    return {**options, **by}


def _early_settings(options: Mapping[str, Any], consent: Consent) -> Settings:
    """Returns settings with only the options that identify an earlier run. Other options are not checked yet."""
    named = ("resume", "out", "name", "strategy", "ds_config")
    early = make_settings(
        **{option: str(options[option]) for option in named if option in options},
        bench_steps=int(str(options.get("bench_steps", 0)) != "0"),
        data=DataConfig(source=options.get("data.source", DataConfig.source)),
        model=Choice(chosen(options, "model")),
    )
    return replace(early, consent=consent)


def _inherited(base: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Returns the options of the earlier run, `base`, that the new run keeps. If the new options `given` choose another
    strategy or DeepSpeed configuration, it keeps no strategy options."""
    if all(given.get(key, base.get(key)) == base.get(key) for key in ("strategy", "ds_config")):
        return base
    of_strategy = {option.name for option in fields(StrategyOptions)}
    return {option: value for option, value in base.items() if option.split(".")[0] not in of_strategy}


def _with_trainer_options(source: dict[str, Any]) -> dict[str, Any]:
    """Returns options with each entry of `trainer` as an option, such as trainer.benchmark. Raises UsageError if
    `trainer` is not a mapping, or if an entry is also set as an option of its own."""
    rest = {**source}
    given = rest.pop("trainer", {})
    entries = plain_data.load_value(given) if isinstance(given, str) else given
    if not isinstance(entries, dict):
        raise UsageError(f"--trainer: expected a mapping such as {{benchmark: true}}, not {given}")
    for name in entries:
        if f"trainer.{name}" in rest:
            raise UsageError(f"--trainer and --trainer.{name} both set {name}: leave one of them out")
    return {**rest, **{f"trainer.{name}": value for name, value in entries.items()}}


def _refuse_overlap(options: Mapping[str, Any]) -> None:
    """Raises UsageError if an option and a part of it are both set, because one of them would be lost."""
    for option in options:
        for section in (option[:dot] for dot, letter in enumerate(option) if letter == "."):
            if section in options and section not in REGISTRIES:
                raise UsageError(f"--{section} and --{option} cannot be combined: write {option} into {section}")


def _nested(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options in jsonargparse's nested form: optimizer.lr becomes an entry of optimizer, and the value of
    optimizer itself its entry `name`."""
    tree: dict[str, Any] = {}
    for option, value in options.items():
        path = option
        if option in REGISTRIES:
            path = f"{option}.name"
        *outer, last = path.split(".")
        inner = tree
        for section in outer:
            inner = inner.setdefault(section, {})
        inner[last] = value
    return tree


@cache  # compare parses several command lines
def _parser(names: tuple[str, ...], with_help: bool) -> ArgumentParser:
    """Returns the parser of the train command. `names` are those of the chosen model, optimizer and schedule, whose
    options become flags. Help texts are complete only if `with_help` is true."""
    set_parsing_settings(docstring_parse_attribute_docstrings=with_help)  # they take a third of the time
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
    recipes.add_argument("--config", metavar="FILE", help="YAML recipe; later recipes override earlier ones.")
    recipes.add_argument("--print_config", action="store_true", help="Print the configuration as a recipe and exit.")
    parser.add_argument("--debug", type=bool, default=False, help="Print the full traceback of an error.")
    parser.add_argument_group("consent (on the command line only, never in a recipe)").add_argument(
        "--trust",
        type=bool,
        default=False,
        help="Load checkpoints that could run code. Only if you trust their author.",
    )
    for group in (StrategyOptions, DeviceOptions, ComputeOptions, Training, Regularization, FineTuning, Output):
        parser.add_class_arguments(group, skip={*sections(group)})
    for part in OWNERS.values():
        for key, section in sections(part).items():
            parser.add_argument_group(section.__doc__).add_class_arguments(section, key, as_group=False)
    for (key, registry), name in zip(REGISTRIES.items(), names, strict=True):
        group = parser.add_argument_group(f"{key} {name}", description=help.summary(registry[name]))
        described = f"Name, also as --{key} NAME; one of {', '.join(choices(key))}."
        group.add_argument(f"--{key}.name", default=name, help=described)
        group.add_class_arguments(registry[name], key, as_group=False)
    parser.add_argument_group("Lightning").add_argument(
        "--trainer",
        type=dict[str, plain_data.Plain],
        default={},
        help="Any other option of Lightning's Trainer, such as --trainer.limit_test_batches 10.",
    )
    # jsonargparse (4.53) adds --trainable+, which appends to the default only and so replaces a recipe's list.
    for action in parser._actions:
        action.option_strings = [flag for flag in action.option_strings if not flag.endswith("+")]
    return parser
