"""Checks strategies on a user's own LightningModule, for `cifar-zero compare --module FILE.py:NAME` and
`assert_agrees`.

The user's code provides the module, the data, the loss, the optimizer and the schedule. This program sets the strategy,
the ranks, precision, accumulation and clipping. Each step is checked during training by a replay with plain PyTorch, so
that no second run is needed as a reference.
"""

from __future__ import annotations

import inspect
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cifar_zero.comparison.cases import cases_by_strategy
from cifar_zero.comparison.launches import train_cases
from cifar_zero.comparison.result import PLAIN, Comparison, Variant
from cifar_zero.config import command_line, ds_config
from cifar_zero.config.run import Run
from cifar_zero.config.settings import DataConfig
from cifar_zero.config.strategy_specs import STRATEGIES
from cifar_zero.config.user_classes import check_options, read_given
from cifar_zero.core.errors import UsageError
from cifar_zero.training.resolve import resolve
from stepcheck.lightning.case import PARTS
from stepcheck.lightning.user_classes import check_classes, fit, instance

if TYPE_CHECKING:
    from lightning.pytorch import LightningDataModule, LightningModule

    from cifar_zero.step_check.callback import StepCheck


STEPS = 20  # optimizer steps by default

DEFAULT = [name for name, spec in STRATEGIES.items() if spec.family == "deepspeed" and not spec.super_offload]
"""Strategies that are compared by default. A strategy that cannot train on this machine is left out."""

TRAIN = "cifar_zero.comparison.own_module:train_module"  # the function that trains a case in a rank


def plan(
    strategies: Sequence[str], ranks: int, accumulate: Sequence[str], flags: Sequence[str], needs_data: bool = True
) -> list[Variant]:
    """Returns the cases of a user's module.

    Args:
        strategies: Names of strategies, or raw DeepSpeed configurations. The default is every strategy in DEFAULT that
            can train on this machine.
        ranks: Number of ranks.
        accumulate: Numbers of micro-batches per step. Each strategy has a case for each number. The default is what
            --config or a raw DeepSpeed configuration gives, or 1.
        flags: --module, --datamodule, their arguments, --config (see `options_of_cli`), and the options in
            `user_classes.APPLIED`.
        needs_data: Whether the module must have data. A module that is trained on the batches of a script needs none.

    Raises:
        UsageError: If a flag is refused, or one of the given strategies cannot train on this machine.
    """
    flags = ["--max_steps", str(STEPS), *flags]
    given = read_given(flags)
    check_options(given)
    cases: list[Variant] = []
    for parts in accumulate or [""]:
        row, common = str(given.options["module"]).rpartition(":")[2], flags
        if parts:
            row, common = f"accumulate {parts}", [*flags, "--accumulate", parts]
        for case in cases_by_strategy(strategies, DEFAULT, ranks, common, row, resolved):
            if len(accumulate) > 1:
                case.name += f", {row}"
            cases.append(case)
    check_classes(given, needs_data)  # last, because importing the user's code takes seconds
    return cases


def resolved(flags: Sequence[str]) -> Run:
    """Returns a run with the placement, length, clipping and seed of a case, whose flags come from `plan`. The run's
    model and images do not matter, because the user's module and data are trained instead. Raises UsageError if the
    case cannot be trained on this machine."""
    settings = command_line.settings_of_arguments(read_given(flags).ours)
    strategy, ranks = settings.placement.strategy, settings.placement.world_size
    if STRATEGIES[strategy].one_replica:
        raise UsageError(f"--strategies {strategy} splits only the built-in vit_* models: leave it out")
    micro_batch = 1
    if file := settings.placement.ds_config:
        ds_config.check_for_module(file)
        micro_batch = (ds_config.spec_of(settings.placement).raw or {}).get("train_micro_batch_size_per_gpu", 1)
    batch = micro_batch * ranks * settings.placement.accumulate
    images = DataConfig(source="synthetic", synthetic_size=max(64, 2 * batch))
    length = {"batch_size": batch, "epochs": settings.recipe.max_steps}
    return resolve(settings.changed(fast_loop=False, data=images, **length))


def compare(cases: list[Variant], title: str, folder: Path, **baselines: Any) -> Comparison:
    """Trains the cases of `plan` and returns the comparison with their verdicts.

    Args:
        cases: The cases of `plan`.
        title: Title of the comparison.
        folder: Receives the logs.
        **baselines: `against` and `save_baseline` of `Comparison`.

    Raises:
        UsageError: If the module cannot be trained under DeepSpeed.
    """
    theirs = read_given(cases[0].flags).options
    recipe = {"module": theirs["module"], "datamodule": theirs.get("datamodule", "the module's own loader")}
    return train_cases(Comparison(title, recipe, PLAIN, cases, **baselines), folder, TRAIN, of_user=True)


def train_module(flags: list[str], folder: Path, check: StepCheck) -> None:
    """Trains a user's module on this rank, without output, and checks its steps. Raises UsageError if the module uses
    manual optimization or several optimizers, or if the user's code fails.

    Args:
        flags: The flags of a case from `plan`.
        folder: Folder for temporary files.
        check: Callback that checks the steps. If it has a checkpoint, training resumes from this checkpoint. If it is a
            `ScriptCheck`, training starts from the script's weights.
    """
    from lightning.pytorch import LightningModule, seed_everything
    from lightning.pytorch.loggers.logger import DummyLogger
    from lightning.pytorch.strategies import DDPStrategy

    from cifar_zero.comparison import jobs
    from cifar_zero.step_check.script_check import ScriptCheck

    given, run = read_given(flags), resolved(flags)
    if check.checkpoint is not None:  # this command wrote the checkpoint, so it may be loaded
        run = replace(run, consent=replace(run.consent, trust=True))
    seed_everything(run.recipe.seed, verbose=False)
    module, datamodule = (instance(part, given) for part in PARTS)
    elements = sum(parameter.numel() for parameter in module.parameters()) or run.placement.zero.reduce_bucket_size
    # Users' modules may need a logger. Their schedules may need validation, because they monitor its metrics.
    theirs_too = {"logger": DummyLogger(), "limit_val_batches": 1, "use_distributed_sampler": True}
    trainer = jobs.quiet_trainer(run, folder, [check], elements, **theirs_too)
    strategy: Any = trainer.strategy
    if run.spec.family == "fsdp2":
        if type(module).configure_model is LightningModule.configure_model:  # Lightning (2.6.6) needs an override
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
    """Trains a LightningModule under each strategy in new processes, and compares each step with plain PyTorch. It is
    meant for tests.

    Args:
        module: A class at the top level of a file or of an importable module.
        datamodule: A LightningDataModule class. Without it, the module needs a `train_dataloader`.
        strategies: Names of strategies of train. The default is every strategy in DEFAULT that can train on this
            machine.
        devices: Number of ranks. They use GPUs if there are any.
        steps: Number of optimizer steps.
        accumulate: Number of micro-batches per step.
        precision: Precision of the training, by Lightning's names.
        gradient_clip_val: Largest norm of the gradients, or 0 for no clipping.
        module_options: Arguments of the module's class.
        datamodule_options: Arguments of the data module's class.

    Raises:
        AssertionError: If a strategy does not agree with plain PyTorch. The message names the first difference.
        UsageError: If a strategy cannot train on this machine.
    """
    flags = ["--max_steps", str(steps), "--precision", precision, "--gradient_clip_val", str(gradient_clip_val)]
    for part, given, options in zip(PARTS, (module, datamodule), (module_options, datamodule_options), strict=True):
        flags += [f"--{part}", _name_of(given)] if given is not None else []
        for name, value in (options or {}).items():
            flags += [f"--{part}.{name}", value if isinstance(value, str) else json.dumps(value)]
    with tempfile.TemporaryDirectory() as folder:
        cases = plan(strategies, devices, [str(accumulate)], flags)
        found = compare(cases, "", Path(folder))
    failed = [f"{variant.name}: {variant.outcome}" for variant in found.variants if not variant.passed]
    assert not failed, "\n".join(failed)


def _name_of(user_class: type) -> str:
    """Returns PACKAGE.MODULE:NAME of a class, or FILE.py:NAME if its module is not in a package."""
    module = user_class.__module__
    return f"{module if '.' in module else inspect.getfile(user_class)}:{user_class.__qualname__}"
