"""Defines the verdict of an audit: the faults, what was judged, and how small a fault it would have seen."""

import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Kind = Literal[
    "start",
    "loss",
    "gradient",
    "scale",
    "clipping",
    "options",
    "state",
    "update",
    "weight",
    "buffer",
    "output",
    "replayed loss",
    "replayed gradient",
    "replayed buffer",
    "batch",
    "schedule",
    "counter",
    "note",
]

Outcome = Literal["agrees", "different", "not judged"]


ENOUGH = 0.9
"""Smallest share of the gradient elements that must be judged for an agreement."""


@dataclass(frozen=True)
class Finding:
    """An error that exceeds its tolerance."""

    step: int  # optimizer step, from 1; 0 before the first
    kind: Kind
    text: str  # the tensor, the factor or error, and what it means
    share: float  # error / tolerance
    rank: int | None = None  # None if the finding holds for all ranks together

    def __str__(self) -> str:
        where = "" if self.rank is None else f" (rank {self.rank})"
        return f"step {self.step}: {self.text}{where}"


@dataclass
class Verdict:
    engine: str = ""  # what trains, for example "DeepSpeed 0.19.8, ZeRO 2, bfloat16, 2 ranks"
    steps: int = 0  # audited
    replayed: int = 0  # of these, steps that a plain copy has computed again
    identical: int = 0  # of the replayed steps, those in which every value was bit-identical on all ranks
    skipped: int = 0  # steps in which the engine left the update out, because a gradient overflowed
    findings: list[Finding] = field(default_factory=list)
    not_judged: dict[str, str] = field(default_factory=dict)  # what, and why
    notes: dict[str, str] = field(default_factory=dict)  # what is remarkable but no fault
    shares: dict[str, float] = field(default_factory=dict)  # largest error / tolerance by kind
    values: int = 0  # gradient elements that were compared, over all steps
    values_in_all: int = 0  # gradient elements that autograd computed, over all steps
    smallest_scale_error: float | None = None  # of all gradients together, that would be seen
    smallest_tensor_error: float | None = None  # scale error of one gradient that would be seen
    seconds: float = 0.0  # that the audit took on this rank
    training_seconds: float = 0.0  # from the first audited step to the last, with the audit
    bytes: int = 0  # of the sums that this rank exchanges with the others in a step
    ended: bool = False  # whether the audit ended before the training
    compared: int | None = None  # steps whose gradients were compared with a baseline; None without a baseline

    @property
    def outcome(self) -> Outcome:
        """The verdict in a word or two. "agrees" requires that steps were audited to the end of the training, no fault
        was found, `coverage` is at least ENOUGH, and a step was compared with the baseline if there is one."""
        if self.findings:
            return "different"
        is_judged = self.steps and self.coverage >= ENOUGH and not self.ended and self.compared != 0
        return "agrees" if is_judged else "not judged"

    @property
    def passed(self) -> bool:
        return self.outcome == "agrees"

    @property
    def coverage(self) -> float:
        return self.values / self.values_in_all if self.values_in_all else 0.0

    def record(self, kind: Kind, share: float) -> None:
        self.shares[kind] = max(self.shares.get(kind, 0.0), share)

    def add(self, step: int, kind: Kind, share: float, text: str, rank: int | None = None) -> None:
        """Records error / tolerance of a kind in a step, and a finding if it exceeds 1 or is NaN."""
        self.record(kind, share)
        if not share <= 1:
            self.findings.append(Finding(step, kind, text, share, rank))

    def as_dict(self) -> dict[str, Any]:
        """Returns the verdict as plain data for JSON, which has neither infinity nor NaN: such shares become the
        largest float."""
        return {
            "outcome": self.outcome,
            "summary": str(self),
            "passed": self.passed,
            "coverage": self.coverage,
            **asdict(self),
            "findings": [{**asdict(each), "share": _finite(each.share)} for each in self.findings],
            "shares": {kind: _finite(share) for kind, share in self.shares.items()},
        }

    def __str__(self) -> str:
        return "; ".join(self._sentences())

    def _sentences(self) -> Iterable[str]:
        if self.findings:
            more = len(self.findings) - 1
            yield f"FAULT {self.findings[0]}" + (f" (and {more} more)" if more else "")
        yield f"{self.steps} steps audited" + (f", {self.skipped} skipped for overflow" if self.skipped else "")
        if self.steps:
            share = "all" if self.coverage == 1 else f"{min(self.coverage, 0.9999):.4g}"
            yield f"{self.values_in_all:,} gradient values, {share} of them judged"
        if self.replayed:
            how = f"{self.identical} of them bit-identical" if self.identical < self.replayed else "bit-identical"
            yield f"{self.replayed} computed again by plain PyTorch, {how}"
        if self.shares:
            shares = ", ".join(f"{kind} {share:.2g}" for kind, share in sorted(self.shares.items()))
            yield f"largest share of a tolerance: {shares}"
        if self.smallest_scale_error is not None and self.smallest_tensor_error is not None:
            yield (
                f"a scale error of {self.smallest_scale_error:.1e} in all gradients, "
                f"or of {self.smallest_tensor_error:.1e} in one gradient, would be seen"
            )
        if not (self.steps or self.not_judged or self.findings):
            yield "not judged: the step of its optimizer was not called, or was compiled by torch.compile"
        for what, why in self.not_judged.items():
            yield f"not judged: {what}, because {why}"
        for what, why in self.notes.items():
            yield f"note: {what}: {why}"
        if self.training_seconds:
            cost = 100 * self.seconds / self.training_seconds
            yield f"the audit took {cost:.1f} % of the time and exchanges {self.bytes / 1e3:,.0f} kB"


def _finite(share: float) -> float:
    return share if share < sys.float_info.max else sys.float_info.max


class StepCheckError(RuntimeError):
    """Raised at the first fault by an audit with `on_fault="raise"`."""

    def __init__(self, finding: Finding):
        super().__init__(str(finding))
        self.finding = finding
