"""What a comparison came to, as comparison.json holds it and the report draws it; plain Python, no torch."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from errors import UsageError
from reports.summary import write_json

SCHEMA = 1
"""Of comparison.json: keys may be added, none changes its meaning."""

VerdictKind = Literal["reference", "bit-identical", "within rounding", "different", "not trained"]

GOOD: tuple[VerdictKind, ...] = ("reference", "bit-identical", "within rounding")
"""Verdicts with which a comparison has passed."""


@dataclass
class Verdict:
    """Whether a variant trains the reference's network, over all its seeds; the worst of them where they differ."""

    kind: VerdictKind
    loss_difference: float | None = None
    """Of the losses, at the step that uses most of its bound up."""
    loss_bound: float | None = None
    """What rounding may make of it, at that step."""
    weight_difference: float | None = None
    """Largest difference of a weight after the last step, in the tensor that uses most of its bound up."""
    weight_bound: float | None = None
    first_difference: int | None = None
    """First optimizer step (from 1) whose losses are not equal bit by bit; None where all are."""
    first_parting: int | None = None
    """First optimizer step whose losses differ by more than rounding, or that one run lacks; None for none."""
    causes: list[str] = field(default_factory=list)
    """Known causes that apply to this variant, a sentence each."""
    remark: str = ""
    """What the figures do not show: runs of unequal length, weights that are no numbers."""


@dataclass
class Curve:
    """Of one run."""

    steps: list[int]
    """Optimizer steps, from 1."""
    values: list[float]
    seconds: list[float] = field(default_factory=list)
    """Since the start of the training, as long as `steps`; empty where it is not known."""


@dataclass
class ModelStates:
    """Bytes on one rank."""

    parameters: int
    gradients: int
    optimizer: int


@dataclass
class Run:
    """One run folder."""

    folder: str
    seed: int
    metrics: dict[str, Any]
    """The content of metrics.json."""
    losses: Curve
    """Loss of each optimizer step, mean over micro-batches and ranks."""
    curves: dict[str, Curve]
    """From the loggers' tag (train/loss, val/acc, val/loss) to its curve."""
    checkpoint_bytes: int | None = None
    seconds_to_accuracy: float | None = None
    """From the start of the training to the validation that reached `Comparison.target_accuracy`."""
    effective: dict[str, Any] = field(default_factory=dict)
    """What the strategy made of the request: compute_dtype, parameter_dtype, reduce_bucket_size, skipped_steps, ..."""


@dataclass
class Spread:
    """Of a figure over seeds."""

    mean: float
    lowest: float
    highest: float


@dataclass
class Variant:
    """One way to train the recipe."""

    name: str
    """Short and unique: deepspeed_stage_2, or deepspeed_stage_2, 4 micro-batches, where strategies are not all."""
    strategy: str
    world_size: int
    accumulate: int
    command: str
    """That trains it again."""
    runs: list[Run] = field(default_factory=list)
    """One for each seed."""
    figures: dict[str, Spread] = field(default_factory=dict)
    """From a key of metrics.json whose value is a number, or of a run (checkpoint_bytes), to its mean and spread."""
    predicted: ModelStates | None = None
    """What ZeRO's formulas say of the fullest rank; None where there is no formula."""
    error: str = ""
    """The line with which it failed."""
    verdict: Verdict | None = None
    unjudged: str = ""
    """Why there is no verdict."""


@dataclass
class Difference:
    """A setting that the compared runs ought to share and do not."""

    setting: str
    values: dict[str, str]
    """From a variant's name to its value."""


@dataclass
class Comparison:
    """All of it."""

    title: str
    command: str
    created: str
    """Date and time in UTC, ISO 8601."""
    machine: dict[str, str]
    """What it ran on and in: device, cores, and the versions of the libraries."""
    recipe: dict[str, str]
    """What all variants share: dataset, model, global batch, epochs or steps, optimizer, schedule, precision."""
    reference: str
    """Name of the variant that the others are judged by."""
    variants: list[Variant]
    differences: list[Difference] = field(default_factory=list)
    target_accuracy: float | None = None
    notes: list[str] = field(default_factory=list)
    """What is to be known of the verdicts, a sentence each: where their bounds come from."""
    rounding: Curve | None = None
    """What rounding may make of the loss of each step: the bounds behind the verdicts; None where unknown."""

    @property
    def passed(self) -> bool:
        """Whether every variant trained and agreed."""
        return all(variant.verdict is not None and variant.verdict.kind in GOOD for variant in self.variants)


def write(comparison: Comparison, file: Path) -> None:
    """Writes comparison.json, whole or not at all; what is no number becomes null, as JSON has it."""
    write_json(file, {"schema": SCHEMA, "passed": comparison.passed, **asdict(comparison)})


def read(file: Path) -> Comparison:
    """Reads comparison.json; keys that are not known here are left out.

    Raises:
        UsageError: there is no such file, or it holds no comparison of this schema.
    """
    from pydantic import TypeAdapter, ValidationError  # takes 0.2 s, which only a reader should wait for

    try:
        content = json.loads(file.read_bytes(), object_hook=_with_numbers)
        if content["schema"] != SCHEMA:
            raise UsageError(f"{file}: schema {content['schema']} is not known here, only {SCHEMA}")
        return TypeAdapter(Comparison).validate_python(content)
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, ValidationError) as error:
        raise UsageError(f"{file} is not a comparison.json, as compare.py writes it") from error


def _with_numbers(read: dict[str, Any]) -> dict[str, Any]:
    """A curve's null is a value that was no number."""
    if read.keys() >= {"steps", "values"}:
        read["values"] = [math.nan if value is None else value for value in read["values"]]
    return read
