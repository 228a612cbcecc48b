"""The runs of a setting, each a command line of train.py that has been checked; no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import checks
import cli
from config import Config
from errors import UsageError
from options import flat
from strategies import AUTO
from sweeping.metric import check_metric
from sweeping.space import CONFIG, SEED, Range, Setting, Space, is_number

CHECKED = 64
"""Most settings whose every combination is checked before the first run: a command line takes 0.15 s. Of more, each
value is checked with the first of the others, and each setting before its runs start."""

NAME_CHARACTERS = 150
"""Most of a run's name that says its setting: file systems end at 255."""


@dataclass
class Planned:
    """One run."""

    seed: int
    name: str
    """Of the run, and so of its folder and of its curves."""
    flags: list[str]
    """Of train.py, less --out and --name."""
    config: Config
    """Settled."""


def check(space: Space, rest: Sequence[str], metric: str) -> list[Config]:
    """Refuses a space with a setting that cannot be trained.

    Args:
        space: what is searched.
        rest: flags of train.py that all settings share.
        metric: that settings are chosen by.

    Returns:
        What was checked, settled, the first setting first.

    Raises:
        UsageError: names the flag.
    """
    for name in (*(parameter.name for parameter in space.parameters), *([SEED] if space.seeds else [])):
        if name != CONFIG and any(flag.split("=")[0] in (f"--{name}", f"--{name}.name") for flag in rest):
            raise UsageError(f"--{name} is searched: leave it out of the other flags")
    if any(flag.split("=")[0] == "--hparams" for flag in rest):
        raise UsageError("--hparams: sweep.py gives it what it searches, leave it out")
    settings = space.combinations() if space.size <= CHECKED else space.one_by_one()
    configs = [_config([*rest, *flags_of(setting)], metric) for setting in settings]
    seeds = [cli.parse([*rest, *flags_of(settings[0]), "--seed", seed]).seed for seed in space.seeds]
    if len({*seeds}) < len(seeds):
        raise UsageError(f"--search seed={','.join(space.seeds)}: a seed is there twice")
    options = flat(configs[0])
    for parameter in (each for each in space.parameters if isinstance(each, Range)):
        name = parameter.name
        if not is_number(options.get(name)):
            raise UsageError(f"--search {name} takes no numbers: name its values, {name}=A,B")
        if name in whole_numbers(space, configs[0]) and not (parameter.step or "1").isdecimal():
            raise UsageError(f"--search {name}: the step must be a whole number, not {parameter.step}")
    return configs


def whole_numbers(space: Space, config: Config) -> set[str]:
    """Names of the parameters that are whole numbers in a setting's configuration."""
    return {each.name for each in space.parameters if isinstance(flat(config).get(each.name), int)}


def planned(space: Space, number: int, setting: Setting, rest: Sequence[str], metric: str) -> list[Planned]:
    """The runs of a setting, one for each seed; of a range the number of the trial is in their names.

    Raises:
        UsageError: it cannot be trained.
    """
    swept = [name for name in setting if name != CONFIG]
    flags = [*rest, *flags_of(setting), *(["--hparams", *swept] if swept else [])]
    name = "-".join(([] if space.is_grid else [f"trial_{number:03d}"]) + [_label(*each) for each in setting.items()])
    made = []
    for seed in space.seeds or ("",):
        own = [*flags, *(["--seed", seed] if seed else [])]
        config = _config(own, metric)
        parts = (name[:NAME_CHARACTERS], f"seed_{config.seed}" if seed else "")
        made.append(Planned(config.seed, "-".join(filter(None, parts)) or "run", own, config))
    return made


def check_names(space: Space) -> None:
    """Refuses a grid of which two settings would share a folder.

    Raises:
        UsageError: names the option.
    """
    for parameter in space.parameters if space.is_grid else []:
        labels = [_label(parameter.name, value) for value in parameter.ends]
        if len({*labels}) < len(labels):
            raise UsageError(f"--search {parameter.name}: two values would share a folder: {', '.join(parameter.ends)}")
    if space.is_grid and len(_longest(space)) > NAME_CHARACTERS:
        raise UsageError(f"the names of the settings would be longer than {NAME_CHARACTERS} characters: search less")


def flags_of(setting: Setting) -> list[str]:
    """Those of train.py."""
    return [part for name, value in setting.items() for part in (f"--{name}", value)]


def shown(setting: Setting) -> str:
    """For a line of text."""
    return ", ".join(f"{name} {short(value)}" for name, value in setting.items()) or "as given"


def short(value: str) -> str:
    """A value with three digits of a number that has more."""
    try:
        return f"{float(value):.3g}" if "." in value and len(value) > 6 else value
    except ValueError:
        return value


def _label(name: str, value: str) -> str:
    """Of a setting in the name of a folder: what a file system or a shell would mind is replaced."""
    plain = Path(value).stem if name == CONFIG else short(value)
    return re.sub(r"[^\w.+-]+", "_", f"{name}_{plain}")


def _longest(space: Space) -> str:
    return "-".join(max((_label(each.name, end) for end in each.ends), key=len) for each in space.parameters)


def _config(flags: list[str], metric: str) -> Config:
    config = cli.parse(flags)
    if config.only_measures or config.plot_schedule:
        raise UsageError("sweep.py trains: leave out --bench_steps, --find_lr and --plot_schedule")
    if config.strategy == AUTO:
        raise UsageError("--strategy auto: plan.py says which one that is, name it")
    if config.resume:
        raise UsageError("sweep.py goes on by itself when it is started again: leave --resume out")
    checks.settle(config)
    if config.num_nodes > 1:
        raise UsageError("sweep.py starts the ranks of one machine: leave --num_nodes out")
    check_metric(metric, config)
    return config
