"""A user's own LightningModule and its data on the command line: --module FILE.py:NAME, --datamodule FILE.py:NAME,
their arguments, and a configuration of LightningCLI (--config)."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser
from yaml import YAMLError

from cifar_zero.config.arguments import Arguments, read_arguments
from cifar_zero.config.help import refuse_mistyped
from cifar_zero.config.placement import DeviceOptions, StrategyOptions
from cifar_zero.config.settings import flat
from cifar_zero.core import user_code
from cifar_zero.core.errors import UsageError, short
from cifar_zero.core.plain_data import check, is_plain, load_yaml
from cifar_zero.core.usage import nearest

PARTS = ("module", "datamodule")

APPLIED = {option.name for group in (StrategyOptions, DeviceOptions) for option in fields(group)}
APPLIED |= {"max_steps", "gradient_clip_val", "seed", "trainer"}
"""Options and sections of train that apply to somebody's own module: where it runs, length, clipping and seed."""

SECTIONS = {"model": "module", "data": "datamodule"}
"""Sections of a configuration of LightningCLI with the arguments of a class, and the options that have them here."""

FROM_TRAINER = {
    "precision": "precision",
    "gradient_clip_val": "gradient_clip_val",
    "accumulate_grad_batches": "accumulate",
}
"""Options in its section `trainer` that change the maths, by their names here; the other ones are not read."""

ONE_OPTIMIZER = (
    "DeepSpeed has one optimizer, which it steps itself: leave automatic_optimization on, and give all parameters to "
    "one optimizer, in parameter groups"
)


@dataclass
class Given:
    """What a command line gives."""

    theirs: dict[str, Any]  # options of the user's classes: module, module.lr, datamodule, ...
    ours: Arguments  # options of train
    in_files: set[str]  # those of the user's classes that --config gives


def read_given(flags: Sequence[str]) -> Given:
    """Returns what a command line gives; its options override those of --config."""
    ours = read_arguments(flags)
    in_files: dict[str, Any] = {}
    for file in ours.recipes:
        in_files |= options_of_cli(file)
    in_files = {option: value for option, value in in_files.items() if option not in ours.options}
    options = {**in_files, **ours.options}
    theirs = {option: value for option, value in options.items() if option.split(".")[0] in PARTS}
    ours.options = {option: value for option, value in options.items() if option not in theirs}
    ours.recipes = []
    return Given(theirs, ours, in_files.keys() & theirs.keys())


def options_of_cli(file: str) -> dict[str, Any]:
    """Returns the options in a configuration of LightningCLI: arguments of the module and of the data, and those of
    FROM_TRAINER. Its class names are not read: --module and --datamodule name classes, because a file may not load
    code. Raises UsageError: the file cannot be read, or sets the optimizer."""
    what = f"--config {file}"
    try:
        config = load_yaml(Path(file).read_text())
    except (OSError, ValueError, YAMLError) as error:
        raise UsageError(f"{what} cannot be read: {short(error)}") from error
    if not isinstance(config, dict):
        raise UsageError(f"{what} is not a configuration of LightningCLI: it has no sections")
    options = {}
    for section, value in config.items():
        value = value or {}
        if section in (*SECTIONS, "trainer") and not isinstance(value, dict):
            raise UsageError(f"{what}: {section} is not a section with options")
        if section in ("optimizer", "lr_scheduler") and value:
            raise UsageError(f"{what}: {section} would replace configure_optimizers: let your module configure it")
        if section in SECTIONS:
            arguments = value.get("init_args") or {} if "class_path" in value else value
            check(arguments, what)
            for name, argument in flat(arguments).items():
                text = argument if isinstance(argument, str) else json.dumps(argument)
                options[f"{SECTIONS[section]}.{name}"] = text
        if section == "trainer":
            options |= {ours: str(value[name]) for name, ours in FROM_TRAINER.items() if value.get(name) is not None}
    return options


def check_given(given: Given, needs_data: bool = True) -> None:
    """Raises UsageError: an option is not for a user's module, a class or an argument does not exist, or the module has
    no data, which it `needs` unless it gets a script's."""
    for flag in given.ours.options:  # first: user's code takes seconds
        if flag.split(".")[0] not in APPLIED:
            known = [f"--{name}" for name in sorted(APPLIED)]
            meant = nearest(f"--{flag}", known, cutoff=0.65, otherwise=f"or use {', '.join(known)}")
            raise UsageError(
                f"--{flag} is not for --module: give it to your code (--module.X, --datamodule.X); {meant}"
            )
    from lightning.pytorch import LightningModule

    module, datamodule = (instance(part, given, build=False) for part in PARTS)
    loader = getattr(module, "train_dataloader", None)
    if needs_data and datamodule is None and loader is LightningModule.train_dataloader:
        raise UsageError("--module has no train_dataloader: name its data with --datamodule FILE.py:NAME")


def instance(part: str, arguments: Given, build: bool = True) -> Any:
    """Returns the user's module or data, with the arguments among its options, as LightningCLI does; None without one.
    Not to `build` it only checks the arguments, and returns the class or function that is named."""
    if part not in arguments.theirs:
        return None
    name = arguments.theirs[part]
    given = {option: value for option, value in arguments.theirs.items() if option.startswith(f"{part}.")}
    user_class = user_code.load(name, f"--{part}")
    parser = ArgumentParser(exit_on_error=False, allow_abbrev=False)
    known = [key.removeprefix(f"{part}.") for key in parser.add_class_arguments(user_class, part, fail_untyped=False)]
    _refuse_code(parser, arguments)
    try:
        parsed = parser.parse_args([f"--{option}={value}" for option, value in given.items()])
    except (ArgumentError, TypeError, ValueError) as error:
        for unknown in (option.removeprefix(f"{part}.") for option in given):
            if unknown not in known:
                meant = nearest(unknown, known, otherwise="" if known else "it takes none")
                raise UsageError(f"--{part}.{unknown} is not an argument of {name}: {meant}") from error
        refuse_mistyped(parser, given)
        raise UsageError(short(error, 300)) from error
    return parser.instantiate_classes(parsed)[part] if build else user_class


def _refuse_code(parser: ArgumentParser, arguments: Given) -> None:
    """Raises UsageError if a file gives a text to an argument whose type is not plain data: jsonargparse (4.53) would
    import what the text names."""
    for action in parser._actions:
        value = arguments.theirs.get(action.dest)
        kind = getattr(action, "_typehint", action.type)
        is_text = isinstance(value, str) and isinstance(load_yaml(value), (str, list, dict))
        if action.dest in arguments.in_files and is_text and not is_plain(kind):
            raise UsageError(f"--{action.dest} in a file may not name code: give it on the command line")


def fit(trainer: Any, module: Any, datamodule: Any, checkpoint: Path | None = None) -> None:
    """Trains a user's module with Lightning's Trainer, or continues the training of a checkpoint. Raises UsageError for
    manual optimization, several optimizers, or data without a batch."""
    if not module.automatic_optimization:
        raise UsageError(f"--module uses manual optimization: {ONE_OPTIMIZER}")
    try:
        trainer.fit(module, datamodule=datamodule, ckpt_path=checkpoint)
    except RuntimeError as error:
        if "only supported with manual optimization" not in str(error):
            raise
        # Lightning (2.6.6) advises to use it, in optimizer._validate_multiple_optimizers_support.
        raise UsageError(f"--module has several optimizers: {ONE_OPTIMIZER}") from error
    if not trainer.num_training_batches:
        raise UsageError("--module: its training data have no batch for each rank; use more data or a smaller batch")
