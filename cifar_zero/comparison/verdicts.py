"""Builds a comparison from its variants: figures over the seeds, recipe, differences, and the verdicts."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from pathlib import Path

import torch
from torch import Tensor

from cifar_zero.checkpoints import run_folder
from cifar_zero.checkpoints.read import network, read
from cifar_zero.comparison.agreement import Apart, Bound, Pair, bound, eps_of, judge, worst
from cifar_zero.comparison.causes import causes
from cifar_zero.comparison.reading import differences, hinders, last_checkpoint, shared
from cifar_zero.comparison.result import Comparison, Curve, Run, Spread, Variant, Verdict
from cifar_zero.config import command_line
from cifar_zero.core.console import command
from cifar_zero.core.errors import UsageError
from cifar_zero.planning.model_states import network_of, predicted
from cifar_zero.reports.summary import FALLBACK
from cifar_zero.training.resolve import make_run

RECIPE = ("dataset", "model", "optimizer", "schedule", "precision", "batch_size", "epochs", "max_steps")
"""Shared settings at the top of a report."""

Weights = Mapping[str, Tensor]  # tensors by the names of the plain model's state_dict, including buffers

Perturb = Callable[[set[int]], list[Run]]
"""Trains or finds a perturbed run of the reference for each of the given seeds."""


def summarize(variants: Sequence[Variant], perturb: Perturb, command: str, trust: bool = False) -> Comparison:
    """Returns the comparison of the variants, the reference first, with their figures and verdicts. `perturb` is called
    once, if a variant is not bit-identical to the reference; `trust` loads checkpoints that could run code."""
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
    _judge_all(comparison, perturb, trust)
    return comparison


def _judge_all(comparison: Comparison, perturb: Perturb, trust: bool) -> None:
    reference, notes = comparison.variants[0], comparison.notes
    variants = _comparable(comparison)
    pairs: dict[str, list[Pair]] = {variant.name: [] for variant in variants}
    for seed, run in reference.by_seed.items() if variants else ():
        others = {variant.name: variant.by_seed[seed] for variant in variants if seed in variant.by_seed}
        for name, pair in zip(others, _pairs(run, others.values(), trust, notes), strict=True):
            pairs[name].append(pair)
    seeds = {pair.reference.seed for found in pairs.values() for pair in found if pair.needs_bound}
    perturbed: dict[int, Pair] = {}
    for run in perturb(seeds) if seeds else ():
        perturbed[run.seed] = next(_pairs(reference.by_seed[run.seed], [run], trust, notes))
    bounds: list[tuple[Pair, Bound]] = []
    for variant in variants:
        found = [(pair, bound(pair, perturbed.get(pair.reference.seed))) for pair in pairs[variant.name]]
        _judge(variant, found, seeds <= perturbed.keys())
        bounds += [(pair, allowed) for pair, allowed in found if pair.needs_bound]
    _explain(comparison, bounds)


def _comparable(comparison: Comparison) -> list[Variant]:
    """Returns the variants to judge. Sets the verdict of the reference, and why other variants cannot be judged."""
    reference = comparison.variants[0]
    reference.verdict = Verdict("reference" if reference.runs and not reference.error else "not trained")
    for variant in comparison.variants[1:]:
        hindering = [each.setting for each in comparison.differences if hinders(each, reference.name, variant.name)]
        seeds = reference.by_seed.keys() & variant.by_seed.keys()
        if variant.error or not variant.runs:
            variant.verdict = Verdict("not trained")
        elif reference.verdict.kind == "not trained":
            variant.unjudged = "the reference did not train"
        elif hindering:
            variant.unjudged = f"its recipe differs from the reference's ({', '.join(hindering)})"
        elif not seeds:
            variant.unjudged = "no seed in common with the reference"
        elif seeds != reference.by_seed.keys() | variant.by_seed.keys():
            common = ", ".join(map(str, sorted(seeds)))
            comparison.notes.append(f"{variant.name} is judged by the seeds in common with the reference: {common}.")
    return [variant for variant in comparison.variants if variant.verdict is None and not variant.unjudged]


def _pairs(reference: Run, others: Iterable[Run], trust: bool, notes: list[str]) -> Iterator[Pair]:
    """Compares runs of several variants with the reference's run, whose weights are read once."""
    ours = _weights(reference, trust, notes)
    # Weights of shape (out, in, height, width) are those of convolutions.
    convolves = ours is None or any(value.dim() == 4 for value in ours.values())
    normalises = ours is not None and any(name.endswith("running_mean") for name in ours)
    for other in others:
        theirs = _weights(other, trust, notes)
        differing = None if ours is None or theirs is None else apart(ours, theirs)
        eps = max(eps_of(run.metrics["precision"], run.metrics["accelerator"], convolves) for run in (reference, other))
        yield Pair(reference, other, differing, eps, normalises)


def _weights(run: Run, trust: bool, notes: list[str]) -> Weights | None:
    """Returns the weights of a run's last checkpoint, not the average of --ema; None, with a note, if unreadable."""
    try:
        if not (checkpoint := last_checkpoint(run)).exists():
            raise UsageError(f"{run.folder} has no checkpoint of its last step")
        return network(read(checkpoint, trust), averaged=False)
    except UsageError as error:
        notes.append(f"The weights of {run.folder} were not compared: {error}.")
        return None


def apart(reference: Weights, other: Weights) -> dict[str, Apart]:
    """Compares two runs tensor by tensor; integers (batch norm's count of batches) are left out."""
    names = {name: None for run in (reference, other) for name, value in run.items() if value.is_floating_point()}
    return {name: _apart(reference.get(name), other.get(name)) for name in names}


def _apart(one: Tensor | None, other: Tensor | None) -> Apart:
    """Returns the difference; infinite if a run lacks the tensor, if the shapes differ, or if only one has a number."""
    largest = 0.0 if one is None or not one.numel() else float(one.abs().max())
    if one is None or other is None or one.shape != other.shape:
        return Apart(math.inf, largest)
    if not one.numel():
        return Apart(0.0, largest)
    one, other = one.double(), other.double()
    same = (one == other) | (one.isnan() & other.isnan())
    difference = float(torch.where(same, 0.0, (one - other).abs()).max())
    return Apart(math.inf if math.isnan(difference) else difference, largest)


def _judge(variant: Variant, pairs: Sequence[tuple[Pair, Bound]], has_perturbed: bool) -> None:
    """Sets the worst verdict of a variant's seeds, or why there is none."""
    if not all(pair.steps for pair, _ in pairs):
        variant.unjudged = "no optimizer step in common with the reference"
        return
    verdicts = []
    for pair, allowed in pairs:
        verdicts.append(judge(pair, allowed))
        verdicts[-1].causes = causes(pair, verdicts[-1].kind)
    found = worst(verdicts)
    blind = any(pair.needs_bound and allowed.undecided == pair.steps[0] for pair, allowed in pairs)
    if not blind or found.kind == "different":
        variant.verdict = found
    elif has_perturbed:
        variant.unjudged = "rounding alone may change the losses by more than a tenth from the first step on"
    else:
        variant.unjudged = f"no perturbed run shows what rounding may do, see {command('compare', 'perturb')}"


def _explain(comparison: Comparison, bounds: Sequence[tuple[Pair, Bound]]) -> None:
    """Notes how far the bounds reach, and stores the lowest for the plot."""
    limits: dict[int, float] = {}
    end = math.inf
    for pair, allowed in bounds:
        end = min(end, allowed.undecided or math.inf)
        for step, limit in zip(pair.steps, allowed.losses, strict=True):
            limits[step] = min(limit, limits.get(step, math.inf))
    steps = [step for step in sorted(limits) if step < end]
    if not steps:
        return
    comparison.rounding = Curve(steps, [limits[step] for step in steps])
    if end < math.inf:
        comparison.notes.append(
            f"From step {end:,} on rounding alone may change the losses by more than a tenth: only the steps before "
            "are judged. After it, only a loss that is off by more than the largest loss so far counts."
        )


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
