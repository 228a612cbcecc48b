"""`--strategy auto`: the launching process chooses once, before the ranks start. Choosing imports torch."""

from __future__ import annotations

import os
from dataclasses import replace

import yaml

from cifar_zero.checkpoints import run_folder
from cifar_zero.checkpoints.resume import find_recovered, settle_restart
from cifar_zero.config import rules
from cifar_zero.config.flags import Config
from cifar_zero.config.strategy_specs import STRATEGIES
from cifar_zero.core.console import say
from cifar_zero.core.errors import UsageError
from cifar_zero.launch import rank_environment

VARIABLE = "CIFAR_ZERO_STRATEGY"
"""Environment variable in which the launching process passes its choice to the ranks that it starts."""


def settle(config: Config) -> None:
    """Replaces auto by a strategy's name, and prints which one and why.

    Raises:
        UsageError: no strategy fits, or another launcher has started the ranks, each of which would choose.
    """
    if not rank_environment.is_rank():
        config.strategy = _chosen(config)
        return
    config.strategy = os.environ.pop(VARIABLE, "")
    if config.strategy not in STRATEGIES:
        raise UsageError(
            "--strategy auto cannot be used with torchrun, srun or DeepSpeed's launcher, whose ranks would each "
            "choose: name the strategy that plan.py recommends"
        )


def _chosen(config: Config) -> str:
    rules.settle_machine(config)
    if kept := _of_resumed_run(config):
        say(f"--strategy auto: {kept}, as in the resumed run")
        return kept
    rules.check_model(config)
    from cifar_zero.planning import machine, network
    from cifar_zero.planning.recommend import recommended
    from cifar_zero.planning.survey import survey

    room = machine.this_machine(config)
    choice, reason = recommended(survey(config, network.of(config), room, {}), room)
    if choice is None:
        raise UsageError(f"--strategy auto: {reason}; or name a strategy to try it anyway")
    say(f"--strategy auto: {reason}")
    return choice.strategy


def _of_resumed_run(config: Config) -> str:
    """Returns the strategy of the run that --resume names; empty if it names none, or one with a --ds_config."""
    if config.resume == "last" and not config.name:
        raise UsageError("--resume last with --strategy auto needs --name: the default name contains the strategy")
    config = replace(config)  # --resume is settled again when the run has its name
    settle_restart(config, config.run_name)
    if not config.resume:
        return ""
    fallback = config.data.source == "digits"
    recipe = run_folder.recipe_of(find_recovered(config.resume, config.out, config.run_name, fallback))
    tree = yaml.safe_load(recipe.read_text()) if recipe is not None else {}
    kept = "" if tree.get("ds_config") else tree.get("strategy", "")
    return kept if kept in STRATEGIES else ""
