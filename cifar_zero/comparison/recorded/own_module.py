"""Compares strategies on a user's own LightningModule: `compare.py --module FILE.py:NAME`, and `assert_agrees`.

Module, data, loss, optimizer and schedule are the user's; strategy, ranks, precision, accumulation and clipping are
ours. The reference is DDP on the same number of ranks, one too: only with several ranks, or a strategy made for them,
does Lightning (2.6.6) replace the sampler of a loader by a DistributedSampler, which shuffles in another order.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentError, ArgumentParser

from cifar_zero.comparison.recorded.cases import Case, Job
from cifar_zero.config import command_line
from cifar_zero.config.strategy_specs import STRATEGIES
from cifar_zero.config.suggestions import one_line
from cifar_zero.core import exits, user_code
from cifar_zero.core.errors import UsageError
from cifar_zero.core.usage import nearest
from cifar_zero.training.resolve import resolve

if TYPE_CHECKING:
    from lightning.pytorch import LightningDataModule, LightningModule

    from cifar_zero.comparison.recorded.record import Record

STEPS = 20  # optimizer steps by default

PARTS = ("module", "datamodule")

OF_USER = r"--(data)?module([.=]|$)"  # flags of the user's classes and of their arguments

OURS = ("precision", "gradient_clip_val", "max_steps", "seed", "accelerator", "timeout", "zero", "offload", "trainer")
"""Flags of train.py that apply to somebody's own module; of the last three all that begin so."""

DEFAULT = [name for name, spec in STRATEGIES.items() if spec.family == "deepspeed" and not spec.super_offload]
"""Strategies that are compared unless some are named, as far as this machine can train them."""

ONE_OPTIMIZER = (
    "DeepSpeed has one optimizer, which it steps itself: leave automatic_optimization on, and give all parameters to "
    "one optimizer, in parameter groups"
)

PROGRAM = ("-m", "cifar_zero.comparison.recorded.own_module")  # what Python starts to train a file of jobs


def plan(strategies: Sequence[str], ranks: int, accumulate: Sequence[str], flags: Sequence[str]) -> list[Case]:
    """Returns the cases of a user's module; `flags` are --module, --datamodule, their arguments, and those of OURS.
    Without `strategies` they are those of DEFAULT that can train here. Raises UsageError."""
    of_user, ours = command_line.split(flags, OF_USER)
    for flag in (flag[2:].split("=")[0] for flag in ours if flag.startswith("--")):  # first: user's code takes seconds
        if flag.split(".")[0] not in OURS:
            known = ", ".join(f"--{name}" for name in OURS)
            meant = nearest(f"--{flag}", [f"--{name}" for name in OURS], cutoff=0.65, otherwise=f"or use {known}")
            raise UsageError(
                f"--{flag} is not for --module: give it to your code (--module.X, --datamodule.X); {meant}"
            )
    from lightning.pytorch import LightningModule

    module, datamodule = (_instance(part, of_user, build=False) for part in PARTS)
    theirs = getattr(module, "train_dataloader", None)
    if datamodule is None and theirs is LightningModule.train_dataloader:
        raise UsageError("--module has no train_dataloader: name its data with --datamodule FILE.py:NAME")
    given = {flag.split("=")[0] for flag in ours}
    precision = "32-true" if "--precision" not in given else command_line.parse(ours).precision
    ours = [*([] if "--max_steps" in given else ["--max_steps", str(STEPS)]), "--precision", precision, *ours]
    cases = []
    for parts in accumulate or ["1"]:
        size = ["--devices", str(ranks), "--accumulate", parts]
        reference = Job(ranks, (*of_user, *ours, *size, "--strategy", "ddp"))
        for name in strategies or DEFAULT:
            job = Job(ranks, (*of_user, *ours, *size, *command_line.choosing(name)))
            try:
                if STRATEGIES.get(name) and STRATEGIES[name].one_replica:
                    raise UsageError(f"--strategies {name}: splits only the vision transformers of this program")
                resolve(command_line.parse(_training([*job.flags])))
            except UsageError:
                if strategies:
                    raise
                continue
            job = reference if name == "baseline" else job  # whose order of the images may be another
            name = Path(name).stem
            title = name if len(accumulate) < 2 else f"{name}, accumulate {parts}"
            cases.append(Case(title, name, int(parts), precision, job, reference, must_learn=False))
    return cases


def train(flags: list[str], sign: int, folder: Path) -> Record:
    """Trains a user's module as one rank, without output; returns its record, on every rank. `sign` is that of its
    perturbation, 0 for none. Raises UsageError for manual optimization, several optimizers, or code that fails."""
    import torch
    from lightning.pytorch import seed_everything

    from cifar_zero.comparison.perturbed import perturb
    from cifar_zero.comparison.recorded.recording import Recording, Reseed, quiet_trainer

    run = resolve(command_line.parse(_training(flags)))
    seed_everything(run.config.seed, verbose=False)
    module, datamodule = (_instance(part, flags) for part in PARTS)
    if not module.automatic_optimization:
        raise UsageError(f"--module uses manual optimization: {ONE_OPTIMIZER}")
    build = module.configure_model

    def configure_model() -> None:
        build()
        if sign:
            perturb(module, run.config.precision, run.config.accelerator, sign)

    module.configure_model = configure_model
    elements = sum(parameter.numel() for parameter in module.parameters()) or run.config.zero.reduce_bucket_size
    recording = Recording(run.config.max_steps)
    callbacks = [Reseed(run.config.seed), recording]
    trainer = quiet_trainer(run, folder, callbacks, elements, use_distributed_sampler=True)
    strategy: Any = trainer.strategy
    if run.spec.family == "fsdp2":
        strategy.parts = lambda module: [*module.children()]
    torch.manual_seed(run.config.seed)
    try:
        trainer.fit(module, datamodule=datamodule)
    except RuntimeError as error:
        if "only supported with manual optimization" not in str(error):
            raise
        # Lightning (2.6.6) advises to use it, in optimizer._validate_multiple_optimizers_support.
        raise UsageError(f"--module has several optimizers: {ONE_OPTIMIZER}") from error
    return recording.record


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
    """Trains a LightningModule under each strategy in new processes and compares it with plain PyTorch, for tests.

    The classes are at the top level of a file or of an importable module; without a datamodule the module has a
    train_dataloader; `*_options` are their arguments. The strategies are train.py's, by default those of DeepSpeed that
    can train here; `devices` are ranks, on GPUs if there are any; `accumulate` micro-batches make a step; gradients are
    clipped to the norm `gradient_clip_val` unless it is 0.

    Raises AssertionError: says what differs first, and UsageError: a strategy cannot train here.
    """
    from cifar_zero.comparison.recorded.trials import try_all

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


def _training(flags: Sequence[str]) -> list[str]:
    """Returns the flags of train.py of a job. The model and the images of a recipe do not matter."""
    _, ours = command_line.split(flags, OF_USER)
    config = command_line.parse(ours)
    small = ["--data.source", "synthetic", "--data.synthetic_size", "64", "--fast_loop", "false"]
    batch = ["--batch_size", str(config.world_size * config.accumulate), "--epochs", str(config.max_steps)]
    return [*ours, *small, *batch]


def _instance(part: str, flags: Sequence[str], build: bool = True) -> Any:
    """Returns the user's module or data, with the arguments of its flags, as LightningCLI does; None without one. Not
    to `build` it only checks the flags, and returns the class or function that they name."""
    mine, _ = command_line.split(flags, rf"--{part}([.=]|$)")
    if f"--{part}" not in mine:
        return None
    place = mine.index(f"--{part}")
    _, name = mine.pop(place), mine.pop(place)
    user_class = user_code.load(name, f"--{part}")
    parser = ArgumentParser(exit_on_error=False, allow_abbrev=False)
    known = [key.removeprefix(f"{part}.") for key in parser.add_class_arguments(user_class, part, fail_untyped=False)]
    try:
        parsed = parser.parse_args(mine)
    except (ArgumentError, TypeError, ValueError) as error:
        message = one_line(error)
        if unknown := re.match(rf"unrecognized arguments: --{part}\.([^ =]+)", message):
            meant = nearest(unknown[1], known, otherwise="" if known else "it takes none")
            message = f"--{part}.{unknown[1]} is not an argument of {name}: {meant}"
        raise UsageError(message) from error
    return parser.instantiate_classes(parsed)[part] if build else user_class


def _name_of(user_class: type) -> str:
    """Returns PACKAGE.MODULE:NAME of a class, or FILE.py:NAME where its module is in no package."""
    module = user_class.__module__
    return f"{module if '.' in module else inspect.getfile(user_class)}:{user_class.__qualname__}"


def main() -> int:
    """Trains the file of jobs that the command line names."""
    from cifar_zero.comparison.recorded.record import train_jobs

    return train_jobs(Path(sys.argv[1]), train)


if __name__ == "__main__":
    sys.exit(exits.guarded(main))
