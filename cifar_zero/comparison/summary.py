"""Builds a comparison from its variants: figures over the seeds, recipe, machine, differences, verdicts."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from numbers import Real
from pathlib import Path

from cifar_zero.checkpoints import run_folder
from cifar_zero.comparison.result import Comparison, Run, Spread, Variant
from cifar_zero.comparison.settings import differences, shared
from cifar_zero.comparison.verdicts import Perturb, judge_all
from cifar_zero.config import command_line
from cifar_zero.core.errors import UsageError
from cifar_zero.reports.summary import FALLBACK

RECIPE = ("dataset", "model", "optimizer", "schedule", "precision", "batch_size", "epochs", "max_steps")
"""Shared settings at the top of a report."""


def summarize(variants: Sequence[Variant], perturb: Perturb, command: str, trust: bool = False) -> Comparison:
    """Returns the comparison of the variants, with their figures and verdicts.

    Args:
        variants: the reference first.
        perturb: trains or finds perturbed runs of the reference, see `judge_all`.
        command: the command that repeats the comparison.
        trust: whether to load checkpoints that could run code.
    """
    reference, found = variants[0], differences(variants)
    settings = shared(reference.runs[0]) if reference.runs else {}
    recipe = {key: str(settings[key]) for key in RECIPE if key in settings}
    for difference in found:
        recipe.pop(difference.setting, None)
    comparison = Comparison(
        title=": ".join(filter(None, [recipe.get("model"), f"{len(variants)} variants"])),
        command=command,
        created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        machine={},
        recipe={**recipe, "seeds": ", ".join(map(str, reference.by_seed))},
        reference=reference.name,
        variants=[*variants],
        differences=found,
    )
    for run in reference.runs[:1]:
        comparison.machine |= {"device": run.metrics["device_name"], **run.metrics["versions"]}
    for variant in variants:
        variant.figures = _figures(variant.runs)
        fallbacks = dict.fromkeys(run.metrics[FALLBACK] for run in variant.runs if run.metrics.get(FALLBACK))
        comparison.notes += [f"{variant.name}: {line}." for line in fallbacks]
    judge_all(comparison, perturb, trust)
    return comparison


def _figures(runs: Sequence[Run]) -> dict[str, Spread]:
    """Returns mean and range over the seeds; a metric with a number per rank counts with its largest."""
    found: dict[str, list[float]] = {}
    for run in runs:
        own = {"checkpoint_bytes": run.checkpoint_bytes, "predicted_bytes": _predicted_bytes(run)}
        for key, value in (run.metrics | own).items():
            values = value if isinstance(value, list) else [value]
            numbers = [each for each in values if isinstance(each, Real) and not isinstance(each, bool)]
            if numbers:
                found.setdefault(key, []).append(max(map(float, numbers)))
    return {key: Spread(sum(values) / len(values), min(values), max(values)) for key, values in found.items()}


def _predicted_bytes(run: Run) -> int | None:
    """Returns the predicted model states of the fullest rank; None if there is no formula."""
    from cifar_zero.planning import model_states, network
    from cifar_zero.training.resolve import of_machine

    try:
        config = command_line.parse(["--config", str(Path(run.folder, run_folder.CONFIG))])
        if config.ds_config:
            return None
        weights = network.of(of_machine(replace(config, devices=run.metrics["world_size"], num_nodes=1))).weights
    except UsageError:
        return None
    ranks = run.metrics["world_size"]
    found = model_states.predicted(config.strategy, weights, ranks, config.precision, config.optimizer)
    return found and found.in_memory.total
