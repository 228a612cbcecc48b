"""Which of the runs that are there make a variant, and which show what rounding does."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import run_folder
from comparison.differences import shared_settings
from comparison.reading import Loaded
from comparison.variants import variant_name
from options import flat

SHAPE = ("strategy", "world_size", "accumulate")
"""Keys of metrics.json that make a variant."""

OWN = ("out", "name", "logger", "hparams")
"""Options of config.yaml that say nothing of what was trained, and how."""


@dataclass
class Group:
    """The runs of one variant."""

    name: str
    command: str
    loaded: list[Loaded] = field(default_factory=list)
    error: str = ""
    strategy: str = ""
    world_size: int = 1
    accumulate: int = 1


def grouped(runs: Sequence[Loaded]) -> list[Group]:
    """The variants, baseline first: runs that differ in nothing but the seed are one, any other is one of its own.

    Those that comparison.rounding made are none.
    """
    variants: list[list[Loaded]] = []
    for loaded in runs:
        if loaded.rounding is None:
            same = (group for group in variants if _belongs(loaded, group))
            group = next(same, None)
            if group is None:
                variants.append([loaded])
            else:
                group.append(loaded)
    shapes = [tuple(group[0].metrics[key] for key in SHAPE) for group in variants]
    several = [len({*values}) > 1 for values in zip(*shapes, strict=True)]
    groups: list[Group] = []
    for (strategy, ranks, accumulate), group in zip(shapes, variants, strict=True):
        name, folder = variant_name(strategy, ranks, accumulate, several), group[0].folder
        name += f" ({folder})" * any(other.name == name for other in groups)
        command = f"python train.py --config {shlex.quote(str(folder / run_folder.CONFIG))}"
        groups.append(Group(name, command, group, "", strategy, ranks, accumulate))
    return sorted(groups, key=lambda group: group.strategy != "baseline")


def second_runs(runs: Sequence[Loaded], reference: Group) -> tuple[list[Loaded], list[str]]:
    """Those that show what rounding does to the reference, and of those that show it for another run a note each.

    They are what comparison.rounding made of the reference's recipe, and runs of the very same command, which a GPU may
    not repeat bit by bit.
    """
    first = {loaded.run.seed: loaded for loaded in reference.loaded}
    moved, again, notes = [], [], []
    for loaded in runs:
        original = first.get(loaded.run.seed)
        if loaded.rounding is not None:
            if original is not None and _shape_and_recipe(loaded) == _shape_and_recipe(original):
                moved.append(loaded)
            else:
                notes.append(
                    f"{loaded.folder} shows what rounding does to another run than the reference: it is left out."
                )
        elif original is not None and loaded is not original and _all(loaded) == _all(original):
            again.append(loaded)
    return [*moved, *again], notes


def _belongs(loaded: Loaded, group: Sequence[Loaded]) -> bool:
    known = any(loaded.run.seed == other.run.seed for other in group)
    return not known and _all(loaded, "seed") == _all(group[0], "seed")


def _all(loaded: Loaded, *but: str) -> dict[str, Any]:
    """All that was asked for, and where and in which versions it ran."""
    asked = {key: value for key, value in flat(loaded.settings).items() if key not in (*OWN, *but)}
    return {**asked, **_shape_and_recipe(loaded)}


def _shape_and_recipe(loaded: Loaded) -> dict[str, Any]:
    return {**shared_settings(loaded), **{key: loaded.metrics[key] for key in SHAPE}}
