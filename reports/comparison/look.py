"""How the figures look: a colour for each variant, the same in all of them, on a light and on a dark page."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from comparison.result import Comparison

PALETTE = ("#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6", "#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd")
"""Ten colours that the colour-blind tell apart, too: Petroff 2021 (https://arxiv.org/abs/2107.02270), matplotlib's
style petroff10."""

MARKERS = ("", "o", "s", "^")
"""On the curves of the first ten variants, the next ten and so on."""

WIDTH = 10.0
"""Inches of every figure, so that their texts have one size on the page."""

ROW = 0.34
"""Inches of a variant in a figure that has them below one another."""

DIVERGING = ("RdBu", "berlin_r")
"""Colours from below the reference, red, to above it, blue; no difference is near the colour of the page."""

KEY_WIDTH, LETTER_WIDTH = 0.65, 0.078
"""Inches of a legend's entry without its text, and of a letter of 9 points."""

_INK, _PAPER = ("#1c1f23", "#e3e6ea"), ("#ffffff", "#16191d")
"""Of text and of the page, light and dark; report.html has the same."""


def theme(dark: bool) -> AbstractContextManager[None]:
    """Within it figures are made for a dark page, or for a light one."""
    ink, paper = _INK[dark], _PAPER[dark]
    inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "axes.titlecolor", "xtick.color", "ytick.color")
    return matplotlib.rc_context(
        {
            **dict.fromkeys(inked, ink),
            **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), paper),
            "font.size": 9,
            "axes.titlesize": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "grid.alpha": 0.15,
            "grid.color": ink,
            "text.parse_math": False,  # a $ in a name is a $
            "image.cmap": DIVERGING[dark],
            "hatch.linewidth": 0.7,
        }
    )


def colors(comparison: Comparison) -> dict[str, str]:
    """Of each variant, by name; the reference has that of the text."""
    others = [variant.name for variant in comparison.variants if variant.name != comparison.reference]
    found = {name: PALETTE[place % len(PALETTE)] for place, name in enumerate(others)}
    return {comparison.reference: matplotlib.rcParams["text.color"], **found}


def markers(comparison: Comparison) -> dict[str, str]:
    """Of each variant's curve, by name: they tell apart those of one colour."""
    others = [variant.name for variant in comparison.variants if variant.name != comparison.reference]
    found = {name: MARKERS[place // len(PALETTE) % len(MARKERS)] for place, name in enumerate(others)}
    return {comparison.reference: "", **found}


def log_scale(axes: Axes) -> None:
    """Of the ordinates, with 1e-05 and the like at the ticks: matplotlib's own are formulas, which the theme lacks."""
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(LogFormatter())
    axes.yaxis.set_minor_formatter(LogFormatter())


def name_rows(axes: Axes, comparison: Comparison) -> None:
    """Writes the variants' names below one another, the first on top."""
    names = [variant.name for variant in comparison.variants]
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)


def legend(figure: Figure, handles: Sequence[Artist], labels: Sequence[str]) -> None:
    """Below the figure, in as many columns as there is room for."""
    widest = KEY_WIDTH + LETTER_WIDTH * max(map(len, labels), default=0)
    columns = max(1, min(4, int(WIDTH / widest)))
    figure.legend(list(handles), list(labels), loc="outside lower center", ncols=columns, frameon=False)
