"""Checks strategies on a user's own LightningModule: `cifar-zero compare --module FILE.py:NAME`, and `assert_agrees`.

Module, data, loss, optimizer and schedule are the user's; strategy, ranks, precision, accumulation and clipping are
ours. Each training is checked step by step in place, so that none needs another one as its reference.
"""

from __future__ import annotations

import inspect
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentError, ArgumentParser
from yaml import YAMLError

from cifar_zero.comparison import resuming
from cifar_zero.comparison.pool import train_cases, train_jobs
from cifar_zero.comparison.result import PLAIN, Comparison, Variant
from cifar_zero.config import command_line
from cifar_zero.config.arguments import Arguments, read_arguments
from cifar_zero.config.help import refuse_mistyped
from cifar_zero.config.placement import DeviceOptions, StrategyOptions
from cifar_zero.config.run import Run
from cifar_zero.config.settings import DataConfig, flat
from cifar_zero.config.strategy_specs import STRATEGIES
from cifar_zero.core import exits, user_code
from cifar_zero.core.errors import UsageError, short
from cifar_zero.core.plain_data import check, is_plain, load_yaml
from cifar_zero.core.usage import nearest
from cifar_zero.step_check.verdict import Verdict
from cifar_zero.training.resolve import resolve

if TYPE_CHECKING:
    from lightning.pytorch import LightningDataModule, LightningModule


STEPS = 20  # optimizer steps by default

PARTS = ("module", "datamodule")

APPLIED = {option.name for group in (StrategyOptions, DeviceOptions) for option in fields(group)}
APPLIED |= {"max_steps", "gradient_clip_val", "seed", "trainer"}
"""Options and sections of train that apply to somebody's own module: where it runs, length, clipping and seed."""

DEFAULT = [name for name, spec in STRATEGIES.items() if spec.family == "deepspeed" and not spec.super_offload]
"""Strategies that are compared unless some are named, as far as this machine can train them."""

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

PROGRAM = ("cifar_zero.comparison.own_module",)  # trains a file of jobs, see `run_process.start`


def plan(strategies: Sequence[str], ranks: int, accumulate: Sequence[str], flags: Sequence[str]) -> list[Variant]:
    """Returns the cases of a user's module; `flags` are --module, --datamodule, their arguments, --config (see
    `options_of_cli`), and those of APPLIED. Without `strategies` they are those of DEFAULT that can train here. Raises
    UsageError."""
    flags = ["--max_steps", str(STEPS), *flags]
    given = _arguments(flags)
    for flag in given.ours.options:  # first: user's code takes seconds
        if flag.split(".")[0] not in APPLIED:
            known = [f"--{name}" for name in sorted(APPLIED)]
            meant = nearest(f"--{flag}", known, cutoff=0.65, otherwise=f"or use {', '.join(known)}")
            raise UsageError(
                f"--{flag} is not for --module: give it to your code (--module.X, --datamodule.X); {meant}"
            )
    from lightning.pytorch import LightningModule

    module, datamodule = (_instance(part, given, build=False) for part in PARTS)
    loader = getattr(module, "train_dataloader", None)
    if datamodule is None and loader is LightningModule.train_dataloader:
        raise UsageError("--module has no train_dataloader: name its data with --datamodule FILE.py:NAME")
    cases = []
    for parts in accumulate or [given.ours.options.get("accumulate", "1")]:
        for name in strategies or DEFAULT:
            job = [*flags, "--devices", str(ranks), "--accumulate", parts, *command_line.strategy_flags(name)]
            try:
                if STRATEGIES.get(name) and STRATEGIES[name].one_replica:
                    raise UsageError(f"--strategies {name}: splits only the vision transformers of this program")
                _run(_arguments(job).ours)
            except UsageError:
                if strategies:
                    raise
                continue
            name = Path(name).stem
            row = f"accumulate {parts}"
            title = name if len(accumulate) < 2 else f"{name}, {row}"
            cases.append(Variant(title, name, ranks, job, row=row))
    return cases


def resolved(flags: list[str]) -> Run:
    """Returns the run of a case's flags; raises UsageError: it cannot run here."""
    return _run(_arguments(flags).ours)


def compare(cases: list[Variant], title: str, command: str, folder: Path) -> Comparison:
    """Trains the cases of `plan`, with the logs in `folder`; returns their verdicts. Raises UsageError: the module
    cannot be trained under DeepSpeed."""
    theirs = _arguments(cases[0].flags).theirs
    recipe = {"module": theirs["module"], "datamodule": theirs.get("datamodule", "the module's own loader")}
    return train_cases(Comparison(title, command, recipe, PLAIN, cases), folder, PROGRAM, of_user=True)


def train(flags: list[str], folder: Path) -> Verdict:
    """Trains a user's module as one rank, without output. Raises UsageError for manual optimization, several
    optimizers, or code that fails."""
    from lightning.pytorch import LightningModule, seed_everything
    from lightning.pytorch.loggers.logger import DummyLogger
    from lightning.pytorch.strategies import DDPStrategy

    from cifar_zero.comparison import jobs

    check, checkpoint, flags = resuming.of_job(flags, folder)
    given = _arguments(flags)
    run = _run(given.ours)
    if checkpoint is not None:  # this command has written it
        run = replace(run, consent=replace(run.consent, trust=True))
    seed_everything(run.recipe.seed, verbose=False)
    module, datamodule = (_instance(part, given) for part in PARTS)
    if not module.automatic_optimization:
        raise UsageError(f"--module uses manual optimization: {ONE_OPTIMIZER}")
    elements = sum(parameter.numel() for parameter in module.parameters()) or run.placement.zero.reduce_bucket_size
    # What modules of others ask for: a logger, and a validation whose metrics a schedule monitors.
    theirs_too = {"logger": DummyLogger(), "limit_val_batches": 1, "use_distributed_sampler": True}
    trainer = jobs.quiet_trainer(run, folder, [check], elements, **theirs_too)
    strategy: Any = trainer.strategy
    if run.spec.family == "fsdp2":
        strategy.parts = lambda module: [*module.children()]
        if type(module).configure_model is LightningModule.configure_model:  # Lightning (2.6.6) wants one of its own
            module.__class__ = type(type(module).__name__, (type(module),), {"configure_model": lambda self: None})
    elif isinstance(strategy, DDPStrategy):
        strategy._ddp_kwargs["find_unused_parameters"] = True
    seed_everything(run.recipe.seed, verbose=False)
    try:
        trainer.fit(module, datamodule=datamodule, ckpt_path=checkpoint)
    except RuntimeError as error:
        if "only supported with manual optimization" not in str(error):
            raise
        # Lightning (2.6.6) advises to use it, in optimizer._validate_multiple_optimizers_support.
        raise UsageError(f"--module has several optimizers: {ONE_OPTIMIZER}") from error
    if not trainer.num_training_batches:
        raise UsageError("--module: its training data have no batch for each rank; use more data or a smaller batch")
    return check.verdict


def assert_agrees(
    module: type[LightningModule],
    datamodule: type[LightningDataModule] | None = None,
    *,
    strategies: Sequence[str] = (),
    devices: int = 1,
    steps: int = STEPS,
    accumulate: int = 1,
    precision: str = "32-true",
    gradient_clip_val: float = 0.0,
    module_options: Mapping[str, Any] | None = None,
    datamodule_options: Mapping[str, Any] | None = None,
) -> None:
    """Trains a LightningModule under each strategy in new processes and checks each step, for tests.

    The classes are at the top level of a file or of an importable module; without a datamodule the module has a
    train_dataloader; `*_options` are their arguments. The strategies are train's, by default those of DeepSpeed that
    can train here; `devices` are ranks, on GPUs if there are any; `accumulate` micro-batches make a step; gradients are
    clipped to the norm `gradient_clip_val` unless it is 0.

    Raises AssertionError: says what differs first, and UsageError: a strategy cannot train here.
    """
    flags = ["--max_steps", str(steps), "--precision", precision, "--gradient_clip_val", str(gradient_clip_val)]
    for part, given, options in zip(PARTS, (module, datamodule), (module_options, datamodule_options), strict=True):
        flags += [f"--{part}", _name_of(given)] if given is not None else []
        for name, value in (options or {}).items():
            flags += [f"--{part}.{name}", value if isinstance(value, str) else json.dumps(value)]
    with tempfile.TemporaryDirectory() as folder:
        cases = plan(strategies, devices, [str(accumulate)], flags)
        found = compare(cases, "", "", Path(folder))
    failed = [f"{variant.name}: {variant.outcome}" for variant in found.variants if not variant.passed]
    assert not failed, "\n".join(failed)


@dataclass
class Given:
    """What a command line gives."""

    theirs: dict[str, Any]  # options of the user's classes: module, module.lr, datamodule, ...
    ours: Arguments  # options of train
    in_files: set[str]  # those of the user's classes that --config gives


def _arguments(flags: Sequence[str]) -> Given:
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


def _run(ours: Arguments) -> Run:
    """Returns the run of a job: its placement, length, clipping and seed. Its model and its images are the user's, so
    those of the recipe do not matter. Raises UsageError: it cannot run here."""
    settings = command_line.settings_of_arguments(ours)
    ranks, parts = settings.placement.world_size, settings.placement.accumulate
    images = DataConfig(source="synthetic", synthetic_size=64)
    length = {"batch_size": ranks * parts, "epochs": settings.recipe.max_steps}
    return resolve(settings.changed(fast_loop=False, data=images, **length))


def _instance(part: str, arguments: Given, build: bool = True) -> Any:
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


def _name_of(user_class: type) -> str:
    """Returns PACKAGE.MODULE:NAME of a class, or FILE.py:NAME where its module is in no package."""
    module = user_class.__module__
    return f"{module if '.' in module else inspect.getfile(user_class)}:{user_class.__qualname__}"


def main() -> int:
    """Trains the file of jobs that the command line names."""
    return train_jobs(Path(sys.argv[1]), "cifar_zero.comparison.own_module:train")


if __name__ == "__main__":
    sys.exit(exits.guarded(main))
