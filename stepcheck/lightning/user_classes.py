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
from lightning import pytorch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils._pytree import tree_leaves

from stepcheck.lightning import user_code
from stepcheck.lightning.case import PARTS
from stepcheck.usage import UsageError, nearest, short

ONE_OPTIMIZER = (
    "DeepSpeed steps its only optimizer itself: leave automatic_optimization on, and give all parameters to "
    "one optimizer, in parameter groups"
)


def build_parts(options: Mapping[str, str], needs_data: bool = True) -> list[Any]:
    """Builds the user's module and data module (None if none is named) with their arguments, as LightningCLI does.

    Args:
        options: The names of the classes, and their arguments: module, module.lr, datamodule, ...
        needs_data: Whether the module must have training data. False if a script provides the data.

    Raises:
        UsageError: If a class or an argument is missing, wrong or unknown, if a class fails, or if the module needs
            data and has none.
    """
    module, datamodule = (_build(part, options) if part in options else None for part in PARTS)
    if needs_data and datamodule is None and not is_overridden("train_dataloader", module):
        raise UsageError("--module has no train_dataloader: name its data with --datamodule FILE.py:NAME")
    return [module, datamodule]


def _build(part: str, options: Mapping[str, str]) -> Any:
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
    try:
        return parser.instantiate(parsed)[part]
    except Exception as error:  # a user's code may raise anything
        raise UsageError(f"--{part}: {user_code.where(error)}{type(error).__name__}: {short(error, 300)}") from error


def _refuse_unknown(given: Mapping[str, str], known: Sequence[str], user_class: str) -> None:
    for option in given:
        if not any(f"{option}.".startswith(f"{each}.") or each.startswith(f"{option}.") for each in known):
            names = [each.partition(".")[2] for each in known]
            meant = nearest(option.partition(".")[2], names, otherwise="" if names else "the class takes no arguments")
            raise UsageError(f"--{option} is not an argument of {user_class}: {meant}")


def _refuse_files(given: Mapping[str, str], known: Sequence[str]) -> None:
    """Raises UsageError if a file is given for a dataclass, or in a mapping. jsonargparse (4.53) would read the
    arguments of the dataclass from the file, which could name code."""
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
    base = {"module": pytorch.LightningModule, "datamodule": pytorch.LightningDataModule}[part]
    if not (isinstance(user_class, type) and issubclass(user_class, base)):
        name = getattr(user_class, "__name__", user_class)
        raise UsageError(f"--{part}: {name} is not a {base.__name__}: derive it from lightning.pytorch.{base.__name__}")


def _has_no_default(user_class: type, argument: str) -> bool:
    """Returns whether a constructor argument must be given. For an argument without a type, jsonargparse (4.53) would
    pass None and raise no error."""
    for each in user_class.__mro__:
        if "__init__" in vars(each):
            parameters = inspect.signature(each.__init__).parameters
            if argument in parameters:
                return parameters[argument].default is inspect.Parameter.empty
    return False


def fit(trainer: Any, module: Any, datamodule: Any, checkpoint: Path | None = None) -> None:
    """Trains a user's module, or continues its training from a checkpoint that this program has written. Raises
    UsageError for manual optimization, several optimizers, or data of less than a batch for each rank."""
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
