"""Builds a comparison from its variants: figures over the seeds, recipe, differences, and the verdicts."""

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cifar_zero.checkpoints import run_folder
from cifar_zero.checkpoints.read import network, read
from cifar_zero.comparison.reading import differences, hinders, last_checkpoint, shared
from cifar_zero.comparison.result import Comparison, FinishedRun, Spread, Variant
from cifar_zero.config import command_line
from cifar_zero.core.errors import UsageError
from cifar_zero.planning.formulas import network_of, predicted
from cifar_zero.reports.summary import FALLBACK
from cifar_zero.training.resolve import make_run

RECIPE = ("dataset", "model", "optimizer", "schedule", "precision", "batch_size", "epochs", "max_steps")
"""Shared settings at the top of a report."""

Weights = Mapping[str, Tensor]  # tensors by the names of the plain model's state_dict, including buffers


def summarize(variants: Sequence[Variant], command: str, trust: bool = False) -> Comparison:
    """Returns the comparison of the variants, the reference first, with their figures and verdicts; `trust` loads
    checkpoints that could run code."""
    reference, found = variants[0], differences(variants)
    settings = shared(reference.runs[0]) if reference.runs else {}
    recipe = {key: str(settings[key]) for key in RECIPE if key in settings}
    for difference in found:
        recipe.pop(difference.setting, None)
    comparison = Comparison(
        title=": ".join(filter(None, [recipe.get("model"), f"{len(variants)} variants"])),
        command=command,
        machine={},
        recipe={**recipe, "seeds": ", ".join(map(str, reference.by_seed))},
        reference=reference.name,
        variants=[*variants],
        differences=found,
    )
    for run in reference.runs[:1]:
        about = run.metrics
        comparison.machine = {"device": about["device_name"], **about["versions"], "commit": about["git_commit"]}
    for variant in variants:
        variant.figures = _figures(variant.runs)
        fallbacks = dict.fromkeys(run.metrics[FALLBACK] for run in variant.runs if run.metrics.get(FALLBACK))
        comparison.notes += [f"{variant.name}: {line}." for line in fallbacks]
        _judge(comparison, variant, trust)
    return comparison


def _judge(comparison: Comparison, variant: Variant, trust: bool) -> None:
    """Sets a variant's verdict: that its losses and weights are the reference's, or else what its step check found."""
    reference = comparison.variants[0]
    if variant.kind == "not trained":
        return
    hindering = [each.setting for each in comparison.differences if hinders(each, reference.name, variant.name)]
    worst = max((run.check or UNCHECKED for run in variant.runs), key=_badness, default=UNCHECKED)
    variant.check = worst
    if worst["outcome"] == "different":
        variant.judge("different", worst["text"])
        return
    if variant is reference:
        variant.judge("reference", worst["text"])
        return
    if hindering:
        variant.judge("not judged", f"its recipe differs from the reference's ({', '.join(hindering)})")
        return
    seeds = reference.by_seed.keys() & variant.by_seed.keys()
    if reference.kind == "not trained" or not seeds:
        trained = reference.kind != "not trained"
        variant.judge(
            "not judged", "no seed in common with the reference" if trained else "the reference did not train"
        )
        return
    for seed in seeds:
        ours, theirs = (of.by_seed[seed].losses.values[:1] for of in (reference, variant))
        if ours and theirs and not math.isclose(ours[0], theirs[0], rel_tol=FIRST_LOSS):
            remark = f"the first loss is {theirs[0]:.4g} and the reference's {ours[0]:.4g}: other images or weights"
            variant.judge("different", remark)
            return
    drifts = [_drift(reference.by_seed[seed], variant.by_seed[seed], trust, comparison.notes) for seed in seeds]
    variant.drift = max(drifts, key=len, default="")
    if not any(drifts):
        variant.judge("bit-identical", "losses and weights are the reference's")
    else:
        variant.judge("not judged" if worst["outcome"] == "not judged" else "within rounding", worst["text"])


FIRST_LOSS = 0.02
"""Relative difference of the losses of the first step, from the same weights and images, that no precision explains:
bfloat16 has 8 bits."""

UNCHECKED = {"outcome": "not judged", "used": 0.0, "text": "no step was checked (--check_steps)"}
"""What counts as the step check of a run without one."""

OUTCOMES = ("bit-identical", "within rounding", "not judged", "different")
"""What a step check may say, the worst last."""


def _badness(check: Mapping[str, Any]) -> tuple[int, float]:
    return OUTCOMES.index(check["outcome"]), check["used"]


def _drift(reference: FinishedRun, other: FinishedRun, trust: bool, notes: list[str]) -> str:
    """Returns how far a run's losses and last weights are from the reference's; empty if they are equal bit by bit."""
    ours, theirs = reference.losses.by_step, other.losses.by_step
    parts = []
    if ours.keys() != theirs.keys():
        parts.append(f"{len(ours):,} steps against {len(theirs):,}")
    unequal = [step for step in ours if step in theirs and ours[step] != theirs[step]]
    if unequal:
        last = unequal[-1]
        parts.append(
            f"losses differ from step {unequal[0]:,} on, by {abs(ours[last] - theirs[last]):.1e} at step {last:,}"
        )
    one, two = _weights(reference, trust, notes), _weights(other, trust, notes)
    if one is None or two is None:
        parts.append("weights not compared")
    elif one.keys() != two.keys() or any(one[name].shape != two[name].shape for name in one):
        parts.append("weights of other names or shapes")
    else:
        furthest = max((_furthest(one[name], two[name]) for name in one), default=0.0)
        equal = all(torch.equal(one[name], two[name]) for name in one)
        parts += [] if equal else [f"weights by up to {furthest:.1e}"]
    return "; ".join(parts)


def _furthest(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).abs().max()) if one.numel() else 0.0


def _weights(run: FinishedRun, trust: bool, notes: list[str]) -> Weights | None:
    """Returns the weights of a run's last checkpoint, not the average of --ema; None, with a note, if unreadable."""
    try:
        if not (checkpoint := last_checkpoint(run)).exists():
            raise UsageError(f"{run.folder} has no checkpoint of its last step")
        return network(read(checkpoint, trust), averaged=False)
    except UsageError as error:
        notes.append(f"The weights of {run.folder} were not compared: {error}.")
        return None


def _figures(runs: Sequence[FinishedRun]) -> dict[str, Spread]:
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


def _predicted_bytes(run: FinishedRun) -> int | None:
    """Returns the predicted model states of the fullest rank; None if there is no formula."""
    try:
        config = command_line.parse(["--config", str(Path(run.folder, run_folder.CONFIG))])
        if config.placement.ds_config:
            return None
        ranks = run.metrics["world_size"]
        weights = network_of(make_run(config.changed(devices=ranks, num_nodes=1))).weights
    except UsageError:
        return None
    found = predicted(
        config.placement.strategy,
        weights,
        ranks,
        config.placement.precision,
        config.recipe.optimizer,
        config.placement.zero,
    )
    return found and found.in_memory.total
