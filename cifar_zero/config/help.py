"""Formats the help of the command line: either all options, or one screen with the options that most people need."""

import argparse
import re
import textwrap
from typing import Any

from jsonargparse import ArgumentParser

from cifar_zero.config.mistakes import choices
from cifar_zero.config.settings import REGISTRIES
from cifar_zero.config.strategy_specs import AUTO, STRATEGIES
from cifar_zero.optimizers import OPTIMIZERS

COMMON = {
    "model and optimizer": ("model", "weights", "optimizer", "optimizer.lr", "schedule", "augment.flip"),
    "data": ("data.source", "batch_size", "accumulate"),
    "duration": ("epochs", "max_steps", "early_stopping", "resume"),
    "strategy and devices": ("strategy", "devices", "precision", "seed"),
    "output": ("out", "name", "logger"),
    "recipes and benchmarks": ("config", "print_config", "bench_steps"),
}

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


def epilog() -> str:
    """Returns the end of the full help: examples, and all optimizers and strategies."""
    optimizers = _listed({name: summary(entry) for name, entry in OPTIMIZERS.items()})
    strategies = _listed({name: spec.summary for name, spec in STRATEGIES.items()})
    return EPILOG.format(optimizers=optimizers, strategies=strategies)


def short(parser: ArgumentParser) -> str:
    """Returns the short help, which fits one screen: the flags of COMMON, each with its choices or the first sentence
    of its help text, and with its default unless that is empty, 0 or -1."""
    actions = parser._option_string_actions
    names = {key: choices(key) for key in REGISTRIES} | {"strategy": [*STRATEGIES, AUTO]}
    lines = [f"usage: {USAGE}" % {"prog": parser.prog}]
    for title, flags in COMMON.items():
        lines += ["", f"{title}:"]
        for flag in flags:
            action = actions[f"--{flag}.name" if flag in REGISTRIES else f"--{flag}"]
            metavar = str(action.metavar)
            if flag in names:
                text = ", ".join(names[flag])
            elif metavar.startswith("{"):
                text = metavar.strip("{}").replace(",", ", ")
            else:
                sentences = re.sub(r" \(.*?\)", "", " ".join((action.help or "").split()))
                text = re.split(r"\.\s|\.$", sentences)[0]
            if isinstance(action.default, (str, int, float)) and action.default not in (False, "", 0, -1):
                text += f" (default: {action.default})"
            lines += textwrap.wrap(f"{f'--{flag}':<21}{text}", 118, initial_indent="  ", subsequent_indent=" " * 23)
    more = "--help all lists all options; --optimizer adam --help all lists the options of adam too"
    return "\n".join([*lines, "", more, ""])


def summary(entry: Any) -> str:
    """Returns the first line of the docstring of a model, optimizer or schedule."""
    return (entry.__doc__ or "").strip().partition("\n")[0]


def _listed(lines: dict[str, str]) -> str:
    width = max(map(len, lines))
    return "\n".join(f"  {name:<{width}}  {line}" for name, line in lines.items())


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Shows the default value after each help text, unless it is empty, None or false. A % in a help text needs no
    escape."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = re.sub(r"%(?!\()", "%%", action.help or "")  # "94 %" is text, %(default)s is a placeholder
        shown = action.default is not False and action.default not in (argparse.SUPPRESS, None, "", {})
        return f"{text} (default: %(default)s)" if shown and action.option_strings else text
