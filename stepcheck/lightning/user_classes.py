"""Builds a user's own LightningModule and data module, FILE.py:NAME or PACKAGE.MODULE:NAME, with their arguments from
the command line."""

import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentError, ArgumentParser
from jsonargparse._typehints import ActionTypeHint
from jsonargparse.typing import path_type
from torch.utils._pytree import tree_leaves

from stepcheck.lightning import user_code
from stepcheck.lightning.case import PARTS
from stepcheck.usage import UsageError, nearest, short

ONE_OPTIMIZER = (
    "DeepSpeed steps its only optimizer itself: leave automatic_optimization on, and give all parameters to "
    "one optimizer, in parameter groups"
)


def check_classes(options: Mapping[str, str], needs_data: bool = True) -> None:
    """Checks the user's classes and their arguments.

    Args:
        options: See `instantiate`.
        needs_data: Whether the module must have training data. False if a script provides the data.

    Raises:
        UsageError: If `instantiate` would refuse a class or an argument, or if the module needs data and has none.
    """
    module, datamodule = (instantiate(part, options, build=False) for part in PARTS)
    from lightning.pytorch import LightningModule

    loader = getattr(module, "train_dataloader", None)
    if needs_data and datamodule is None and loader is LightningModule.train_dataloader:
        raise UsageError("--module has no train_dataloader: name its data with --datamodule FILE.py:NAME")


def instantiate(part: str, options: Mapping[str, str], build: bool = True) -> Any:
    """Builds the user's module or data module with its arguments, as LightningCLI does. Returns None if none is named.

    Args:
        part: module or datamodule.
        options: The names of the classes, and their arguments: module, module.lr, datamodule, ...
        build: Whether to build it. If false, the arguments are only checked, and the class is returned.

    Raises:
        UsageError: If the class or an argument does not exist, if an argument is missing or has the wrong type, or if
            the class is not a LightningModule or a LightningDataModule.
    """
    if part not in options:
        return None
    name = options[part]
    user_class = user_code.load(name, f"--{part}")
    _check_kind(part, user_class)
    parser = ArgumentParser(exit_on_error=False, allow_abbrev=False)
    arguments = parser.add_class_arguments(user_class, part, fail_untyped=False)
    given = {option: value for option, value in options.items() if option.startswith(f"{part}.")}
    known = [action.dest for action in parser._actions if isinstance(action, ActionTypeHint)]
    _refuse_unknown(given, known, name)
    _refuse_files(given, known)
    for argument in (key.removeprefix(f"{part}.") for key in arguments):
        is_given = any(option.split(".")[1] == argument for option in given)
        if not is_given and _has_no_default(user_class, argument):
            raise UsageError(f"--{part}.{argument} is required, because {name} has no default for it")
    try:
        parsed = parser.parse_args([f"--{option}={value}" for option, value in given.items()])
    except (ArgumentError, TypeError, ValueError) as error:
        raise UsageError(f"--{part}: {short(error, 300)}") from error
    return parser.instantiate(parsed)[part] if build else user_class


def _refuse_unknown(given: Mapping[str, str], known: Sequence[str], user_class: str) -> None:
    """Raises UsageError for the first option that sets no argument of the class, wholly or in part."""
    for option in given:
        if not any(f"{option}.".startswith(f"{each}.") or each.startswith(f"{option}.") for each in known):
            names = [each.partition(".")[2] for each in known]
            meant = nearest(option.partition(".")[2], names, otherwise="" if names else "the class takes no arguments")
            raise UsageError(f"--{option} is not an argument of {user_class}: {meant}")


def _refuse_files(given: Mapping[str, str], known: Sequence[str]) -> None:
    """Raises UsageError if a file is given for a dataclass, or in a mapping. jsonargparse (4.53) would read it as the
    arguments of a dataclass, and the file could name code."""
    for option, value in given.items():
        tree: Any = value
        with suppress(yaml.YAMLError):
            tree = yaml.safe_load(value)
        is_mapping = ":" in value and not isinstance(tree, str)
        for text in (value, *tree_leaves(tree)) if is_mapping or option not in known else ():
            if _is_file(text):
                raise UsageError(f"--{option}: {text} is a file, which could load code: give its values instead")


def _is_file(text: Any) -> bool:
    readable: Any = path_type("fr")
    try:
        readable(text)
    except TypeError:
        return False
    return True


def _check_kind(part: str, user_class: Any) -> None:
    from lightning import pytorch

    base = {"module": pytorch.LightningModule, "datamodule": pytorch.LightningDataModule}[part]
    if not (isinstance(user_class, type) and issubclass(user_class, base)):
        name = getattr(user_class, "__name__", user_class)
        raise UsageError(f"--{part}: {name} is not a {base.__name__}: derive it from lightning.pytorch.{base.__name__}")


def _has_no_default(user_class: type, argument: str) -> bool:
    """Returns whether a constructor argument must be given. jsonargparse (4.53) passes None instead if the argument has
    no type."""
    for each in user_class.__mro__:
        if "__init__" in vars(each):
            parameters = inspect.signature(each.__init__).parameters
            if argument in parameters:
                return parameters[argument].default is inspect.Parameter.empty
    return False


def fit(trainer: Any, module: Any, datamodule: Any, checkpoint: Path | None = None) -> None:
    """Trains a user's module, or continues its training from a checkpoint that this program has written. Raises
    UsageError for manual optimization, several optimizers, or data that have no batch for each rank."""
    if not module.automatic_optimization:
        raise UsageError(f"--module uses manual optimization: {ONE_OPTIMIZER}")
    try:
        trainer.fit(module, datamodule=datamodule, ckpt_path=checkpoint, weights_only=False if checkpoint else None)
    except RuntimeError as error:
        if "only supported with manual optimization" not in str(error):
            raise
        # Lightning (2.6.6) recommends manual optimization here (optimizer._validate_multiple_optimizers_support).
        raise UsageError(f"--module has several optimizers: {ONE_OPTIMIZER}") from error
    if not trainer.num_training_batches:
        raise UsageError("--module: its training data are less than a batch per rank: use more data or a smaller batch")
