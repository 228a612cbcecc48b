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
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentError, ArgumentParser

from cifar_zero.comparison.cases import Case
from cifar_zero.config import command_line
from cifar_zero.config.arguments import Arguments, read_arguments
from cifar_zero.config.help import refuse_mistyped
from cifar_zero.config.placement import DeviceOptions, StrategyOptions
from cifar_zero.config.run import Run
from cifar_zero.config.settings import DataConfig
from cifar_zero.config.strategy_specs import STRATEGIES
from cifar_zero.core import exits, user_code
from cifar_zero.core.errors import UsageError, short
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

ONE_OPTIMIZER = (
    "DeepSpeed has one optimizer, which it steps itself: leave automatic_optimization on, and give all parameters to "
    "one optimizer, in parameter groups"
)

PROGRAM = ("cifar_zero.comparison.own_module",)  # trains a file of jobs, see `run_process.start`


def plan(strategies: Sequence[str], ranks: int, accumulate: Sequence[str], flags: Sequence[str]) -> list[Case]:
    """Returns the cases of a user's module; `flags` are --module, --datamodule, their arguments, and those of APPLIED.
    Without `strategies` they are those of DEFAULT that can train here. Raises UsageError."""
    flags = ["--max_steps", str(STEPS), *flags]
    theirs, ours = _arguments(flags)
    for flag in ours.options:  # first: user's code takes seconds
        if flag.split(".")[0] not in APPLIED:
            known = [f"--{name}" for name in sorted(APPLIED)]
            meant = nearest(f"--{flag}", known, cutoff=0.65, otherwise=f"or use {', '.join(known)}")
            raise UsageError(
                f"--{flag} is not for --module: give it to your code (--module.X, --datamodule.X); {meant}"
            )
    from lightning.pytorch import LightningModule

    module, datamodule = (_instance(part, theirs, build=False) for part in PARTS)
    loader = getattr(module, "train_dataloader", None)
    if datamodule is None and loader is LightningModule.train_dataloader:
        raise UsageError("--module has no train_dataloader: name its data with --datamodule FILE.py:NAME")
    cases = []
    for parts in accumulate or ["1"]:
        for name in strategies or DEFAULT:
            size = ["--devices", str(ranks), "--accumulate", parts]
            given = (*flags, *size, *command_line.strategy_flags(name))
            try:
                if STRATEGIES.get(name) and STRATEGIES[name].one_replica:
                    raise UsageError(f"--strategies {name}: splits only the vision transformers of this program")
                _run(_arguments(given)[1])
            except UsageError:
                if strategies:
                    raise
                continue
            name = Path(name).stem
            row = f"accumulate {parts}"
            title = name if len(accumulate) < 2 else f"{name}, {row}"
            cases.append(Case(title, row, name, ranks, int(parts), given))
    return cases


def train(flags: list[str], folder: Path) -> Verdict:
    """Trains a user's module as one rank, without output. Raises UsageError for manual optimization, several
    optimizers, or code that fails."""
    from lightning.pytorch import LightningModule, seed_everything
    from lightning.pytorch.loggers.logger import DummyLogger
    from lightning.pytorch.strategies import DDPStrategy

    from cifar_zero.comparison import jobs
    from cifar_zero.step_check.callback import StepCheck

    theirs, ours = _arguments(flags)
    run = _run(ours)
    seed_everything(run.recipe.seed, verbose=False)
    module, datamodule = (_instance(part, theirs) for part in PARTS)
    if not module.automatic_optimization:
        raise UsageError(f"--module uses manual optimization: {ONE_OPTIMIZER}")
    elements = sum(parameter.numel() for parameter in module.parameters()) or run.placement.zero.reduce_bucket_size
    check = StepCheck(every=1, on_fault="warn")
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
        trainer.fit(module, datamodule=datamodule)
    except RuntimeError as error:
        if "only supported with manual optimization" not in str(error):
            raise
        # Lightning (2.6.6) advises to use it, in optimizer._validate_multiple_optimizers_support.
        raise UsageError(f"--module has several optimizers: {ONE_OPTIMIZER}") from error
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
    from cifar_zero.comparison.jobs import try_all

    flags = ["--max_steps", str(steps), "--precision", precision, "--gradient_clip_val", str(gradient_clip_val)]
    for part, given, options in zip(PARTS, (module, datamodule), (module_options, datamodule_options), strict=True):
        flags += [f"--{part}", _name_of(given)] if given is not None else []
        for name, value in (options or {}).items():
            flags += [f"--{part}.{name}", value if isinstance(value, str) else json.dumps(value)]
    with tempfile.TemporaryDirectory() as folder:
        cases = plan(strategies, devices, [str(accumulate)], flags)
        found = try_all(cases, Path(folder), PROGRAM, "", "", {})
    failed = [f"{variant.name}: {variant.outcome}" for variant in found.variants if not variant.passed]
    assert not failed, "\n".join(failed)


def _arguments(flags: Sequence[str]) -> tuple[dict[str, Any], Arguments]:
    """Returns the options of the user's classes, and those of train."""
    ours = read_arguments(flags)
    theirs = {option: value for option, value in ours.options.items() if option.split(".")[0] in PARTS}
    ours.options = {option: value for option, value in ours.options.items() if option not in theirs}
    return theirs, ours


def _run(ours: Arguments) -> Run:
    """Returns the run of a job: its placement, length, clipping and seed. Its model and its images are the user's, so
    those of the recipe do not matter. Raises UsageError: it cannot run here."""
    settings = command_line.settings_of_arguments(ours)
    ranks, parts = settings.placement.world_size, settings.placement.accumulate
    images = DataConfig(source="synthetic", synthetic_size=64)
    length = {"batch_size": ranks * parts, "epochs": settings.recipe.max_steps}
    return resolve(settings.changed(fast_loop=False, data=images, **length))


def _instance(part: str, options: Mapping[str, Any], build: bool = True) -> Any:
    """Returns the user's module or data, with the arguments among its options, as LightningCLI does; None without one.
    Not to `build` it only checks the arguments, and returns the class or function that is named."""
    if part not in options:
        return None
    name = options[part]
    given = {option: value for option, value in options.items() if option.startswith(f"{part}.")}
    user_class = user_code.load(name, f"--{part}")
    parser = ArgumentParser(exit_on_error=False, allow_abbrev=False)
    known = [key.removeprefix(f"{part}.") for key in parser.add_class_arguments(user_class, part, fail_untyped=False)]
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


def _name_of(user_class: type) -> str:
    """Returns PACKAGE.MODULE:NAME of a class, or FILE.py:NAME where its module is in no package."""
    module = user_class.__module__
    return f"{module if '.' in module else inspect.getfile(user_class)}:{user_class.__qualname__}"


def main() -> int:
    """Trains the file of jobs that the command line names."""
    from cifar_zero.comparison.jobs import train_jobs

    return train_jobs(Path(sys.argv[1]), train)


if __name__ == "__main__":
    sys.exit(exits.guarded(main))
