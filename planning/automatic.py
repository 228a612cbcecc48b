"""`--strategy auto`: the recommendation in place of a name, chosen once for all ranks before they begin; no torch but
to choose."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

import checks
import launch
import launchers
import run_folder
from config import Config
from errors import UsageError
from resume import find_recovered, newest_of, settle_restart
from sources.console import say
from strategies import AUTO, STRATEGIES

if TYPE_CHECKING:
    from planning.survey import Room

VARIABLE = "CIFAR_ZERO_STRATEGY"
"""Environment variable with which the process that has chosen tells the ranks that it starts."""

KEY = "cifar-zero/strategy"
"""Of the choice, in the store through which torchrun's ranks find each other."""

REFUSED = "!"
"""Begins what rank 0 puts there in place of a choice: why there is none, which each rank says and ends."""


def settle(config: Config) -> None:
    """Puts a strategy's name in place of auto, the same on every rank; the one that chose says which and why.

    Raises:
        UsageError: nothing fits, or the ranks have no way to agree.
    """
    told = os.environ.pop(VARIABLE, "") if launch.is_rank() else ""
    config.strategy = told if told in STRATEGIES else _agreed(lambda starters: _chosen(config, starters))


def _chosen(config: Config, starters: Collection[str] = ()) -> str:
    checks.settle_machine(config)
    config = replace(config)  # what it goes on from is settled again when it has its name
    names = [config.name] if config.name else [config.run_name.removesuffix(AUTO) + name for name in STRATEGIES]
    if own := newest_of(starters, config.out, names):
        config.resume = str(own)
    else:
        settle_restart(config, config.name or _newest(config) or config.run_name)
    if config.resume and (kept := _of_the_run(config)):
        say(f"--strategy auto: {kept}, as the run that goes on")
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
    """What a rank may take of what is free now."""
    from planning import machine
    from planning.survey import Room

    assert config.devices != "auto"
    disk = machine.disk_bytes(config.nvme_path, config.devices)
    host = machine.cpu_rank_bytes(config.devices)
    if config.accelerator == "cpu":
        return Room(host, None, shared=True, disk=disk)
    return Room(machine.free_gpu_bytes(config.devices), host, disk=disk)


def _of_the_run(config: Config) -> str:
    """The strategy of the run that is resumed; empty where there is none to keep.

    `last` without a name is the newest run of the network, whatever its strategy.
    """
    name = config.name
    if config.resume == "last" and not name and not (name := _newest(config)):
        return ""
    fallback = config.data.source == "digits"
    recipe = run_folder.recipe_of(find_recovered(config.resume, config.out, name or config.run_name, fallback))
    tree = yaml.safe_load(recipe.read_text()) if recipe is not None else {}
    kept = "" if tree.get("ds_config") else tree.get("strategy", "")
    return kept if kept in STRATEGIES else ""


def _newest(config: Config) -> str:
    """The name that the newest run of this network has by its strategy; empty without one."""
    begin = config.run_name.removesuffix(AUTO)
    folders = [(folder, folder.name.removesuffix(run_folder.FALLBACK_SUFFIX)) for folder in Path(config.out).glob("*")]
    runs = [
        (folder.stat().st_mtime_ns, name)
        for folder, name in folders
        if name.removeprefix(begin) in STRATEGIES and name.startswith(begin) and any(folder.rglob("*.ckpt"))
    ]
    return max(runs, default=(0, ""))[1]


def _agreed(choose: Callable[[Collection[str]], str]) -> str:
    """What rank 0 chooses, on each rank: two that chose by themselves could differ, and would wait for each other.

    Args:
        choose: told what torchrun has started the ranks with, as a run that it starts anew keeps its strategy.

    Raises:
        UsageError: rank 0 has refused, or the ranks have no store before they have found each other.
    """
    if not launch.is_rank():
        return choose(())
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise UsageError(
            "--strategy auto: ranks that are there already agree on one through the store of torchrun's agent, and "
            "there is none here: name what plan.py recommends"
        )
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    key = f"{KEY}/{os.environ.get('TORCHELASTIC_RUN_ID')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    store.set(f"{key}/starter/{launch.global_rank()}", launchers.starter())
    if launch.global_rank() == 0:
        ranks = range(int(launchers.variables()["WORLD_SIZE"]))
        starters = {store.get(f"{key}/starter/{rank}").decode() for rank in ranks}
        try:
            store.set(key, choose(starters))
        except UsageError as error:
            store.set(key, f"{REFUSED}{error}")
            raise
    told = store.get(key).decode()
    if told.startswith(REFUSED):
        raise UsageError(told.removeprefix(REFUSED))
    return told
