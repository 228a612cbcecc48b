"""`--strategy auto`: the recommendation in place of a name, chosen once for all ranks before they begin; no torch but
to choose."""

from __future__ import annotations

import os
from collections.abc import Callable

import yaml

import checks
import launch
import run_folder
from config import Config
from errors import UsageError
from hardware import free_memory_bytes
from sources.console import say
from strategies import STRATEGIES

VARIABLE = "CIFAR_ZERO_STRATEGY"
"""Environment variable with which the process that has chosen tells the ranks that it starts."""

KEY = "cifar-zero/strategy"
"""Of the choice, in the store through which torchrun's ranks find each other."""


def settle(config: Config) -> None:
    """Puts a strategy's name in place of auto, the same on every rank; the one that chose says which and why.

    Raises:
        UsageError: nothing fits, or the ranks have no way to agree.
    """
    config.strategy = os.environ.get(VARIABLE) or _agreed(lambda: _chosen(config))
    os.environ[VARIABLE] = config.strategy


def _chosen(config: Config) -> str:
    checks.settle_machine(config)
    if config.resume and (kept := _of_the_run(config)):
        say(f"--strategy auto: {kept}, as the run that goes on")
        return kept
    from planning import machine, network
    from planning.recommend import nothing_fits, recommended, why
    from planning.survey import Room, survey

    assert config.devices != "auto"
    if on_cpu := config.accelerator == "cpu":
        room = Room(machine.cpu_rank_bytes(config.devices), None, shared=True)
    else:
        room = Room(round(machine.USABLE * machine.gpu_bytes()), free_memory_bytes() // config.devices)
    needs = survey(config, network.of(config), room, {})
    choice = recommended(needs)
    if choice is None:
        raise UsageError(f"--strategy auto: {nothing_fits(needs, room)}, or name a strategy all the same")
    where = "of this machine's free memory" if on_cpu else "of its GPU's memory"
    say(f"--strategy auto: {choice.strategy} takes {why(choice, needs, room)} ({where})")
    return choice.strategy


def _of_the_run(config: Config) -> str:
    """The strategy of the run that is resumed; empty where it is not known yet or runs nowhere here.

    `last` without a name is the newest run of the strategy that will have been chosen.
    """
    if config.resume == "last" and not config.name:
        return ""
    recipe = run_folder.recipe_of(run_folder.find_checkpoint(config.resume, config.out, config.name))
    kept = yaml.safe_load(recipe.read_text()).get("strategy", "") if recipe is not None else ""
    return kept if kept in STRATEGIES else ""


def _agreed(choose: Callable[[], str]) -> str:
    """What rank 0 chooses, on each rank: two that chose by themselves could differ, and would wait for each other.

    Raises:
        UsageError: the ranks have been started by something that has no store before they have found each other.
    """
    if not launch.is_rank():
        return choose()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise UsageError(
            "--strategy auto: ranks that are there already cannot agree on one; name what plan.py recommends, or start "
            "them by torchrun"
        )
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    key = f"{KEY}/{os.environ.get('TORCHELASTIC_RUN_ID')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if launch.global_rank() == 0:
        store.set(key, choose())
    return store.get(key).decode()
