"""From the configuration to the resolved run: the only place where open settings are decided."""

from dataclasses import asdict, replace
from pathlib import Path

from cifar_zero import data
from cifar_zero.checkpoints import run_folder
from cifar_zero.checkpoints.resume import checkpoint_to_resume
from cifar_zero.config import rules
from cifar_zero.config.flags import Choice, Config
from cifar_zero.config.run import NO_CONSENT, Consent, Run, on_this_machine
from cifar_zero.config.strategy_specs import STRATEGIES, raw_spec
from cifar_zero.launch import rank_environment
from cifar_zero.schedules import SCHEDULES


def resolve(config: Config, consent: Consent = NO_CONSENT) -> Run:
    """Returns the resolved run of a configuration on this computer.

    With several nodes, or under torchrun, rank 0 decides later for all ranks what is resumed: see `training.starting`.
    The strategy must be a name, not auto.

    Raises:
        UsageError: it cannot run; says what to use instead.
    """
    run = of_machine(on_this_machine(config), consent)
    if not rank_0_decides(run.config):
        run = with_checkpoint(run, checkpoint_to_resume(run.config))
    rules.check(run)
    return run


def rank_0_decides(config: Config) -> bool:
    """Returns whether the ranks must meet to know what is resumed: on several nodes, or if torchrun restarts them."""
    return config.num_nodes > 1 or rank_environment.by_torchrun()


def of_machine(config: Config, consent: Consent = NO_CONSENT) -> Run:
    """Returns the run of a configuration whose accelerator, devices and precision are decided.

    Raises:
        UsageError: the batch cannot be divided, or the images or a raw DeepSpeed configuration cannot be used.
    """
    if config.find_lr and config.schedule.name != "range_test":
        config = replace(config, schedule=Choice("range_test", asdict(SCHEDULES["range_test"]())))
    spec = raw_spec(config.ds_config) if config.ds_config else STRATEGIES[config.strategy]
    run = Run(config, spec, num_classes=len(data.class_names(config.data)), consent=consent)
    _ = run.micro_batch
    rules.check_finetuning(config)
    return run


def with_checkpoint(run: Run, resume: str) -> Run:
    """Returns the run with the path of the checkpoint that it resumes, empty for none, or of weights to start from.

    Raises:
        UsageError: the strategy cannot resume, or the weights do not exist.
    """
    config = replace(run.config, resume=resume)
    if config.weights:
        file = Path(config.weights) if resume else run_folder.find_checkpoint(config.weights, "", "")
        delta = config.delta and str(Path(config.delta).absolute())
        config = replace(config, weights=str(file.absolute()), delta=delta)
    run = replace(run, config=config)
    rules.check_can_resume(run)
    return run
