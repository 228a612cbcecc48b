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
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cifar_zero.comparison.pool import train_cases, train_jobs
from cifar_zero.comparison.result import PLAIN, Comparison, Variant
from cifar_zero.config import command_line
from cifar_zero.config.arguments import Arguments
from cifar_zero.config.run import Run
from cifar_zero.config.settings import DataConfig
from cifar_zero.config.strategy_specs import STRATEGIES
from cifar_zero.config.user_classes import PARTS, check_given, fit, instance, read_given
from cifar_zero.core import exits
from cifar_zero.core.errors import UsageError
from cifar_zero.training.resolve import resolve

if TYPE_CHECKING:
    from lightning.pytorch import LightningDataModule, LightningModule

    from cifar_zero.step_check.callback import StepCheck


STEPS = 20  # optimizer steps by default

DEFAULT = [name for name, spec in STRATEGIES.items() if spec.family == "deepspeed" and not spec.super_offload]
"""Strategies that are compared unless some are named, as far as this machine can train them."""

PROGRAM = ("cifar_zero.comparison.own_module",)  # trains a file of jobs, see `run_process.start`


def plan(
    strategies: Sequence[str], ranks: int, accumulate: Sequence[str], flags: Sequence[str], needs_data: bool = True
) -> list[Variant]:
    """Returns the cases of a user's module; `flags` are --module, --datamodule, their arguments, --config (see
    `options_of_cli`), and those of APPLIED. Without `strategies` they are those of DEFAULT that can train here. It
    `needs_data` unless it gets a script's. Raises UsageError."""
    flags = ["--max_steps", str(STEPS), *flags]
    given = read_given(flags)
    check_given(given, needs_data)
    cases = []
    for parts in accumulate or [given.ours.options.get("accumulate", "1")]:
        for name in strategies or DEFAULT:
            job = [*flags, "--devices", str(ranks), "--accumulate", parts, *command_line.strategy_flags(name)]
            try:
                if STRATEGIES.get(name) and STRATEGIES[name].one_replica:
                    raise UsageError(f"--strategies {name}: splits only the vision transformers of this program")
                _run(read_given(job).ours)
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
    return _run(read_given(flags).ours)


def compare(cases: list[Variant], title: str, command: str, folder: Path, **files: Any) -> Comparison:
    """Trains the cases of `plan`, with the logs in `folder` and the `files` of baselines of a Comparison; returns their
    verdicts. Raises UsageError: the module cannot be trained under DeepSpeed."""
    theirs = read_given(cases[0].flags).theirs
    recipe = {"module": theirs["module"], "datamodule": theirs.get("datamodule", "the module's own loader")}
    return train_cases(Comparison(title, command, recipe, PLAIN, cases, **files), folder, PROGRAM, of_user=True)


def train(flags: list[str], folder: Path, check: StepCheck) -> None:
    """Trains a user's module as one rank, without output. Raises UsageError for manual optimization, several
    optimizers, or code that fails."""
    from lightning.pytorch import LightningModule, seed_everything
    from lightning.pytorch.loggers.logger import DummyLogger
    from lightning.pytorch.strategies import DDPStrategy

    from cifar_zero.comparison import jobs
    from cifar_zero.step_check.script_check import ScriptCheck

    given = read_given(flags)
    run = _run(given.ours)
    if check.checkpoint is not None:  # this command has written it
        run = replace(run, consent=replace(run.consent, trust=True))
    seed_everything(run.recipe.seed, verbose=False)
    module, datamodule = (instance(part, given) for part in PARTS)
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
    data: Any = module if datamodule is None else datamodule
    if isinstance(check, ScriptCheck):
        recorded = check.recorded
        module.configure_model()
        recorded.give_weights(module)
        if recorded.own_data:
            recorded.order_like_script(data)
        else:
            data.train_dataloader = partial(recorded.loader, strategy)
    seed_everything(run.recipe.seed, verbose=False)
    fit(trainer, module, datamodule, check.checkpoint)


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


def _run(ours: Arguments) -> Run:
    """Returns the run of a job: its placement, length, clipping and seed. Its model and its images are the user's, so
    those of the recipe do not matter. Raises UsageError: it cannot run here."""
    settings = command_line.settings_of_arguments(ours)
    ranks, parts = settings.placement.world_size, settings.placement.accumulate
    images = DataConfig(source="synthetic", synthetic_size=64)
    length = {"batch_size": ranks * parts, "epochs": settings.recipe.max_steps}
    return resolve(settings.changed(fast_loop=False, data=images, **length))


def _name_of(user_class: type) -> str:
    """Returns PACKAGE.MODULE:NAME of a class, or FILE.py:NAME where its module is in no package."""
    module = user_class.__module__
    return f"{module if '.' in module else inspect.getfile(user_class)}:{user_class.__qualname__}"


def main() -> int:
    """Trains the file of jobs that the command line names."""
    return train_jobs(Path(sys.argv[1]), "cifar_zero.comparison.own_module:train")


if __name__ == "__main__":
    sys.exit(exits.guarded(main))
