"""From runs to what a comparison came to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from numbers import Real

from comparison.differences import differences, hinder, shared_settings
from comparison.grouping import Group
from comparison.prediction import predicted
from comparison.reading import Loaded
from comparison.result import Comparison, Curve, Difference, Run, Variant, Verdict
from comparison.table import spread
from comparison.verdicts import SOURCES, Drift, Judged, Source, drifts_of, judged
from reports.summary import FALLBACK

RECIPE = ("model", "optimizer", "schedule", "precision", "batch_size", "epochs", "max_steps")
"""Options of config.yaml that a report begins with."""

SATURATION = (
    "From step {step} on rounding alone moves the losses by more than a tenth: only the steps before are judged, and "
    "of the later ones whether a loss is off by more than the largest so far."
)

Second = Callable[[set[int]], list[Loaded]]
"""Finds or makes a second run of the reference for each of some seeds."""


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
        notes=_fallbacks(groups),
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
        for variant in variants:
            variant.unjudged = "the reference has not trained" if variant.verdict is None else ""
        return
    variants[0].verdict = Verdict("reference")
    wanted = []
    for group, variant in zip(groups[1:], variants[1:], strict=True):
        if variant.verdict is None:
            variant.unjudged = _hindrance(comparison, reference, group)
            comparison.notes += _on_seeds(reference, group)
            if not variant.unjudged:
                wanted.append((group, variant))
    found = judged(reference.loaded, [group.loaded for group, _ in wanted], trust)
    open_seeds = {seed for each in found for seed in each.open_seeds}
    drifts = drifts_of(reference.loaded, second(open_seeds) if open_seeds else [], trust)
    for (_, variant), each in zip(wanted, found, strict=True):
        outcome = each.verdict(drifts)
        if isinstance(outcome, str):
            variant.unjudged = outcome
        else:
            variant.verdict = outcome
    comparison.notes += dict.fromkeys(note for each in found for note in each.notes)
    _tell_bounds(comparison, {variant.name: each for (_, variant), each in zip(wanted, found, strict=True)}, drifts)


def _hindrance(comparison: Comparison, reference: Group, group: Group) -> str:
    """Why a variant that has trained cannot be judged; empty where it can."""
    hindering = [each.setting for each in comparison.differences if hinder(each, reference.name, group.name)]
    if hindering:
        return f"another recipe than the reference's ({', '.join(hindering)})"
    return "" if _seeds(reference) & _seeds(group) else "no seed that the reference has too"


def _on_seeds(reference: Group, group: Group) -> Iterator[str]:
    if more := _seeds(group) - _seeds(reference):
        yield f"{group.name} has seeds that {reference.name} has not ({_list(more)}): these have no verdict."
    if lacking := _seeds(reference) - _seeds(group):
        yield f"{group.name} lacks seeds that {reference.name} has ({_list(lacking)}): its verdict is over the others."


def _tell_bounds(comparison: Comparison, found: Mapping[str, Judged], drifts: Mapping[int, Sequence[Drift]]) -> None:
    """Notes where the bounds are from and as far as they go, and draws the lowest."""
    names: dict[Source, dict[str, None]] = {}
    limits, undecided = [], []
    for name, each in found.items():
        for seed, (allowed, source) in each.bounds(drifts).items():
            pair = each.pairs[seed]
            if seed in each.open_seeds:
                names.setdefault(source, {})[name] = None
                undecided += [] if allowed.undecided is None else [allowed.undecided]
                limits.append(dict(zip(pair.steps, allowed.losses, strict=True)))
    for source, having in names.items():
        before = f"{', '.join(having)}: " if len(names) > 1 else ""
        comparison.notes.append(before + SOURCES[source])
    if undecided:
        comparison.notes.append(SATURATION.format(step=f"{min(undecided):,}"))
    if limits:
        steps = [step for step in limits[0] if all(step in limit for limit in limits)]
        steps = [step for step in steps if not undecided or step < min(undecided)]
        comparison.rounding = Curve(steps, [min(limit[step] for limit in limits) for step in steps])


def _seeds(group: Group) -> set[int]:
    return {loaded.run.seed for loaded in group.loaded}


def _list(seeds: set[int]) -> str:
    return ", ".join(map(str, sorted(seeds)))


def _variant(group: Group) -> Variant:
    runs = [loaded.run for loaded in group.loaded]
    variant = Variant(group.name, group.strategy, group.world_size, group.accumulate, group.command, runs)
    variant.error = group.error
    keys = dict.fromkeys(key for run in runs for key, value in run.metrics.items() if _is_number(value))
    figures: dict[str, Callable[[Run], float | None]] = {
        **{key: lambda run, key=key: run.metrics.get(key) for key in keys},
        "checkpoint_bytes": lambda run: run.checkpoint_bytes,
    }
    if all(run.seconds_to_accuracy is not None for run in runs):  # else the mean would be of the quickest seeds
        figures["seconds_to_accuracy"] = lambda run: run.seconds_to_accuracy
    variant.figures = {key: found for key, figure in figures.items() if (found := spread(variant, figure)) is not None}
    variant.predicted = predicted(group.loaded[0]) if group.loaded else None
    return variant


def _machine(reference: Group) -> dict[str, str]:
    if not reference.loaded:
        return {}
    metrics = reference.loaded[0].metrics
    versions = {name: str(version) for name, version in metrics.get("versions", {}).items()}
    return {"device": str(metrics["device_name"]), **versions}


def _recipe(reference: Group, apart: Sequence[Difference]) -> dict[str, str]:
    """Of what differs nothing, it stands among the differences."""
    if not reference.loaded:
        return {}
    shared = shared_settings(reference.loaded[0])
    named = {difference.setting for difference in apart}
    settings = {"dataset": shared["dataset"], **{key: shared[key] for key in RECIPE}}
    settings["seeds"] = ", ".join(str(loaded.run.seed) for loaded in reference.loaded)
    return {key: str(value) for key, value in settings.items() if key not in named}


def _fallbacks(groups: Sequence[Group]) -> list[str]:
    """A note for each variant whose data is not what was asked for."""
    fell_back = {group.name: loaded.metrics.get(FALLBACK) for group in groups for loaded in group.loaded}
    return [f"{name}: {line}." for name, line in fell_back.items() if line]


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
