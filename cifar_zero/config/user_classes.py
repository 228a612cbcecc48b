"""Reads the options of a command line that names a user's own LightningModule."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from cifar_zero.config.arguments import Arguments, read_arguments
from cifar_zero.config.placement import DeviceOptions, StrategyOptions
from cifar_zero.core.errors import UsageError
from stepcheck.lightning.case import PARTS, UserClasses
from stepcheck.lightning.user_classes import check_exist, options_of_cli
from stepcheck.usage import nearest

APPLIED = {option.name for group in (StrategyOptions, DeviceOptions) for option in fields(group)}
APPLIED |= {"max_steps", "gradient_clip_val", "seed", "trainer"}
"""Options and sections of train that also apply to a user's own module: strategy, devices, length, clipping, seed."""


@dataclass(frozen=True)
class Given(UserClasses):
    """The options of a command line, divided into options of the user's classes and options of train."""

    ours: Arguments  # options of train


def read_given(flags: Sequence[str]) -> Given:
    """Returns the options of a command line that names a user's classes. Flags override the options of --config."""
    ours = read_arguments(flags)
    theirs = {option: value for option, value in ours.options.items() if option.split(".")[0] in PARTS}
    maths: dict[str, str] = {}
    files = {}
    for file in ours.recipes:
        of_file, files[file] = options_of_cli(file)
        maths |= {{"clip": "gradient_clip_val"}.get(name, name): str(value) for name, value in of_file.items()}
    ours.options = maths | {option: value for option, value in ours.options.items() if option not in theirs}
    ours.recipes = []
    return Given(theirs, files, ours)


def check_options(given: Given) -> None:
    """Raises UsageError if an option does not apply to a user's module, or if a class cannot exist."""
    for flag in given.ours.options:
        if flag.split(".")[0] not in APPLIED:
            known = [f"--{name}" for name in sorted(APPLIED)]
            meant = nearest(f"--{flag}", known, cutoff=0.65, otherwise=f"or use {', '.join(known)}")
            raise UsageError(
                f"--{flag} does not work with --module: set it in your code (--module.X, --datamodule.X); {meant}"
            )
    check_exist(given)
