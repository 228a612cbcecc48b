"""`--strategy auto`: chosen once, before the ranks start, by the process that starts them; imports torch to choose."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import yaml

import checks
import launch
import run_folder
from config import Config
from errors import UsageError
from resume import find_recovered, settle_restart
from sources.console import say
from strategies import STRATEGIES

if TYPE_CHECKING:
    from planning.survey import Room

VARIABLE = "CIFAR_ZERO_STRATEGY"
"""Environment variable in which the launching process passes its choice to the ranks that it starts."""


def settle(config: Config) -> None:
    """Replaces auto by a strategy's name, and prints which one and why.

    Raises:
        UsageError: no strategy fits, or another launcher has started the ranks, which would each choose for themselves.
    """
    if not launch.is_rank():
        config.strategy = _chosen(config)
        return
    config.strategy = os.environ.pop(VARIABLE, "")
    if config.strategy not in STRATEGIES:
        raise UsageError(
            "--strategy auto: torchrun, srun and DeepSpeed's launcher start ranks that would each choose for "
            "themselves: name the strategy that plan.py recommends"
        )


def _chosen(config: Config) -> str:
    checks.settle_machine(config)
    if kept := _of_resumed_run(config):
        say(f"--strategy auto: {kept}, as in the run that resumes")
        return kept
    checks.check_model(config)
    from planning import network
    from planning.recommend import nothing_fits, recommended, refuse_if_none_runs, why
    from planning.survey import survey

    room = _room(config)
    needs = survey(config, network.of(config), room, {})
    refuse_if_none_runs(needs)
    choice = recommended(needs)
    if choice is None:
        raise UsageError(f"--strategy auto: {nothing_fits(needs, room)}, or name a strategy all the same")
    where = "of this machine's free memory" if room.shared else "of its GPU's memory"
    say(f"--strategy auto: {choice.strategy} takes {why(choice, needs, room)} ({where})")
    return choice.strategy


def _room(config: Config) -> Room:
    """Returns the memory that is free for a rank now."""
    from planning import machine
    from planning.survey import Room

    assert config.devices != "auto"
    disk = machine.disk_bytes(config.nvme_path, config.devices)
    host = machine.cpu_rank_bytes(config.devices)
    if config.accelerator == "cpu":
        return Room(host, None, shared=True, disk=disk)
    return Room(machine.free_gpu_bytes(config.devices), host, disk=disk)


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
