"""From runs to what a comparison came to."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from numbers import Real

import run_folder
from comparison.agreement import Pair
from comparison.differences import differences, hinder, shared_settings
from comparison.prediction import predicted
from comparison.reading import ROUNDING, Loaded
from comparison.result import Comparison, Curve, Difference, Run, Variant, Verdict
from comparison.table import spread
from comparison.variants import variant_name
from comparison.verdicts import ALONE, MEASURED, Judged, judged

RECIPE = ("model.name", "optimizer.name", "schedule.name", "precision", "batch_size", "epochs", "max_steps")
"""Options of config.yaml that a report begins with."""

SHAPE = ("strategy", "world_size", "accumulate")
"""Keys of metrics.json that make a variant."""

Second = Callable[[set[int]], list[Loaded]]
"""Finds or makes a second run of the reference for each of some seeds."""


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


def grouped(runs: Sequence[Loaded]) -> tuple[list[Group], list[Loaded]]:
    """The variants of runs that are there: those that differ in nothing but the seed are one.

    Returns:
        The variants, and second runs of a seed: of the reference one shows what rounding does.
    """
    by_settings: dict[str, list[Loaded]] = {}
    again = []
    for loaded in runs:
        if loaded.settings.get("name", "").startswith(ROUNDING):
            again.append(loaded)
            continue
        settings = {**shared_settings(loaded), **{key: loaded.metrics[key] for key in SHAPE}}
        settings |= {key: loaded.settings[key] for key in ("compile", "activation_checkpointing")}
        group = by_settings.setdefault(repr(sorted(settings.items(), key=repr)), [])
        known = any(loaded.run.seed == other.run.seed for other in group)
        (again if known else group).append(loaded)
    shapes = [tuple(group[0].metrics[key] for key in SHAPE) for group in by_settings.values()]
    several = [len({*values}) > 1 for values in zip(*shapes, strict=True)]
    groups = []
    for (strategy, ranks, accumulate), group in zip(shapes, by_settings.values(), strict=True):
        name = variant_name(strategy, ranks, accumulate, several)
        taken = sum(other.name == name or other.name.startswith(f"{name} (") for other in groups)
        name += f" ({group[0].folder})" if taken else ""
        command = f"python train.py --config {shlex.quote(str(group[0].folder / run_folder.CONFIG))}"
        groups.append(Group(name, command, group, "", strategy, ranks, accumulate))
    groups.sort(key=lambda group: group.strategy != "baseline")
    return groups, again


def assemble(
    groups: Sequence[Group],
    second: Second,
    title: str,
    command: str,
    target_accuracy: float | None,
    trust: bool = False,
) -> Comparison:
    """Gives the verdicts and sums the figures up.

    Args:
        groups: the reference first.
        second: is asked where something is not bit-identical.
        title: of the report.
        command: that makes the comparison again.
        target_accuracy: of val/acc, from 0 to 1.
        trust: whether a checkpoint may be loaded that could run code.
    """
    reference = groups[0]
    apart = differences({group.name: group.loaded[0] for group in groups if group.loaded})
    variants = [_variant(group) for group in groups]
    comparison = Comparison(
        title=title,
        command=command,
        created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        machine=_machine(reference),
        recipe=_recipe(reference, apart),
        reference=reference.name,
        variants=variants,
        differences=apart,
        target_accuracy=target_accuracy,
    )
    _judge(comparison, groups, second, trust)
    return comparison


def _judge(comparison: Comparison, groups: Sequence[Group], second: Second, trust: bool) -> None:
    """Puts the verdicts in: on those that trained all seeds and share the reference's recipe."""
    reference, variants = groups[0], comparison.variants
    for group, variant in zip(groups, variants, strict=True):
        if group.error or not group.loaded:
            variant.verdict = Verdict("not trained")
    if reference.error or not reference.loaded:
        comparison.notes.append(f"{reference.name}, the reference, has not trained: there are no verdicts.")
        return
    variants[0].verdict = Verdict("reference")
    seeds = {loaded.run.seed for loaded in reference.loaded}
    wanted = []
    for group, variant in zip(groups[1:], variants[1:], strict=True):
        if variant.verdict is not None:
            continue
        if any(hinder(difference, reference.name, group.name) for difference in comparison.differences):
            continue
        if {loaded.run.seed for loaded in group.loaded} - seeds:
            comparison.notes.append(f"{group.name} has seeds that {reference.name} has not: these have no verdict.")
        if seeds & {loaded.run.seed for loaded in group.loaded}:
            wanted.append((group, variant))
    found = judged(reference.loaded, [group.loaded for group, _ in wanted], trust)
    open_seeds = {seed for each in found for seed in each.open_seeds}
    drifts = _drifts(reference, second(open_seeds) if open_seeds else [], trust)
    if open_seeds:
        comparison.notes.append(MEASURED if open_seeds <= drifts.keys() else ALONE)
    for (_, variant), each in zip(wanted, found, strict=True):
        variant.verdict = each.verdict(drifts)
    bounds = [allowed.losses for each in found for allowed in each.bounds(drifts).values()]
    if open_seeds and bounds:
        lowest = [min(values) for values in zip(*bounds, strict=False)]
        comparison.rounding = Curve(reference.loaded[0].run.losses.steps[: len(lowest)], lowest)


def _drifts(reference: Group, again: Sequence[Loaded], trust: bool) -> Mapping[int, Pair]:
    found: list[Judged] = judged(reference.loaded, [again], trust)
    return {seed: pair for seed, pair in found[0].pairs.items() if not pair.identical}


def _variant(group: Group) -> Variant:
    runs = [loaded.run for loaded in group.loaded]
    variant = Variant(group.name, group.strategy, group.world_size, group.accumulate, group.command, runs)
    variant.error = group.error
    keys = dict.fromkeys(key for run in runs for key, value in run.metrics.items() if _is_number(value))
    figures: dict[str, Callable[[Run], float | None]] = {
        **{key: lambda run, key=key: run.metrics.get(key) for key in keys},
        "checkpoint_bytes": lambda run: run.checkpoint_bytes,
        "seconds_to_accuracy": lambda run: run.seconds_to_accuracy,
    }
    variant.figures = {key: found for key, figure in figures.items() if (found := spread(variant, figure)) is not None}
    variant.predicted = predicted(group.loaded[0]) if group.loaded else None
    return variant


def _machine(reference: Group) -> dict[str, str]:
    if not reference.loaded:
        return {}
    metrics = reference.loaded[0].metrics
    versions = {name: str(version) for name, version in metrics.get("versions", {}).items()}
    return {"device": str(metrics["device_name"]), "cores": str(os.cpu_count()), **versions}


def _recipe(reference: Group, apart: Sequence[Difference]) -> dict[str, str]:
    """Of what differs nothing, it stands among the differences."""
    if not reference.loaded:
        return {}
    shared = shared_settings(reference.loaded[0])
    named = {difference.setting for difference in apart}
    settings = {"dataset": shared["dataset"], **{key: shared[key] for key in RECIPE}}
    settings["seeds"] = ", ".join(str(loaded.run.seed) for loaded in reference.loaded)
    return {key: str(value) for key, value in settings.items() if key not in named}


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
