"""Reads a user's own LightningModule and data module, as FILE.py:NAME or PACKAGE.MODULE:NAME, and builds them with
their arguments, which come from the command line and from a configuration of LightningCLI."""

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser
from yaml import YAMLError

from stepcheck.lightning import file_arguments, user_code
from stepcheck.lightning.case import PARTS, UserClasses
from stepcheck.lightning.file_arguments import Leaves, Tree
from stepcheck.lightning.mistyped import refuse_mistyped
from stepcheck.lightning.plain_data import load_yaml
from stepcheck.usage import UsageError, nearest, short

SECTIONS = {"model": "module", "data": "datamodule"}
"""Sections of a LightningCLI configuration that hold the arguments of a class. The value is the option, --module or
--datamodule, that names this class."""

FROM_TRAINER = {
    "precision": "precision",
    "gradient_clip_val": "clip",
    "accumulate_grad_batches": "accumulate",
}
"""Options in the section `trainer` of a LightningCLI configuration that change the maths, and the fields of a case that
they set. The other options of that section are not read."""

ONE_OPTIMIZER = (
    "DeepSpeed steps its only optimizer itself: leave automatic_optimization on, and give all parameters to "
    "one optimizer, in parameter groups"
)


def options_of_cli(file: str) -> tuple[dict[str, Any], dict[str, Tree]]:
    """Returns the content of a LightningCLI configuration: the Trainer options in FROM_TRAINER, and the arguments of
    the module and of the data module as plain data, which are not checked yet. The names of these classes are not read,
    because a file may not load code. --module and --datamodule name the classes. Raises UsageError if the file cannot
    be read, or if it configures the optimizer or its scheduler."""
    what = f"--config {file}"
    try:
        config = load_yaml(Path(file).read_text())
    except (OSError, ValueError, YAMLError) as error:
        raise UsageError(f"{what} cannot be read: {short(error)}") from error
    if not isinstance(config, dict):
        raise UsageError(f"{what} is not a configuration of LightningCLI: it has no sections")
    options: dict[str, Any] = {}
    arguments: dict[str, Tree] = {}
    for section, value in config.items():
        value = value or {}
        name, dot, _ = str(section).partition(".")
        if name in (*SECTIONS, "trainer") and (dot or not isinstance(value, dict)):
            raise UsageError(f"{what}: {section} is not a section with options")
        if section in ("optimizer", "lr_scheduler") and value:
            raise UsageError(f"{what}: {section} would replace configure_optimizers: move it into your module")
        if section in SECTIONS:
            given = value.get("init_args") or {} if "class_path" in value else value
            if not isinstance(given, dict):
                raise UsageError(f"{what}: {section}.init_args is not a section with options")
            arguments[SECTIONS[section]] = given
        if section == "trainer":
            options |= {ours: value[name] for name, ours in FROM_TRAINER.items() if value.get(name) is not None}
    return options, arguments


def check_exist(classes: UserClasses) -> None:
    """Raises UsageError if a class cannot exist. Imports nothing of the user's, which takes seconds."""
    for part in PARTS:
        if part in classes.options:
            user_code.check_exists(classes.options[part], f"--{part}")


def check_classes(classes: UserClasses, needs_data: bool = True) -> None:
    """Checks the user's classes and their arguments.

    Args:
        classes: The user's classes.
        needs_data: Whether the module must have training data. False if a script provides the data.

    Raises:
        UsageError: If `instance` would refuse a class or an argument, or if the module needs data and has none.
    """
    module, datamodule = (instance(part, classes, build=False) for part in PARTS)
    from lightning.pytorch import LightningModule

    loader = getattr(module, "train_dataloader", None)
    if needs_data and datamodule is None and loader is LightningModule.train_dataloader:
        raise UsageError("--module has no train_dataloader: name its data with --datamodule FILE.py:NAME")


def instance(part: str, classes: UserClasses, build: bool = True) -> Any:
    """Builds the user's module or data module with its arguments, as LightningCLI does, and returns it. Returns None if
    none is named.

    Args:
        part: module or datamodule.
        classes: The user's classes.
        build: Whether to build the module or data module. If false, the arguments are only checked, and the class is
            returned.

    Raises:
        UsageError: If the class or an argument does not exist, if an argument is missing or has the wrong type, or if
            the class is not a LightningModule or a LightningDataModule.
    """
    if part not in classes.options:
        return None
    name = classes.options[part]
    given = {option: value for option, value in classes.options.items() if option.startswith(f"{part}.")}
    user_class = user_code.load(name, f"--{part}")
    _check_kind(part, user_class)
    parser = ArgumentParser(exit_on_error=False, allow_abbrev=False)
    known = parser.add_class_arguments(user_class, part, fail_untyped=False)
    leaves = file_arguments.leaves_of(parser)
    options: dict[str, str] = {}
    for file, of_parts in classes.files.items():
        in_file = file_arguments.options_in(of_parts.get(part, {}), part, leaves)
        left = {option: value for option, value in in_file.items() if option not in given}
        _refuse_unknown(left, leaves, name)
        file_arguments.check(left, leaves, f"--config {file}")
        options |= {option: value if isinstance(value, str) else json.dumps(value) for option, value in left.items()}
    file_arguments.refuse_files(given, leaves)
    options |= given
    _refuse_unknown(options, leaves, name)
    for argument in (key.removeprefix(f"{part}.") for key in known):
        is_given = any(option.split(".")[1] == argument for option in options)
        if not is_given and _has_no_default(user_class, argument):
            raise UsageError(f"--{part}.{argument} is required, because {name} has no default for it")
    try:
        parsed = parser.parse_args([f"--{option}={value}" for option, value in options.items()])
    except (ArgumentError, TypeError, ValueError) as error:
        refuse_mistyped(parser, options)
        raise UsageError(short(error, 300)) from error
    return parser.instantiate_classes(parsed)[part] if build else user_class


def _refuse_unknown(options: Mapping[str, Any], leaves: Leaves, user_class: str) -> None:
    """Raises UsageError for the first option that sets no argument of the class, wholly or in part."""
    for option in options:
        if not any(f"{option}.".startswith(f"{leaf}.") or leaf.startswith(f"{option}.") for leaf in leaves):
            argument = option.partition(".")[2]
            known = [leaf.partition(".")[2] for leaf in leaves]
            meant = nearest(argument, known, otherwise="" if known else "the class takes no arguments")
            raise UsageError(f"--{option} is not an argument of {user_class}: {meant}")


def _check_kind(part: str, user_class: Any) -> None:
    """Raises UsageError unless `user_class` is a LightningModule, or a LightningDataModule for the part datamodule."""
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
