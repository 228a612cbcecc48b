"""Defines the verdict of a step check, and the findings on which the verdict is based. Does not import torch."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal[
    "weight",
    "loss",
    "gradient",
    "learning rate",
    "option",  # of the optimizer
    "training mode",
    "gradient norm",
    "update",
    "state",
    "buffer",
    "output",
    "position",  # only in a ResumeCheck
    "batch",  # only in a ResumeCheck
    "script's batch",
    "script's loss",
    "script's gradient",
    "script's option",
    "script's update",
    "script's buffer",
]
"""Kinds of values that are compared with the values of plain PyTorch and, in a `ScriptCheck`, also of a script."""

SHARED: tuple[Kind, ...] = ("gradient", "gradient norm", "script's loss", "script's gradient", "script's buffer")
"""Kinds of values that are the same on all ranks. Their findings are therefore counted only once, from rank 0."""

Outcome = Literal["bit-identical", "within rounding", "not judged", "different"]
"""Outcomes of a step check, from the best to the worst."""

BLUNT = 0.5
"""Largest bound of the error, as a share of a value's norm, for which the value counts as judged. Agreement within a
larger bound is not evidence."""

ENOUGH = 0.95
"""Smallest share of the elements that must be judged, for each kind in `Verdict.needed`. If fewer are judged, the
verdict is "not judged"."""

FAULTS_KEPT = 50


@dataclass(frozen=True)
class Finding:
    """Describes one compared value by its error `off` and by its bound `allowed`, the error that rounding allows. Both
    are shares of the value's norm."""

    step: int  # optimizer step, from 1
    kind: Kind
    name: str  # the plain model's name of the tensor, or the micro-batch of a loss
    off: float
    allowed: float
    elements: int = 1
    pattern: str = ""  # a text that explains a fault, such as a constant factor or a rank
    own_share: float = 1.0  # the value's own norm, as a share of the norm by which its error was divided

    @property
    def share(self) -> float:
        """Returns the error as a share of the bound. A finding whose share is above 1 is a fault. An error of NaN is a
        fault too."""
        if self.off == 0:
            return 0.0
        return math.inf if math.isnan(self.off) or not self.allowed else self.off / self.allowed

    @property
    def is_judged(self) -> bool:
        """Returns whether the value counts as judged: its bound is at most BLUNT, or its error exceeds even a wider
        bound, which is a fault. A value that is equal bit by bit counts too, unless it is NaN."""
        bound = self.smallest_visible if self.own_share else self.allowed
        return bound <= BLUNT or self.share > 1 or (self.off == 0 and self.allowed < math.inf)

    @property
    def smallest_visible(self) -> float:
        """Returns the smallest scale error of the value that would exceed the bound. It is infinite for zeros."""
        return self.allowed / self.own_share if self.own_share else math.inf

    def __str__(self) -> str:
        of = f" of {self.name}" if self.name else ""
        pattern = f"; {self.pattern}" if self.pattern else ""
        if math.isfinite(self.off):
            how_far = f"off by {percent(self.off)} where rounding allows {percent(self.allowed)}{pattern}"
            return f"step {self.step}: {self.kind}{of} {how_far}"
        return f"step {self.step}: {self.kind}{of}: {self.pattern or 'NaN or infinite'}"


@dataclass
class Tally:
    """Counts the compared values of one kind (see `Kind`)."""

    elements: int = 0
    judged: int = 0
    tightest: float = math.inf  # the smallest scale error of all values that would be seen, unless it is 0
    worst: Finding | None = None  # the judged finding with the largest share of its bound
    largest_unjudged: Finding | None = None  # the finding with the most elements that is not judged

    def add(self, found: Finding) -> None:
        """Counts a finding."""
        self.elements += found.elements
        if not found.is_judged:
            if self.largest_unjudged is None or found.elements > self.largest_unjudged.elements:
                self.largest_unjudged = found
            return
        self.judged += found.elements
        if found.allowed:
            self.tightest = min(self.tightest, found.smallest_visible)
        if self.worst is None or found.share > self.worst.share:
            self.worst = found


@dataclass
class Verdict:
    """Counts the compared and the judged values of all checked steps. Collects the faults, and notes on what could not
    be checked."""

    steps: list[int] = field(default_factory=list)  # the checked steps, from 1
    tallies: dict[str, Tally] = field(default_factory=dict)  # by kind
    faults: list[Finding] = field(default_factory=list)  # the first FAULTS_KEPT
    not_checked: list[str] = field(default_factory=list)  # what could not be judged and why, one clause each
    needed: tuple[Kind, ...] = ("gradient", "update")  # kinds for which ENOUGH elements must be judged
    first_output: Finding | None = None  # the first fault of a submodule's output, in the order of execution

    def add(self, findings: Iterable[Finding]) -> list[Finding]:
        """Counts findings, and returns the faults among them."""
        faults = []
        for found in findings:
            self.tallies.setdefault(found.kind, Tally()).add(found)
            if found.share > 1:
                faults.append(found)
                if found.kind == "output":
                    self.first_output = self.first_output or found
        self.faults += faults[: FAULTS_KEPT - len(self.faults)]
        return faults

    def note(self, reason: str) -> None:
        """Adds a note on what is not checked and why, unless the same note exists already."""
        if reason not in self.not_checked:
            self.not_checked.append(reason)

    @property
    def judged(self) -> float:
        """Returns the smallest share of judged elements among the kinds of values in `needed`. The share of a kind
        without elements is 0."""
        counted = [self.tallies.get(kind, Tally()) for kind in self.needed]
        return min(tally.judged / tally.elements if tally.elements else 0.0 for tally in counted)

    @property
    def used(self) -> float:
        """Returns the largest error among all judged values. Each error is measured as a share of its bound."""
        return max((tally.worst.share for tally in self.tallies.values() if tally.worst), default=0.0)

    @property
    def outcome(self) -> Outcome:
        """Returns the verdict in one or two words; see `Outcome`."""
        if self.faults:
            return "different"
        if self.judged < ENOUGH:
            return "not judged"
        whole = all(tally.judged == tally.elements for tally in self.tallies.values())
        return "bit-identical" if whole and not self.used and not self.not_checked else "within rounding"

    def __str__(self) -> str:
        """Returns the verdict in one line. If there are faults, the line describes the first one. Otherwise it states
        what was judged and the smallest scale error of a gradient that would be seen."""
        if self.faults:
            first = self.faults[0]
            others = sum(each.step == first.step and each.kind == first.kind for each in self.faults) - 1
            where = "; the outputs of all modules are correct" if "output" in self.tallies else ""
            if self.first_output is not None and self.first_output.step == first.step:
                where = f"; the first module whose output differs is {self.first_output.name}"
            return f"{first}{(others and f' (and {others} more)') or ''}{where}"
        judged = sum(tally.judged for tally in self.tallies.values())
        steps = "1 step" if len(self.steps) == 1 else f"{len(self.steps)} steps"
        text = f"{steps} checked, {judged:,} values"
        parts = []
        used = {kind: tally.worst.share for kind, tally in self.tallies.items() if tally.worst and tally.worst.share}
        if used:
            shares = ", ".join(f"{kind} {percent(share)}" for kind, share in used.items())
            parts.append(f"largest shares of a bound: {shares}, all others 0 %")
        elif judged:
            parts.append("all are equal bit by bit")
        gradient = self.tallies.get("gradient", Tally())
        if gradient.tightest < math.inf:
            parts.append(f"a scale error of {percent(gradient.tightest)} would be seen")
        if self.judged < 1:
            parts.append(self._coverage())
        return "; ".join([text, *parts, *(f"not checked: {reason}" for reason in self.not_checked)])

    def _coverage(self) -> str:
        """Returns a text that says which share of the gradients and updates was judged, and names a tensor that was
        not."""
        share = math.floor(1000 * self.judged) / 10  # not rounded up to 100 %
        only = "only " if self.judged < ENOUGH else ""
        unjudged = [self.tallies[kind].largest_unjudged for kind in self.needed if kind in self.tallies]
        largest = max((each for each in unjudged if each), key=lambda each: each.elements, default=None)
        example = ""
        if largest is not None:
            example = f", not the {largest.kind} of {largest.name}, which is hardly larger than its rounding error"
        return f"{only}{share:g} % of the gradients and updates could be judged{example}"

    def as_dict(self) -> dict[str, Any]:
        """Returns the verdict as plain data for JSON."""
        return {
            "outcome": self.outcome,
            "text": str(self),
            "steps": self.steps,
            "judged": self.judged,
            "used": self.used,
            "tallies": {
                kind: {
                    "elements": tally.elements,
                    "judged": tally.judged,
                    "smallest_visible": None if math.isinf(tally.tightest) else tally.tightest,
                    "used": tally.worst.share if tally.worst else None,
                    "worst": str(tally.worst or ""),
                }
                for kind, tally in self.tallies.items()
            },
            "faults": [str(fault) for fault in self.faults],
            "not_checked": self.not_checked,
        }


def percent(share: float) -> str:
    """Formats a share in percent, such as 0.0017 % or 32 %, with two significant digits below 10 %."""
    value = 100 * share
    return f"{value:.2g} %" if value < 10 else f"{value:,.0f} %"
