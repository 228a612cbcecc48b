"""The result of a comparison, as in comparison.json and in the report; plain Python, no torch."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

VerdictKind = Literal[
    "reference", "bit-identical", "within rounding", "different", "too inaccurate", "not judged", "not trained"
]

GOOD: tuple[VerdictKind, ...] = ("reference", "bit-identical", "within rounding")
"""Verdicts with which a comparison passes."""

SIGNS: dict[VerdictKind, str] = {
    "reference": "●",
    "bit-identical": "=",
    "within rounding": "≈",
    "different": "≠",
    "too inaccurate": "↓",
    "not judged": "?",
    "not trained": "✗",
}
"""Sign before each verdict, so that colour is not the only difference."""

PLAIN = "plain PyTorch"  # the reference of a comparison whose variants are checked step by step

FLAT = 0.01  # share of a loss by which it must fall before a training counts as learning


def has_fallen(losses: Sequence[float]) -> bool:
    """Whether a loss has fallen by more than FLAT, between the means of the first and the last quarter of the steps."""
    if not losses:
        return False
    quarter = max(1, len(losses) // 4)
    fall = statistics.fmean(losses[:quarter]) - statistics.fmean(losses[-quarter:])
    return fall > FLAT * abs(losses[0])


@dataclass
class Curve:
    """One metric of one run by optimizer step."""

    steps: list[int]  # optimizer steps, from 1
    values: list[float]
    seconds: list[float] = field(default_factory=list)  # since the start of training; empty for losses

    @property
    def by_step(self) -> dict[int, float]:
        """The values by optimizer step."""
        return dict(zip(self.steps, self.values, strict=True))


@dataclass
class FinishedRun:
    """One run folder."""

    folder: str
    seed: int
    metrics: dict[str, Any]  # the content of metrics.json, and checkpoint_bytes: size of the last checkpoint
    settings: dict[str, Any]  # the content of config.yaml, by the names of the flags (see `settings.flat`)
    losses: Curve  # loss of each optimizer step, mean over micro-batches and ranks
    curves: dict[str, Curve]  # TensorBoard's curves by tag: train/loss, val/acc, val/loss, ...
    check: dict[str, Any] | None = None  # the content of step_check.json; None if no steps were checked


@dataclass
class Variant:
    """One way to train the recipe, or a case of an acceptance."""

    name: str  # short and unique: deepspeed_stage_2; or deepspeed_stage_2, 4 micro-batches
    strategy: str
    world_size: int
    flags: list[str] = field(default_factory=list)  # flags of the training
    command: str = ""  # the command that trains it again
    runs: list[FinishedRun] = field(default_factory=list)  # one for each seed
    figures: dict[str, list[float]] = field(default_factory=dict)
    """Values of the runs by their key in metrics.json; of a list with a number per rank, the largest."""
    kind: VerdictKind = "not judged"
    remark: str = ""  # the verdict's line: what was judged, what differs, or why there is no verdict
    check: dict[str, Any] = field(default_factory=dict)  # of the step check, see `step_check.verdict.Verdict.as_dict`
    drift: str = ""  # how far losses and weights are from the reference's at the end: information, no verdict
    row: str = ""  # of an acceptance: the row of the table, without the strategy
    resume: list[str] = field(default_factory=list)  # whether it is saved or continued, see `resuming.of_job`
    phase: int = 0  # of a case: it is trained after all cases of earlier phases, in new processes
    seconds: float = 0.0  # of a case; runs have perf/fit_seconds

    @property
    def passed(self) -> bool:
        """Whether it trained, agrees with plain PyTorch, and has the accuracy that was asked for."""
        return self.kind in GOOD

    @property
    def outcome(self) -> str:
        """The verdict with its numbers, or why there is none, in one line."""
        return ": ".join(filter(None, [f"{SIGNS[self.kind]} {self.kind}", self.remark, self.drift]))

    def judge(self, kind: VerdictKind, remark: str = "") -> None:
        """Sets the verdict."""
        self.kind, self.remark = kind, remark

    @property
    def by_seed(self) -> dict[int, FinishedRun]:
        """Its runs by seed."""
        return {run.seed: run for run in self.runs}


@dataclass
class Comparison:
    """The variants of one recipe, or the cases of an acceptance."""

    title: str
    command: str
    recipe: dict[str, str]  # settings that all variants share: dataset, model, optimizer and others
    reference: str  # what the others agree with or not: name of a variant, or plain PyTorch
    variants: list[Variant]  # the reference first
    machine: dict[str, str] = field(default_factory=dict)  # device, cores, and the versions of the libraries
    differences: dict[str, dict[str, str]] = field(default_factory=dict)
    """Settings that the runs should share and do not: the value by the variant's name."""
    notes: list[str] = field(default_factory=list)  # notes on the verdicts, one sentence each
    against: str = ""  # the file of a baseline by which the cases are judged, see `baseline`
    save_baseline: str = ""  # the file to which what they computed is written
    stopped_by: int = 0  # number of the signal that ended the trainings early; 0 if none did
    created: str = field(default_factory=lambda: f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}")  # ISO 8601

    @property
    def passed(self) -> bool:
        """Whether every variant trained and agrees."""
        return all(variant.passed for variant in self.variants)

    @property
    def headline(self) -> str:
        """The outcome in one sentence."""
        kinds = [variant.kind for variant in self.variants if variant.kind != "reference"]
        agree = sum(kind in GOOD for kind in kinds)
        counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in SIGNS if kind in kinds)
        sentence = f"{agree} of {len(kinds)} agree with {self.reference}: {counts}"
        losses = [run.losses.values for variant in self.variants for run in variant.runs if run.losses.values]
        if losses and not any(map(has_fallen, losses)):
            sentence += f"; no variant has learned (the loss did not fall by {FLAT:.0%}): agreement is not evidence"
        return sentence

    def require(self, least: float) -> None:
        """Fails the variants that agree, but whose mean test accuracy, from 0 to 1, is less."""
        for variant in self.variants:
            accuracy = variant.figures.get("test/acc")
            if not variant.passed or (accuracy and statistics.fmean(accuracy) >= least):
                continue
            reason = "not tested, as --min_accuracy needs"
            if accuracy:
                reason = f"accuracy {statistics.fmean(accuracy):.2%} is less than --min_accuracy {least:.2%}"
            variant.judge("too inaccurate", reason)
