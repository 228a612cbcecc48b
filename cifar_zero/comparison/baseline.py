"""Saves and reads baselines, for `cifar-zero compare --save_baseline FILE` and `--against FILE`. A baseline holds
values of every training step of a comparison, see `SketchCheck`. A comparison with a baseline shows whether training
still computes the same values after a change of the machine, of the driver, or of the release of torch or DeepSpeed.

Two correct runs differ by rounding, and the difference grows from step to step. Two replays of one step in float64,
from the same weights, do not drift apart. A step therefore agrees with the baseline if two conditions hold. The loss,
the gradient and the update of its replay agree with the baseline's replay. And on both machines, the step check found
that the strategy computes what the replay computes, up to rounding.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from cifar_zero.checkpoints.weights import encode, read_safetensors
from cifar_zero.comparison.result import GOOD, Comparison, Variant
from cifar_zero.core import atomic
from cifar_zero.core.errors import UsageError
from cifar_zero.step_check.findings import SMALL, off_by
from cifar_zero.step_check.verdict import Finding, Kind, Verdict, percent

SKETCHES = "sketches"
"""Key in `Variant.check`. Its value is the path of the file that holds `SketchCheck.sketches`."""

EXACT = 1e-6
"""A relative difference between a value of two float64 replays counts only if it is larger than this number. float64
rounds at 1e-16, but some values round at 1e-7 for two reasons. A module may compute in float32 even in the replay. And
torch's optimizer computes the update in float32, where rounding is relative to the weights."""

SENSITIVITY = 1e4
"""If the weights before the first step deviate from the baseline's weights, every other value may deviate by the
weights' relative deviation times this factor. The weights deviate if another kind of CPU draws initial weights that
differ in their last bits. In the acceptance cases (`cases`), between AVX-512 and SSE (torch 2.15), gradients then
deviate up to 200 times as far as the weights in bfloat16, and updates up to 2,000 times as far with Adam."""


def apply(comparison: Comparison) -> None:
    """Compares the trained cases with the baseline `comparison.against`, if it is set, and sets their verdicts. If
    `comparison.save_baseline` is set, and no signal has stopped the comparison, also writes a new baseline to this
    file. The new baseline holds the steps and verdicts of the cases, and the environment."""
    if comparison.against:
        judge(comparison)
    if not comparison.save_baseline or comparison.stopped_by:
        return
    cases, tensors = {}, {}
    for case in comparison.variants:
        if SKETCHES in case.check:
            key = identity(case)
            cases[key] = [case.name, case.check["outcome"], case.check["text"]]
            tensors |= {f"{key}/{name}": value for name, value in _sketches(case).items()}
    about = {"created": comparison.created, "command": comparison.command}
    about |= {"machine": comparison.machine, "cases": cases}
    Path(comparison.save_baseline).parent.mkdir(parents=True, exist_ok=True)
    atomic.write(Path(comparison.save_baseline), encode(tensors, {"baseline": json.dumps(about)}))
    comparison.notes.append(f"The baseline of {len(cases)} cases is in {comparison.save_baseline}.")


def read(comparison: Comparison) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns the metadata and the tensors of the baseline `comparison.against`. The tensors are the values of
    `SketchCheck.sketches` for each case. Their keys are IDENTITY/KEY, where IDENTITY is the case's `identity`, and KEY
    the key in `sketches`. Raises UsageError if the file is damaged or is not a baseline, or if it has none of the
    comparison's cases on the first case's number of ranks."""
    tensors, metadata = read_safetensors(Path(comparison.against))
    if "baseline" not in metadata:
        raise UsageError(f"--against {comparison.against} is not a baseline: write one with --save_baseline")
    about, ranks = json.loads(metadata["baseline"]), comparison.variants[0].world_size
    if not any(identity(case) in about["cases"] for case in comparison.variants if case.world_size == ranks):
        what = f"none of these cases on {ranks} ranks"
        raise UsageError(f"--against {comparison.against} has {what}: it was saved by {about['command']}")
    return about, tensors


def judge(comparison: Comparison) -> None:
    """Compares the cases with the baseline `comparison.against` and sets their verdicts. A case that the baseline lacks
    keeps its verdict. Adds notes on what has changed in the environment since the baseline was saved, and on cases that
    are missing on one side."""
    about, tensors = read(comparison)
    comparison.reference = f"the baseline {comparison.against}"
    left, new = about["cases"], []
    for case in comparison.variants:
        key = identity(case)
        if key not in left:
            new.append(case.name)
            continue
        _, outcome, text = left.pop(key)
        if not case.passed:
            case.remark += f"; in the baseline: {outcome}"
        elif outcome not in GOOD:
            case.judge(outcome, f"now {case.kind} compared with plain PyTorch; in the baseline: {text}")
        else:
            old = {name.removeprefix(f"{key}/"): each for name, each in tensors.items() if name.startswith(f"{key}/")}
            verdict = compare(old, _sketches(case))
            case.judge(verdict.outcome, f"{verdict}; with plain PyTorch: {case.remark}")
    machine, before = comparison.machine, about["machine"]
    names = [name for name in {**before, **machine} if before.get(name) != machine.get(name)]
    changes = ", ".join(f"{name} {before.get(name)} -> {machine.get(name)}" for name in names)
    comparison.notes.append(f"Changed since the baseline of {about['created']}: {changes or 'nothing'}.")
    if new:
        comparison.notes.append(f"Cases not in the baseline were compared with plain PyTorch only: {'; '.join(new)}.")
    if left:
        comparison.notes.append(f"Cases that only the baseline has: {'; '.join(name for name, *_ in left.values())}.")


def compare(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> Verdict:
    """Compares the steps of a case with the same steps in the baseline, and returns the verdict. The comparison stops
    at the first step that cannot be judged. It also stops, from the second step on, if the weights before the step
    differ from the baseline's weights in any bit.

    Args:
        old: `SketchCheck.sketches` of the case in the baseline.
        new: `SketchCheck.sketches` of the case that was trained now.
    """
    verdict, steps = Verdict(), len(new["weights"])
    shapes, others = ({key: values.shape for key, values in sketches.items()} for sketches in (old, new))
    if shapes != others:
        verdict.note("all steps, because the baseline has other steps or tensors")
        return verdict
    for step in range(steps):
        distance = off_by(new["weights"][step], old["weights"][step])
        findings = [*_findings(step, old, new, SENSITIVITY * distance)]
        if (step and distance) or not all(found.is_judged for found in findings):
            break
        verdict.steps.append(step + 1)
        verdict.add(findings)
    if not all(torch.equal(old[key], new[key]) for key in new):
        loss, gradient, weights = (
            percent(off_by(new[key][-1], old[key][-1])) for key in ("losses", "found", "weights")
        )
        drift = f"loss {loss}, gradient {gradient}, weights {weights}"
        verdict.note(f"the drift in later steps ({drift} at step {steps})")
    return verdict


def _findings(step: int, old: Mapping[str, Tensor], new: Mapping[str, Tensor], bound: float) -> Iterator[Finding]:
    """Compares the float64 replay of a step with the baseline's replay of this step, and yields a `Finding` for each
    value.

    Args:
        step: Index of the step, from 0.
        old: `SketchCheck.sketches` of the case in the baseline.
        new: `SketchCheck.sketches` of the case that was trained now.
        bound: Relative deviation that is allowed in addition to rounding.
    """
    weights, whole = (float(old[key][step].norm()) for key in ("weights", "found"))
    for key in sorted(old, key=lambda key: key != "loss/"):  # loss first: a wrong loss explains the rest
        kind, is_exact, name = key.partition("/")
        if is_exact:
            values = old[key]
            size = float(values[step].norm()) + (SMALL * whole if name else 1e-300)
            allowed = bound + EXACT * (weights / size if kind == "update" else 1)
            yield Finding(step + 1, cast(Kind, kind), name, float((new[key] - values)[step].norm()) / size, allowed)


def identity(case: Variant) -> str:
    """Returns a key for a case, which is equal for the same case in two comparisons. The key consists of the case's
    flags, with paths reduced to file names."""
    return " ".join(Path(flag).name for flag in case.flags)


def _sketches(case: Variant) -> dict[str, Tensor]:
    return read_safetensors(Path(case.check[SKETCHES]))[0]
