"""Parses the command line and YAML recipes into a checked `Config`, with jsonargparse; no torch, no Lightning.

The options of the chosen model, optimizer and schedule are typed flags like all others (`--optimizer adam
--optimizer.betas '[0.8, 0.999]'`), so their names are read first, and then the parser is built for them.
"""

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace, set_parsing_settings

from cifar_zero.config import deepspeed_examples, ds_config
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
from cifar_zero.config.strategy_specs import AUTO, STRATEGIES
from cifar_zero.config.values import REGISTRIES, check_values
from cifar_zero.core import user_code
from cifar_zero.core.errors import UsageError
from cifar_zero.core.programs import command
from cifar_zero.core.usage import nearest, nearest_flag
from cifar_zero.models import MODELS, PACKAGES, add_own
from cifar_zero.optimizers import OFFLOADED_BY, OPTIMIZERS

SWITCHES = ("trust", *(field.name for field in fields(Config) if field.default is False))  # flags that need no value
CALLBACKS = r"--trainer\.callbacks([.+=]|$)"  # flags of the callbacks, in all forms of LightningCLI
LISTS = ("logger", "hparams", "trainable", "wandb_tags", "lora.target")  # flags that take several values
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

PRECISIONS = {
    **dict.fromkeys(("16", "fp16", "float16", "half"), "16-mixed"),
    **dict.fromkeys(("bf16", "bfloat16", "amp"), "bf16-mixed"),
    **dict.fromkeys(("32", "fp32", "float32", "full"), "32-true"),
}
"""Other names of the formats of --precision."""

COMMON = {
    "what is trained": ("model", "weights", "optimizer", "optimizer.lr", "schedule", "augment.flip", "augment.crop"),
    "on which images": ("data.source", "data.root", "batch_size", "accumulate"),
    "for how long": ("epochs", "max_steps", "early_stopping", "resume"),
    "where": ("strategy", "devices", "precision", "compile", "seed"),
    "what is left": ("out", "name", "logger", "log_interval"),
    "instead": ("config", "print_config", "bench_steps", "find_lr"),
}
"""The flags of the short help, by title."""

Before = Callable[[Config], dict[str, Any] | None]
"""Returns the configuration of the run that a command line continues; gets what it says of that run."""

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

USAGE = "%(prog)s [--config FILE ...] [--strategy NAME] [--devices N] [--<option> VALUE ...]"
EPILOG = """\
examples:
  %(prog)s                                          the tutorial's recipe: Net, SGD, batch size 4, 2 epochs
  %(prog)s --strategy deepspeed_stage_3 --devices 2
  %(prog)s --config configs/deepspeed.yaml --strategy deepspeed_stage_2 --precision bf16-mixed
  %(prog)s --optimizer adam --help all              lists the options of another optimizer
  %(prog)s --model torchvision:resnet50 --model.image_size 64     a model of torchvision, or timm:NAME
  %(prog)s --model my_net.py:MyNet --model.width 64               a model of your own
  deepspeed train.py --deepspeed --stage 2     with the flags of DeepSpeedExamples' program (docs/migration.md)

optimizers:
{optimizers}

strategies:
{strategies}
"""


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
    names = {key: _chosen(tree, key) for key in REGISTRIES}

    parser = _parser(names, with_help=short.help is not None)
    if short.help is not None:
        print(parser.format_help() if short.help == "all" else _short_help(parser), end="")
        raise SystemExit(0)
    _refuse_unknown(parser, rest, tree)
    try:
        parser.set_defaults(parser.parse_object(tree, defaults=False).as_flat().__dict__)
        namespace = parser.parse_args(rest)
    except (ArgumentError, argparse.ArgumentError, TypeError, ValueError) as error:
        raise UsageError(_with_meant(one_line(error))) from error
    config = _config(namespace, names)
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
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in ("resume", "out", "name"):
        parser.add_argument(f"--{option}", default=tree.get(option, getattr(Config, option)))
    parser.add_argument("--bench_steps", type=yaml.safe_load, default=tree.get("bench_steps", 0))
    parser.add_argument("--data.source", dest="data", default=tree.get("data", {}).get("source", "auto"))
    given = vars(parser.parse_known_args(flags)[0])
    named = {key: tree[key] for key in ("strategy", "ds_config", "find_lr") if key in tree}
    return Config(**{**given, **named, "data": DataConfig(given["data"]), "model": Choice(_chosen(tree, "model"))})


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
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", action="extend", nargs="+", default=[])
    for key in REGISTRIES:
        parser.add_argument(f"--{key}", f"--{key}.name", dest=key)
    for key in LISTS:
        parser.add_argument(f"--{key}", nargs="+")
    parser.add_argument("--augment.transform")
    parser.add_argument("-h", "--help", nargs="?", const="")
    parser.add_argument("--strategy")
    parser.add_argument("--ds_config", "--deepspeed_config")
    parser.add_argument("--plot_schedule", nargs="?", const="schedule.png")
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
    strategies = _listed({name: spec.summary for name, spec in STRATEGIES.items()})
    unsharded = "needs whole tensors: baseline, ddp, deepspeed_stage_0"
    offloads = {
        name: f"offloaded by {OFFLOADED_BY[name]}" if name in OFFLOADED_BY else unsharded for name in OPTIMIZERS
    }
    optimizers = _listed({name: f"{_summary(entry)}; {offloads[name]}" for name, entry in OPTIMIZERS.items()})
    parser = ArgumentParser(
        prog=command("train"),
        usage=USAGE,
        description="Trains and tests a CIFAR classifier with plain PyTorch, DDP, DeepSpeed ZeRO, FSDP2 and others.",
        epilog=EPILOG.format(optimizers=optimizers, strategies=strategies),
        formatter_class=_HelpFormatter,
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
        group = parser.add_argument_group(f"{key} {names[key]}", description=_summary(entry))
        described = f"Name, also as --{key} NAME; one of {', '.join(_choices(key))}."
        group.add_argument(f"--{key}.name", default=names[key], help=described)
        group.add_class_arguments(entry, key, as_group=False)
    parser.add_argument_group("Lightning").add_argument(
        "--trainer",
        type=dict[str, Any],
        default={},
        help="Any other option of Lightning's Trainer, such as --trainer.limit_test_batches 10.",
    )
    return parser


def _short_help(parser: ArgumentParser) -> str:
    """Returns what most people need of the help, on one screen: of each flag the choices or the first sentence."""
    actions = parser._option_string_actions
    names = {key: _choices(key) for key in REGISTRIES} | {"strategy": [*STRATEGIES, AUTO]}
    lines = [f"usage: {USAGE}" % {"prog": parser.prog}]
    for title, flags in COMMON.items():
        lines += ["", f"{title}:"]
        for flag in flags:
            action = actions[f"--{flag}.name" if flag in REGISTRIES else f"--{flag}"]
            metavar = "" if isinstance(action.default, bool) else str(action.metavar)
            choices = ", ".join(names.get(flag, ())) or metavar.strip("{}").replace(",", ", ") * metavar.startswith("{")
            text = choices or re.split(r"\.\s|\.$", re.sub(r" \(.*?\)", "", " ".join((action.help or "").split())))[0]
            shown = isinstance(action.default, (str, int, float)) and action.default not in (False, "", 0, -1)
            text = f"{f'--{flag}':<21}{text}" + f" (default: {action.default})" * shown
            lines += textwrap.wrap(text, 118, initial_indent="  ", subsequent_indent=" " * 23)
    more = "--help all lists all options; --optimizer adam --help all has those of another optimizer"
    return "\n".join([*lines, "", more, ""])


def _choices(key: str) -> list[str]:
    return [*REGISTRIES[key], *(f"{source}:NAME" for source in (*PACKAGES, "FILE.py") if key == "model")]


def _listed(lines: dict[str, str]) -> str:
    width = max(map(len, lines))
    return "\n".join(f"  {name:<{width}}  {line}" for name, line in lines.items())


def _summary(entry: Any) -> str:
    return (entry.__doc__ or "").splitlines()[0]


def read_recipe(file: str | Path) -> dict[str, Any]:
    """Returns the content of a recipe or of a run's config.yaml. Raises UsageError: it cannot be one."""
    try:
        tree = yaml.safe_load(Path(file).read_text())
    except OSError as error:
        raise UsageError(f"--config {file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--config {file} is not a text file") from error
    except yaml.YAMLError as error:
        raise UsageError(f"--config {file} is not YAML: {one_line(error)}") from error
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise UsageError(f"--config {file} has no options: it must be a mapping such as 'epochs: 2'")
    check_no_consent(tree, f"--config {file}")
    for key, value in tree.items():
        if value is None:
            raise UsageError(f"--config {file}: {key} has no value")
        if key in (*SECTIONS, "trainer") and not isinstance(value, dict):
            raise UsageError(f"--config {file}: {key} must be a mapping of options")
        if key in REGISTRIES and not (isinstance(value, dict) and isinstance(value.get("name"), str)):
            raise UsageError(f"--config {file}: {key} must be a mapping with a name, such as {key}: {{name: ...}}")
        if key in (*SECTIONS, *REGISTRIES):
            for option in (option for option, set_to in value.items() if set_to is None):
                raise UsageError(f"--config {file}: {key}.{option} has no value")
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


def _chosen(tree: dict[str, Any], key: str) -> str:
    name = tree.get(key, {}).get("name", getattr(Config(), key).name)
    if name not in REGISTRIES[key]:
        if key == "model" and str(name).endswith(".py"):
            found = user_code.names_in(Path(name)) or ["NAME"]
            raise UsageError(f"--model {name}: did you mean {' or '.join(f'--model {name}:{own}' for own in found)}?")
        if key == "model" and ":" in str(name):
            raise UsageError(f"the recipe's model is your own code: name it on the command line too, --model {name}")
        raise UsageError(f"unknown {key} {name!r}: {nearest(str(name), _choices(key))}")
    return name


def _refuse_unknown(parser: ArgumentParser, flags: list[str], tree: dict[str, Any]) -> None:
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
    name, options = _chosen(tree, section), {}
    for other, entry in REGISTRIES[section].items():
        for known in get_close_matches(option, [field.name for field in fields(entry)], 1, 0.7):
            options.setdefault(known, []).append(other)
    if not options or any(name in others for others in options.values()):
        return ""
    (meant,) = get_close_matches(option, options, 1, 0.7)
    return f"--{section}.{meant} is an option of {', '.join(options[meant])}, not of {name}"


def _with_meant(message: str) -> str:
    """Returns jsonargparse's message, with the choice that was meant if it refuses one."""
    refused = re.search(r"expected one of (\[.*\]), not (.+)", message)
    choices = yaml.safe_load(refused[1]) if refused else []
    meant = PRECISIONS.get(refused[2], refused[2]) if refused else ""
    close = get_close_matches(meant, map(str, choices), 1, 0.65)
    return f"{message}: did you mean {close[0]}?" if close else message


def _config(namespace: Namespace, names: dict[str, str]) -> Config:
    values = namespace.as_dict()
    for key, name in names.items():
        options = {option: value for option, value in values[key].items() if option != "name"}
        values[key] = {"name": name, "options": options}
    return config_of({field.name: values[field.name] for field in fields(Config)})


def one_line(error: Exception) -> str:
    """Returns jsonargparse's message without the names of Python types."""
    text = " ".join(str(error).split())
    text = re.sub(r'^Parser key "(.*?)": ', r"--\1: ", text)
    text = re.sub(r"Does not validate .* Errors: - (.*) Given value type: .* Given value: ", r"\1. Got value: ", text)
    text = re.sub(r"Expected an? (?:<class '(\w+)'>|typing.Literal)", lambda m: f"expected {m[1] or 'one of '}", text)
    text = text.replace("expected list", "expected a list such as [1, 2]")
    return text.replace(" - expected", " or").replace(". Got value:", ", not")


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows the help as it is written, followed by the default."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        shown = action.default is not False and action.default not in (argparse.SUPPRESS, None, "", {})
        return f"{text} (default: %(default)s)" if shown and action.option_strings else text
