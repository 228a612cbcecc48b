"""The result of a comparison, as in comparison.json and in the report; plain Python, no torch."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

VerdictKind = Literal["reference", "bit-identical", "within rounding", "different", "not judged", "not trained"]

GOOD: tuple[VerdictKind, ...] = ("reference", "bit-identical", "within rounding")
"""Verdicts with which a comparison passes."""

SIGNS: dict[VerdictKind, str] = {
    "reference": "●",
    "bit-identical": "=",
    "within rounding": "≈",
    "different": "≠",
    "not judged": "?",
    "not trained": "✗",
}
"""Sign before each verdict, so that colour is not the only difference."""

FLAT = 0.01  # share of a loss by which it must fall before a training counts as learning


def has_fallen(losses: Sequence[float]) -> bool:
    """Whether a loss has fallen by more than FLAT, between the means of the first and the last quarter of the steps."""
    quarter = max(1, len(losses) // 4)
    fall = statistics.fmean(losses[:quarter]) - statistics.fmean(losses[-quarter:]) if losses else 0.0
    return bool(losses) and fall > FLAT * abs(losses[0])


@dataclass
class Curve:
    """One metric of one run by optimizer step."""

    steps: list[int]  # optimizer steps, from 1
    values: list[float]
    seconds: list[float] = field(default_factory=list)  # since the start of training; empty for losses and bounds

    @property
    def by_step(self) -> dict[int, float]:
        """The values by optimizer step."""
        return dict(zip(self.steps, self.values, strict=True))


@dataclass
class FinishedRun:
    """One run folder."""

    folder: str
    seed: int
    metrics: dict[str, Any]  # the content of metrics.json
    settings: dict[str, Any]  # the content of config.yaml, by the names of the flags (see `settings.flat`)
    deepspeed: dict[str, Any]  # DeepSpeed's configuration (deepspeed.json); empty for other strategies
    losses: Curve  # loss of each optimizer step, mean over micro-batches and ranks
    curves: dict[str, Curve]  # TensorBoard's curves by tag: train/loss, val/acc, val/loss, ...
    check: dict[str, Any] | None = None  # the content of step_check.json; None if no steps were checked
    checkpoint_bytes: int | None = None


@dataclass
class Spread:
    """A metric over the seeds."""

    mean: float
    lowest: float
    highest: float


@dataclass
class Variant:
    """One way to train the recipe."""

    name: str  # short and unique: deepspeed_stage_2; or deepspeed_stage_2, 4 micro-batches
    strategy: str
    world_size: int
    accumulate: int
    command: str  # the command that trains it again
    runs: list[FinishedRun] = field(default_factory=list)  # one for each seed
    figures: dict[str, Spread] = field(default_factory=dict)
    """Metrics by their key in metrics.json; of a list with a number per rank, the largest. Also checkpoint_bytes and
    predicted_bytes (model states of the fullest rank by ZeRO's formulas)."""
    kind: VerdictKind = "not judged"
    remark: str = ""  # the verdict's line: what was judged, what differs, or why there is no verdict
    check: dict[str, Any] = field(default_factory=dict)  # of the step check, see `step_check.verdict.Verdict.as_dict`
    drift: str = ""  # how far losses and weights are from the reference's at the end: information, no verdict
    case: str = ""  # of an acceptance: the row of the table, without the strategy
    too_low: str = ""  # how its accuracy falls short of --min_accuracy
    seconds: float = 0.0  # of a case; runs have perf/fit_seconds

    @property
    def agrees(self) -> bool:
        """Whether it trained and agrees with plain PyTorch."""
        return self.kind in GOOD

    @property
    def passed(self) -> bool:
        """Whether it agrees, with the accuracy that was asked for."""
        return self.agrees and not self.too_low

    @property
    def outcome(self) -> str:
        """The verdict with its numbers, or why there is none, in one line."""
        parts = ", ".join(filter(None, [self.too_low, self.remark, self.drift]))
        return ": ".join(filter(None, [f"{SIGNS[self.kind]} {self.kind}", parts]))

    def judge(self, kind: VerdictKind, remark: str = "") -> None:
        """Sets the verdict."""
        self.kind, self.remark = kind, remark

    @property
    def by_seed(self) -> dict[int, FinishedRun]:
        """Its runs by seed."""
        return {run.seed: run for run in self.runs}


@dataclass
class Difference:
    """A setting that the compared runs should share and do not."""

    setting: str
    values: dict[str, str]  # value by the variant's name

    def __str__(self) -> str:
        owners: dict[str, list[str]] = {}
        for name, value in self.values.items():
            owners.setdefault(value, []).append(name)
        return "; ".join(f"{value} ({', '.join(names)})" for value, names in owners.items())


@dataclass
class Comparison:
    """The variants of one recipe, or the cases of an acceptance."""

    title: str
    command: str
    machine: dict[str, str]  # device, cores, and the versions of the libraries
    recipe: dict[str, str]  # settings that all variants share: dataset, model, optimizer and others
    reference: str  # what the others agree with or not: name of a variant, or plain PyTorch
    variants: list[Variant]  # the reference first
    differences: list[Difference] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # notes on the verdicts, one sentence each
    stopped_by: int = 0  # number of the signal that ended the trainings early; 0 if none did
    created: str = field(default_factory=lambda: f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}")  # ISO 8601

    @property
    def passed(self) -> bool:
        """Whether every variant trained and agrees."""
        return all(variant.passed for variant in self.variants)

    @property
    def headline(self) -> str:
        """The outcome in one sentence."""
        kinds = [variant.kind for variant in self.variants]
        judged = len(kinds) - kinds.count("reference")
        counts = [f"{kinds.count(kind)} {kind}" for kind in SIGNS if kind != "reference" and kind in kinds]
        agree = sum(kinds.count(kind) for kind in GOOD[1:])
        parts = [f"{agree} of {judged} agree with {self.reference}: {', '.join(counts)}"]
        parts += [f"{each.name}: {each.too_low}" for each in self.variants if each.too_low]
        return "; ".join(filter(None, [*parts, self.unlearned]))

    @property
    def unlearned(self) -> str:
        """Says that no variant has learned: no loss has fallen, or no accuracy is more than three standard deviations
        better than guessing."""
        losses = [run.losses.values for variant in self.variants for run in variant.runs if run.losses.values]
        if losses and not any(map(has_fallen, losses)):
            return f"no variant has learned (the loss did not fall by {FLAT:.0%}): agreement is not evidence"
        best = max((each.figures["test/acc"].mean for each in self.variants if "test/acc" in each.figures), default=1.0)
        metrics = next((run.metrics for variant in self.variants for run in variant.runs), {})
        if not metrics.get("test/acc_per_class"):
            return ""
        chance = 1 / len(metrics["test/acc_per_class"])
        if best > chance + 3 * math.sqrt(chance * (1 - chance) / metrics["num_test"]):
            return ""
        return f"no variant has learned (accuracy {best:.2%}, chance {chance:.0%})"

    def require(self, least: float) -> None:
        """Fails the variants whose test accuracy, from 0 to 1, is less."""
        for variant in self.variants if least else ():
            found = variant.figures.get("test/acc")
            if found is None:
                variant.too_low = "not tested, as --min_accuracy needs"
            elif found.mean < least:
                variant.too_low = f"accuracy {found.mean:.2%} is less than --min_accuracy {least:.2%}"
