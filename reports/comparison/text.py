"""Figures and verdicts of a comparison in words and sensible digits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from comparison.result import Comparison, Difference, Spread, Variant, VerdictKind

MISSING = "-"
"""For a figure that there is not."""

SIGNS: dict[VerdictKind, str] = {
    "reference": "●",
    "bit-identical": "=",
    "within rounding": "≈",
    "different": "≠",
    "not trained": "✗",
}
"""Before the name of a verdict, so that it does not rest on its colour alone."""

READING = (
    (
        "= bit-identical",
        "every step's loss and every final weight that was compared equals the reference's to the last bit; weights "
        "that were not compared are named below the table.",
    ),
    (
        "≈ within rounding",
        "the sums are added up in another order, no more: no loss and no weight that decides is further from the "
        "reference's than its bound, which comes from a second run of the reference and from the precision.",
    ),
    ("≠ different", "something else is computed: look first at the step that is named, and at the causes that apply."),
    ("✗ not trained", "the run failed; the line on top says with what."),
    (
        "The figures",
        "are means over the seeds, with the lowest and the highest in brackets and as whiskers. Training makes a "
        "difference grow, so that each bound is that of its step. Curves that lie over one another are dashed in turn.",
    ),
)
"""How to read a report: terms, and a sentence for each."""


def kind_of(variant: Variant) -> VerdictKind | None:
    """Its verdict; None where it was not judged."""
    return None if variant.verdict is None else variant.verdict.kind


def verdict_name(variant: Variant) -> str:
    """Its verdict with the sign, or that there is none."""
    if variant.verdict is None:
        return f"not judged: {variant.unjudged}" if variant.unjudged else "not judged"
    kind, remark = variant.verdict.kind, variant.verdict.remark
    return f"{SIGNS[kind]} {kind}" + f" ({remark})" * bool(remark)


def headline(comparison: Comparison) -> str:
    """What the comparison came to, in one sentence."""
    variants, reference = comparison.variants, comparison.reference
    named = {kind: [variant.name for variant in variants if kind_of(variant) == kind] for kind in (None, *SIGNS)}
    agree = sum(len(named[kind]) for kind in ("reference", "bit-identical", "within rounding"))
    subject = "strategies" if len({variant.strategy for variant in variants}) == len(variants) else "variants"
    if comparison.passed:
        kinds = [f"{len(named[kind])} {kind}" for kind in ("bit-identical", "within rounding") if named[kind]]
        return f"{agree} of {len(variants)} {subject} trained and agree" + (f": {', '.join(kinds)}" if kinds else "")
    parts = []
    for variant in variants:
        if variant.verdict is not None and variant.verdict.kind == "different":
            step = variant.verdict.first_parting
            parts.append(f"{variant.name} parts from {reference}" + ("" if step is None else f" at step {step:,}"))
    if named["not trained"]:
        parts.append(f"{_and(named['not trained'])} did not train")
    if named[None]:
        parts.append(f"{_and(named[None])} {'was' if len(named[None]) == 1 else 'were'} not judged")
    return f"{'; '.join(parts)}; {agree} of {len(variants)} {subject} trained and agree"


def difference_line(difference: Difference) -> str:
    """The values of a setting and whose they are."""
    owners: dict[str, list[str]] = {}
    for name, value in difference.values.items():
        owners.setdefault(value, []).append(name)
    return "; ".join(f"{value} ({', '.join(names)})" for value, names in owners.items())


def number(value: float, digits: int = 3) -> str:
    """With so many significant digits, and a separator of thousands: 0.0123, 1.23, 4,329."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"


def percent(share: float) -> str:
    """Of a share from 0 to 1; the sign is for the column."""
    return f"{100 * share:.2f}"


def small(value: float | None) -> str:
    """A difference between losses or weights, or its bound."""
    if value is None:
        return MISSING
    return "0" if value == 0 else f"{value:.1e}"


def unit_of_bytes(largest: float) -> tuple[float, str]:
    """The unit that suits so many bytes: its size and its name, by powers of 1,000."""
    for size, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if largest >= size:
            return size, name
    return 1.0, "B"


def size(count: float) -> str:
    """Bytes, in the unit that suits them."""
    unit, name = unit_of_bytes(count)
    return f"{number(count / unit)} {name}"


def spread(figure: Spread | None, form: Callable[[float], str] = number) -> str:
    """A mean, and where the seeds differ the lowest and the highest in brackets."""
    if figure is None:
        return MISSING
    mean, lowest, highest = form(figure.mean), form(figure.lowest), form(figure.highest)
    return mean if lowest == highest else f"{mean} ({lowest} to {highest})"


def _and(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
