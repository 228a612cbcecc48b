"""Shows a file of `python -m benchmarks.releases` in two files in the current folder: releases.png, with one square for
each release and strategy, and the page releases.html, with each case: `python docs/releases.py [FILE]`."""

import io
import json
import math
import sys
from html import escape
from pathlib import Path
from typing import Any

from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

RESULTS = Path(__file__).parents[1] / "benchmarks/results/audited_releases.json"

COLORS = {"correct": "#4caf50", "not judged": "#f2c94c", "does not run": "#bdbdbd", "wrong": "#d32f2f"}
"""The verdicts, the worst last, with their colours."""

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>Releases of DeepSpeed</title>
<style>
body { font: 16px sans-serif; margin: 2em } svg { max-width: 100%; height: auto }
th { font-weight: normal; text-align: left; padding: .2em .6em } td { text-align: right; padding: .2em .6em }
</style>
<h1>Releases of DeepSpeed under stepcheck accept</h1>
<p>A number is the largest error of a case, as a share of the tolerance. Errors above 1 are reported.</p>
"""

Releases = dict[str, dict[str, Any]]  # the content of results.json, which benchmarks/releases.py describes


def main() -> None:
    results: Releases = json.loads(Path(sys.argv[1] if sys.argv[1:] else RESULTS).read_text())
    squares(results).savefig("releases.png", bbox_inches="tight", dpi=100)
    sections = [section(release, results[release]) for release in reversed(results)]
    Path("releases.html").write_text(PAGE + svg(squares(results)) + svg(curves(results)) + "".join(sections))


def squares(results: Releases) -> Figure:
    """Draws one square for each release and strategy, in the colour of its worst case."""
    strategies, verdicts = strategies_of(results), list(COLORS)
    worst = [
        [max(verdicts.index(case["verdict"]) for case in each["cases"][name].values()) for each in results.values()]
        for name in strategies
    ]
    figure = Figure(figsize=(14, 3.6))
    axes = figure.subplots()
    colors = ListedColormap(list(COLORS.values()))
    axes.pcolormesh(worst, cmap=colors, vmin=0, vmax=len(COLORS), edgecolor="w", linewidth=3)
    axes.invert_yaxis()
    axes.set_aspect("equal")
    axes.set_xticks([index + 0.5 for index in range(len(results))], list(results), rotation=45, ha="right")
    axes.set_yticks([index + 0.5 for index in range(len(strategies))], [label(name) for name in strategies])
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    patches = [Rectangle((0, 0), 1, 1, color=color, label=verdict) for verdict, color in COLORS.items()]
    figure.legend(handles=patches, loc="upper center", ncols=len(COLORS), frameon=False)
    return figure


def curves(results: Releases) -> Figure:
    """Draws the largest share of a tolerance in each release, one curve for each strategy."""
    figure = Figure(figsize=(14, 4))
    axes = figure.subplots()
    for name in strategies_of(results):
        shares = [[case["share"] for case in each["cases"][name].values()] for each in results.values()]
        largest = [max((share for share in each if share is not None), default=math.nan) for each in shares]
        axes.plot(list(results), largest, "o-", label=label(name))
    axes.axhline(1, color="black", linestyle="dashed")
    axes.set_yscale("log")
    axes.set_ylabel("largest share of a tolerance")
    axes.tick_params("x", rotation=45)
    axes.legend()
    return figure


def section(release: str, result: dict[str, Any]) -> str:
    """Returns a release's table of strategies and cases as HTML, and the first fault of each case that has one."""
    rows = dict.fromkeys(row for cases in result["cases"].values() for row in cases)
    table, faults = f"<tr><th><th>{'<th>'.join(map(escape, rows))}", ""
    for strategy, cases in result["cases"].items():
        table += f"<tr><th>{escape(label(strategy))}"
        for row in rows:
            case = cases.get(row, {"verdict": "", "share": None, "fault": ""})  # some strategies have no such case
            share = "" if case["share"] is None else f"{case['share']:.2g}"
            table += f'<td style="background: {COLORS.get(case["verdict"], "")}">{share}'
            if case["fault"]:
                faults += f"<li>{escape(label(strategy))}, {escape(row)}: {escape(case['fault'])}"
    measured = f"{result['date']}: {', '.join(f'{name} {value}' for name, value in result['machine'].items())}"
    return f"<h2>{escape(release)}</h2><p>{escape(measured)}<table>{table}</table><ul>{faults}</ul>"


def strategies_of(results: Releases) -> list[str]:
    return list(next(iter(results.values()))["cases"])


def label(strategy: str) -> str:
    return strategy.replace("deepspeed_stage_", "ZeRO ").replace("_", " ")


def svg(figure: Figure) -> str:
    """Returns a figure as an element of HTML."""
    file = io.StringIO()
    figure.savefig(file, format="svg", bbox_inches="tight")
    return file.getvalue()[file.getvalue().index("<svg") :]


if __name__ == "__main__":
    main()
