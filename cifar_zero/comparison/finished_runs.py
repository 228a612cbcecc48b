"""Judges finished runs of `train`, and builds a comparison with their differences and verdicts."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cifar_zero.checkpoints import run_folder
from cifar_zero.checkpoints.read import read
from cifar_zero.checkpoints.weights import net_weights
from cifar_zero.comparison.reading import blocking_settings, differences
from cifar_zero.comparison.result import Comparison, FinishedRun, Outcome, Variant
from cifar_zero.core.errors import UsageError
from cifar_zero.models import MODELS, ThirdParty
from cifar_zero.training.results import FALLBACK

Weights = Mapping[str, Tensor]  # parameters and buffers, keyed by the plain model's state_dict names


def summarize(variants: list[Variant], trust: bool = False) -> Comparison:
    """Sets the outcomes of the variants, of which the first is the reference, and returns their comparison. A variant
    without a run keeps its outcome. With `trust`, checkpoints that could run code are loaded too."""
    comparison = Comparison(variants, differences(variants))
    for variant in variants:
        if variant.run is None:
            continue
        if FALLBACK in variant.run.metrics:
            comparison.notes.append(f"{variant.name}: {variant.run.metrics[FALLBACK]}.")
        variant.outcome, variant.remark = _verdict(comparison, variant, variant.run, trust)
    return comparison


def _verdict(comparison: Comparison, variant: Variant, run: FinishedRun, trust: bool) -> tuple[Outcome, str]:
    """Returns the outcome of a variant with a finished run and its explanation in one line, and sets the variant's
    `drift`. The outcome is the first of these that applies:

    - "different" if the variant's own step check found a difference
    - "reference" for the reference itself
    - "not judged" if the reference has no run, if the recipes differ, or if no step was recorded in both runs
    - "different" if the losses of step 1 differ by more than FIRST_LOSS, unless they may depend on the split
    - "bit-identical" if there is no drift
    - the outcome of the step check
    """
    reference, check = comparison.reference, run.check or UNCHECKED
    if check["outcome"] == "different":
        return "different", check["summary"]
    if variant is reference:
        return "reference", check["summary"]
    if reference.run is None:
        return "not judged", "the reference did not train"
    if settings := blocking_settings(comparison.differences, reference.name, variant.name):
        return "not judged", f"its recipe differs from the recipe of the reference ({', '.join(settings)})"
    if not reference.run.losses.keys() & run.losses.keys():
        recorded = f"{_steps(reference.run)} in the reference, and {_steps(run)} in the variant"
        return "not judged", f"no step was recorded in both runs: {recorded}"
    weights = [_weights(each, trust, comparison.notes) for each in (reference.run, run)]
    first = ""
    if 1 in reference.run.losses and 1 in run.losses:  # a resumed run begins at a later step
        expected, actual = reference.run.losses[1], run.losses[1]
        if not math.isclose(expected, actual, rel_tol=FIRST_LOSS):
            first = f"the first loss is {actual:.4g}, but {expected:.4g} in the reference"
            if not _may_depend_on_split(reference.run, run, weights):
                return "different", f"{first}: images or weights differ"
            first += ", and may depend on how the batch is split"
    variant.drift = "; ".join(filter(None, [first, _drift(reference.run, run, *weights)]))
    if not variant.drift:
        return "bit-identical", "losses and weights equal the reference's"
    return check["outcome"], check["summary"]


FIRST_LOSS = 0.02
"""Largest relative difference allowed between the first losses of two runs, which start from the same weights and
images. No precision explains a larger difference, as even bfloat16 has 8 bits of precision."""

BY_SPLIT = ("model.dropout", "model.ep_size")
"""Settings that, if set, make the loss depend on how a batch is split: each rank draws its own dropout, and experts
have places for a share of each micro-batch."""

UNCHECKED: dict[str, Any] = {"outcome": "not judged", "summary": "no step was checked (--audit, --check_steps)"}
"""Stands for the step check of a run that has none."""


def _may_depend_on_split(one: FinishedRun, other: FinishedRun, weights: Sequence[Weights | None]) -> bool:
    """Returns whether the losses of two runs may differ because the runs split a batch differently into micro-batches.

    The loss depends on the split with an option of BY_SPLIT, or with batch norms, which use the statistics of a
    micro-batch. It may depend on it if the weights of neither run could be read, or if the model is not the project's,
    which may have dropout without an option. `weights` are those of both runs, whose names are equal.
    """
    split = ("micro_batch_size", "accumulate", "world_size")
    if all(one.metrics.get(key) == other.metrics.get(key) for key in split):
        return False
    name = str(one.settings.get("model"))
    names = next((each for each in weights if each is not None), None)
    if names is None or name not in MODELS or issubclass(MODELS[name], ThirdParty):
        return True
    return any(name.endswith("running_mean") for name in names) or any(one.settings.get(key) for key in BY_SPLIT)


def _steps(run: FinishedRun) -> str:
    return f"steps {min(run.losses):,} to {max(run.losses):,}"


def _drift(reference: FinishedRun, other: FinishedRun, one: Weights | None, two: Weights | None) -> str:
    """Describes how far the losses and the last weights of a run are from those of the reference. Returns an empty text
    if they are equal bit by bit. `one` and `two` are the weights of the reference and of the other run, or None if they
    cannot be read."""
    expected, losses = reference.losses, other.losses
    parts = []
    if expected.keys() != losses.keys():
        parts.append(f"the reference recorded {_steps(reference)}, and the variant {_steps(other)}")
    unequal = [step for step in expected if step in losses and expected[step] != losses[step]]
    if unequal:
        last = unequal[-1]
        error = abs(expected[last] - losses[last])
        parts.append(f"losses differ from step {unequal[0]:,} on, by {error:.1e} at step {last:,}")
    if one is None or two is None:
        parts.append("weights were not compared")
    elif one.keys() != two.keys() or any(one[name].shape != two[name].shape for name in one):
        parts.append("weights have other names or shapes")
    else:
        names = [name for name in one if not torch.equal(one[name], two[name])]
        if names:
            furthest = max(float((one[name].double() - two[name].double()).abs().max()) for name in names)
            parts.append(f"weights differ by up to {furthest:.1e}")
    return "; ".join(parts)


def _weights(run: FinishedRun, trust: bool, notes: list[str]) -> Weights | None:
    """Returns the weights (not averaged by --ema) in a run's last checkpoint. If it cannot be read, adds a note to
    `notes` and returns None."""
    try:
        checkpoint = Path(run.folder, run_folder.CHECKPOINTS, run_folder.LAST)
        if not checkpoint.exists():
            raise UsageError(f"{run.folder} has no checkpoint of its last step")
        return net_weights(read(checkpoint, trust), averaged=False)
    except UsageError as error:
        notes.append(f"The weights of {run.folder} were not compared: {error}.")
        return None
