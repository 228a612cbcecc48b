"""Defines the result of a comparison, which comparison.json contains. Importing this module does not import torch."""

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from cifar_zero.core import console

Outcome = Literal["reference", "bit-identical", "agrees", "different", "too inaccurate", "not judged", "not trained"]

OF_CHECKS: tuple[Outcome, ...] = ("agrees", "not judged", "different")
"""Outcomes of `StepCheck`, the worst last."""

PASSING: tuple[Outcome, ...] = ("reference", "bit-identical", "agrees")
"""Outcomes that let a comparison pass."""

SIGNS: dict[Outcome, str] = {
    "reference": "●",
    "bit-identical": "=",
    "agrees": "≈",
    "different": "≠",
    "too inaccurate": "↓",
    "not judged": "?",
    "not trained": "✗",
}
"""Signs before the outcomes, so that they can be distinguished without colour."""

FLAT = 0.01  # a run counts as learning if its loss falls by more than this share of the first loss


def has_fallen(losses: Sequence[float]) -> bool:
    """Returns whether the loss has fallen by more than the share FLAT of the first loss, from the mean over the first
    quarter of the steps to the mean over the last quarter. `losses` must not be empty."""
    quarter = max(1, len(losses) // 4)
    fall = statistics.fmean(losses[:quarter]) - statistics.fmean(losses[-quarter:])
    return fall > FLAT * abs(losses[0])


@dataclass
class FinishedRun:
    """The content of one run folder."""

    folder: str
    metrics: dict[str, Any]  # the content of metrics.json
    settings: dict[str, Any]  # the options in config.yaml, by the names of the flags (see `settings.flat`)
    losses: dict[int, float]  # by optimizer step, from 1: mean over micro-batches and ranks
    check: dict[str, Any] | None = None  # the content of step_check.json; None if no steps were checked


@dataclass
class Variant:
    """One way to train the recipe, with its run and the verdict on it."""

    name: str  # short and unique, such as deepspeed_stage_2, or "deepspeed_stage_2, 4 micro-batches"
    command: str = ""  # the command that trains it again
    outcome: Outcome = "not judged"
    remark: str = ""  # what was judged, what differs, or why there is no verdict, in one line
    run: FinishedRun | None = None  # None if it did not train
    drift: str = ""  # how far losses and weights are from the reference by rounding, which is not judged

    @property
    def passed(self) -> bool:
        """Whether the variant trained, agrees with the reference or is the reference, and reaches --min_accuracy."""
        return self.outcome in PASSING

    @property
    def verdict(self) -> str:
        return ": ".join(filter(None, [f"{SIGNS[self.outcome]} {self.outcome}", self.remark, self.drift]))

    def number(self, key: str) -> float | None:
        """Returns the number under a key of metrics.json, or the largest number if each rank has one. Returns None if
        there is no number or no run."""
        value = self.run and self.run.metrics.get(key)
        if isinstance(value, list):
            return max((each for each in value if each is not None), default=None)
        return value


@dataclass
class Comparison:
    """The result of `cifar-zero compare`: the variants that were trained or read, with their verdicts."""

    variants: list[Variant]  # the reference first
    differences: dict[str, dict[str, str]] = field(default_factory=dict)
    """Settings in which the runs differ (see `reading.shared`). Each setting has a dictionary of its values, keyed by
    the variants' names."""
    notes: list[str] = field(default_factory=list)  # notes on the verdicts, one sentence each
    created: str = field(default_factory=lambda: f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}")  # ISO 8601
    command: str = field(default_factory=lambda: console.command("compare", *sys.argv[1:]))  # repeats the comparison

    @property
    def reference(self) -> Variant:
        return self.variants[0]

    @property
    def passed(self) -> bool:
        return all(variant.passed for variant in self.variants)

    @property
    def headline(self) -> str:
        """One sentence with the number of variants that agree with the reference and the number of each outcome. It
        also says if the reference itself has failed, or if no variant has learned."""
        outcomes = [variant.outcome for variant in self.variants[1:]]
        agree = sum(outcome in PASSING for outcome in outcomes)
        counts = ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in SIGNS if outcome in outcomes)
        sentence = f"{agree} of {len(outcomes)} agree with {self.reference.name}: {counts}"
        if not self.reference.passed:
            sentence += f"; {self.reference.name} itself: {self.reference.outcome}"
        losses = [[*variant.run.losses.values()] for variant in self.variants if variant.run]
        if losses and not any(map(has_fallen, losses)):
            sentence += f"; no variant has learned (the loss did not fall by {FLAT:.0%}): agreement is not evidence"
        return sentence

    def require(self, least: float) -> None:
        """Changes the outcome of variants that have passed so far, including the reference, to "too inaccurate" if
        their test accuracy (0 to 1) is unknown or below `least`."""
        for variant in self.variants:
            if not variant.passed:
                continue
            accuracy = variant.number("test/acc")
            if accuracy is not None and accuracy >= least:
                continue
            variant.outcome = "too inaccurate"
            variant.remark = "the run lacks the test accuracy that --min_accuracy needs"
            if accuracy is not None:
                variant.remark = f"accuracy {accuracy:.2%} is less than --min_accuracy {least:.2%}"
