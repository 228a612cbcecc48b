"""Formats the help of the command line: all options, or on one screen the options that most people need. Also refuses
unknown names and values of the wrong type, and suggests what was probably meant."""

import argparse
import re
import textwrap
from collections.abc import Mapping
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from jsonargparse import ArgumentError, ArgumentParser

from cifar_zero.config.recipe import Recipe
from cifar_zero.config.settings import REGISTRIES
from cifar_zero.config.strategy_specs import AUTO, STRATEGIES
from cifar_zero.core.errors import UsageError
from cifar_zero.core.usage import nearest, nearest_flag
from cifar_zero.optimizers import OPTIMIZERS

COMMON = {
    "model and optimizer": ("model", "weights", "optimizer", "optimizer.lr", "schedule", "augment.flip"),
    "data": ("data.source", "batch_size", "accumulate"),
    "duration": ("epochs", "max_steps", "early_stopping", "resume"),
    "strategy and devices": ("strategy", "devices", "precision", "seed"),
    "output": ("out", "name", "logger"),
    "recipes and benchmarks": ("config", "print_config", "bench_steps"),
}
"""The flags of the short help, by title."""

ONLY_IN_WHOLE_HELP = ("torture", "range_test")  # the model of the acceptance, and a schedule that trains nothing

USAGE = "%(prog)s [--config FILE ...] [--strategy NAME] [--devices N] [--<option> VALUE ...]"
EPILOG = """\
examples:
  %(prog)s                                          the tutorial's recipe: Net, SGD, batch size 4, 2 epochs
  %(prog)s --strategy deepspeed_stage_3 --devices 2
  %(prog)s --config configs/deepspeed.yaml --strategy deepspeed_stage_2 --precision bf16-mixed
  %(prog)s --optimizer adam --help all              lists the options of another optimizer
  %(prog)s --model torchvision:resnet50 --model.image_size 64     a model of torchvision
  %(prog)s --model my_net.py:MyNet --model.width 64               a model of your own

optimizers:
{optimizers}

strategies:
{strategies}
"""


# Options of Lightning's Trainer that have their own flag here, so that there is only one owner of each setting.
SAME = ("accelerator", "devices", "gradient_clip_val", "logger", "max_steps", "num_nodes", "precision", "strategy")
OWNED = {name: f"--{name}" for name in SAME} | {
    "accumulate_grad_batches": "--accumulate",
    "callbacks": "the flag --trainer.callbacks, which no recipe may set, because it loads code",
    "default_root_dir": "--out",
    "enable_checkpointing": "--bench_steps for a run without checkpoints",
    "enable_progress_bar": "2>/dev/null, because the progress bar goes to standard error",
    "gradient_clip_algorithm": "--gradient_clip_val (clipping is by global norm under every strategy)",
    "log_every_n_steps": "--log_interval",
    "max_epochs": "--epochs",
    "plugins": "--strategy",
    "reload_dataloaders_every_n_epochs": "--data.loader",
    "use_distributed_sampler": "--data.loader (it shards the data itself)",
}


def epilog() -> str:
    """Returns the end of the full help: examples, and lists of all optimizers and strategies."""
    optimizers = _listed({name: summary(entry) for name, entry in OPTIMIZERS.items()})
    strategies = _listed({name: spec.summary for name, spec in STRATEGIES.items()})
    return EPILOG.format(optimizers=optimizers, strategies=strategies)


def short(parser: ArgumentParser) -> str:
    """Returns the short help, which fits one screen. It lists the flags of COMMON, each with its choices or the first
    sentence of its help text."""
    actions = parser._option_string_actions
    names = {key: choices(key) for key in REGISTRIES} | {"strategy": [*STRATEGIES, AUTO]}
    lines = [f"usage: {USAGE}" % {"prog": parser.prog}]
    for title, flags in COMMON.items():
        lines += ["", f"{title}:"]
        for flag in flags:
            action = actions[f"--{flag}.name" if flag in REGISTRIES else f"--{flag}"]
            metavar = str(action.metavar)
            if flag in names:
                text = ", ".join(name for name in names[flag] if name not in ONLY_IN_WHOLE_HELP)
            elif metavar.startswith("{") and not isinstance(action.default, bool):
                text = metavar.strip("{}").replace(",", ", ")
            else:
                whole = re.sub(r" \(.*?\)", "", " ".join((action.help or "").split()))
                text = re.split(r"\.\s|\.$", whole)[0]
            if isinstance(action.default, (str, int, float)) and action.default not in (False, "", 0, -1):
                text += f" (default: {action.default})"
            lines += textwrap.wrap(f"{f'--{flag}':<21}{text}", 118, initial_indent="  ", subsequent_indent=" " * 23)
    more = "--help all lists all options; --optimizer adam --help all lists the options of adam too"
    return "\n".join([*lines, "", more, ""])


def summary(entry: Any) -> str:
    """Returns the first line of the docstring of a model, optimizer or schedule."""
    return (entry.__doc__ or "").splitlines()[0]


def _listed(lines: dict[str, str]) -> str:
    width = max(map(len, lines))
    return "\n".join(f"  {name:<{width}}  {line}" for name, line in lines.items())


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Shows help texts as they are written, followed by the default value."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = re.sub(r"%(?!\()", "%%", action.help or "")  # "94 %" is text, %(default)s is a placeholder
        shown = action.default is not False and action.default not in (argparse.SUPPRESS, None, "", {})
        return f"{text} (default: %(default)s)" if shown and action.option_strings else text


def choices(key: str) -> list[str]:
    """Returns the names of all models, optimizers or schedules."""
    others = ["torchvision:NAME", "FILE.py:NAME"] if key == "model" else []
    return [*REGISTRIES[key], *others]


def chosen(options: Mapping[str, Any], key: str) -> str:
    """Returns the name of the chosen model, optimizer or schedule, which `options` may leave at the default. Raises
    UsageError if the name is unknown."""
    name = str(options.get(key, getattr(Recipe(), key).name))
    if name in REGISTRIES[key]:
        return name
    if key == "model" and name.endswith(".py"):
        raise UsageError(f"--model {name}: name the class too, --model {name}:NAME")
    if key == "model" and ":" in name:
        raise UsageError(f"the recipe's model is your own code: name it on the command line too, --model {name}")
    raise UsageError(f"unknown {key} {name!r}: {nearest(name, choices(key))}")


def refuse_unknown(parser: ArgumentParser, options: Mapping[str, Any]) -> None:
    """Raises UsageError for the first unknown option."""
    known = {flag.lstrip("-") for flag in parser._option_string_actions} | {*REGISTRIES}
    for option in options:
        section, _, name = option.partition(".")
        if section == "trainer" and name in OWNED:
            raise UsageError(f"--{option} is not passed on to the Trainer: use {OWNED[name]}")
        is_free = section == "trainer" or (option.startswith("model.kwargs.") and "model.kwargs" in known)
        if option not in known and not is_free:
            meant = nearest_flag(option, known)
            raise UsageError(f"unknown option --{option}: {meant}")


def refuse_mistyped(parser: ArgumentParser, options: Mapping[str, Any]) -> None:
    """Raises UsageError for the first value that does not have the type of its option. jsonargparse (4.53) names the
    option only in the text of its error, so each value is parsed alone."""
    for action in parser._actions:
        hint = getattr(action, "_typehint", None)
        if hint is None or action.dest not in options:
            continue
        value = options[action.dest]
        alone = ArgumentParser(exit_on_error=False)
        alone.add_argument("--value", type=hint)
        try:
            alone.parse_object({"value": value})
        except (ArgumentError, TypeError, ValueError) as error:
            raise UsageError(f"--{action.dest}: expected {_described(hint)}, not {value}") from error


def _described(hint: Any) -> str:
    """Returns a type in words, for example: int or one of ['auto']."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind is Literal:
        return f"one of {[*inner]}"
    if kind in (Union, UnionType):
        return " or ".join(map(_described, inner))
    if kind is list:
        return f"a list of {_described(inner[0])}"
    if kind is tuple:
        return f"a list [{', '.join(map(_described, inner))}]"
    return getattr(hint, "__name__", str(hint))
