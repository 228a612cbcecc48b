"""Explains why values of a module differ from a script's values."""

import math

from torch import Tensor

from stepcheck.engines.adapter import same_values, tensors_in
from stepcheck.replay.compare import CONSTANT, common_factor
from stepcheck.script.recording import RecordedStep, samples_in


def explain_loss(script: Tensor, module: Tensor, step: RecordedStep) -> str:
    """Returns the likely causes of the factor between two losses, or else the factor."""
    factor, parts, samples = float(module / script), len(step.batches), samples_in(step.batches[0])
    causes = (
        (1 / samples, "a sum over the samples in the script, a mean in the module"),
        (samples, "a mean over the samples in the script, a sum in the module"),
        (
            1 / parts,
            f"either the script does not divide its loss by its {parts} micro-batches, or the module divides its loss, "
            "which Lightning divides too",
        ),
    )
    likely = [text for known, text in causes if known != 1 and math.isclose(factor, known, rel_tol=CONSTANT)]
    return "; or ".join(likely) or f"the module's loss is {factor:.3g} times the script's"


def explain_gradient(script: Tensor, module: Tensor, before: Tensor | None) -> str:
    """Returns the likely cause of the difference of two gradients, or else the factor between them, or "". `before` is
    the script's gradient in the previous step."""
    script, module = script.double(), module.double()
    if before is not None and _explains(script - before.to(script), module):
        return "the script adds the gradient of the previous step, because a call of zero_grad is missing"
    factor = common_factor(module, script)
    return "" if factor is None else f"the module's gradient is {factor:.3g} times the script's"


def explain_batch(script: object, module: object) -> str:
    """Returns the first difference of the module's batch from the script's, or "" if their tensors have the same shapes
    and values."""
    pairs = tensors_in(script), tensors_in(module)
    shapes = [[tuple(each.shape) for each in batch] for batch in pairs]
    if shapes[0] != shapes[1]:
        return f"shapes {shapes[1]} in the module, {shapes[0]} in the script"
    for one, other in zip(*pairs, strict=True):
        x, y = one.cpu().double(), other.cpu().double()
        if same_values(x, y):
            continue
        spread = x - x.mean()
        slope = float((spread * y).sum() / spread.square().sum().clamp(min=1e-300))  # of the line that fits best
        shift = float(y.mean() - slope * x.mean())
        if other.is_floating_point() and _explains(slope * x + shift, y):
            line = f"{slope:.4g} times the script's plus {round(shift, 6):g}"
            return f"the module's values are {line}, so the normalisation differs"
        return "the samples or their order differ"
    return ""


def _explains(value: Tensor, expected: Tensor) -> bool:
    return float((value - expected).norm()) <= CONSTANT * float(expected.norm())
