"""What a comparison prints and writes: the console, comparison.json, JUnit, and the tables of the page; no torch."""

import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from cifar_zero.comparison.result import Comparison, Spread
from cifar_zero.core.atomic import write_json
from cifar_zero.core.console import curves
from cifar_zero.training.results import IN_EFFECT

SCHEMA = 2  # version of comparison.json: keys may be added, but none changes its meaning

NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 forbids, such as the control characters of colours in a log."""

MISSING = "-"  # text for an unknown number


class Cell(NamedTuple):
    """One cell of a table."""

    text: str
    bar: float = 0.0  # length of the bar behind the text, from 0 to 1


Columns = dict[str, list[Cell]]  # A table: the cells of each column by its title, in the order of the variants


def number(value: float) -> str:
    """Returns three significant digits, with a thousands separator: 0.0123, 1.23, 4,329."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"


def percent(share: float) -> str:
    """Returns a share from 0 to 1 in percent; the sign is in the column's title."""
    return f"{100 * share:.2f}"


def size(count: float) -> str:
    """Returns bytes in a suitable unit."""
    return decimal(round(count), precision=2)


Form = Callable[[float], str]
Figures = dict[str, tuple[str, Form]]  # Columns: title -> key of `Variant.figures` and format of its values

ACCURACY: Figures = {
    "test accuracy (%)": ("test/acc", percent),
    "test loss": ("test/loss", "{:.4f}".format),
    "validation accuracy (%)": ("val/acc", percent),
    "training loss, last interval": ("train/loss", "{:.4f}".format),
}
SPEED: Figures = {
    "images/s": ("perf/images_per_second", number),
    "step (ms)": ("perf/step_time_ms", number),
    "start to first step (s)": ("perf/seconds_to_first_step", number),
    "training (s)": ("perf/fit_seconds", number),
}
MEMORY: Figures = {
    "parameters": ("mem/parameter_rank_bytes", size),
    "gradients": ("mem/gradient_rank_bytes", size),
    "optimizer": ("mem/optimizer_rank_bytes", size),
    "model states": ("mem/model_state_rank_bytes", size),
    "predicted by ZeRO's formulas": ("predicted_bytes", size),
    "peak": ("mem/peak_rank_bytes", size),
    "checkpoint": ("checkpoint_bytes", size),
}
ON_THE_CONSOLE: Figures = {title: SPEED[title] for title in ("images/s", "step (ms)")}
ON_THE_CONSOLE |= {"memory": MEMORY["peak"], "accuracy (%)": ACCURACY["test accuracy (%)"]}


def figures(comparison: Comparison, columns: Figures) -> Columns:
    """Returns the figures over the seeds, without columns that no variant has; the bars show the means."""
    table: Columns = {}
    for title, (key, form) in columns.items():
        found = [variant.figures.get(key) for variant in comparison.variants]
        longest = max((each.mean for each in found if each), default=math.nan)
        bars = [each.mean / longest if each and longest > 0 else 0.0 for each in found]
        if any(found):
            table[title] = [Cell(spread(each, form), bar) for each, bar in zip(found, bars, strict=True)]
    return table


def settings(comparison: Comparison) -> Columns:
    """Returns the settings actually in effect."""
    table: Columns = {}
    for key in IN_EFFECT:
        found = [dict.fromkeys(run.metrics.get(key) for run in variant.runs) for variant in comparison.variants]
        texts = [", ".join(MISSING if value is None else str(value) for value in values) for values in found]
        table[key.replace("_", " ")] = [Cell(text) for text in texts]
    return table


def on_memory(comparison: Comparison) -> str:
    """Returns why ZeRO 3 may hold as many bytes of parameters as the reference, and what the peak of a CPU rank is."""
    key, whole = "mem/parameter_rank_bytes", comparison.variants[0].figures
    names, threshold = [], 0
    for variant in comparison.variants if key in whole else ():
        zero = variant.runs[0].deepspeed.get("zero_optimization", {}) if variant.runs else {}
        if zero.get("stage") == 3 and variant.world_size > 1 and variant.figures[key].mean >= whole[key].mean:
            names, threshold = [*names, variant.name], zero["param_persistence_threshold"]
    why = (
        f"Under {' and '.join(names)} each rank holds all parameters: ZeRO 3 shards only those of more than "
        f"{threshold:,} elements, and this model has none (--zero.param_persistence_threshold 0 shards all)."
    )
    remarks = [why] if names else []
    if any(run.metrics.get("accelerator") == "cpu" for variant in comparison.variants for run in variant.runs):
        remarks.append("On a CPU the peak is that of the whole process, most of it PyTorch itself.")
    return " ".join(remarks)


def spread(figure: Spread | None, form: Form) -> str:
    """Returns a mean, and if the seeds differ, the lowest and the highest value in brackets."""
    if figure is None:
        return MISSING
    mean, lowest, highest = form(figure.mean), form(figure.lowest), form(figure.highest)
    return mean if lowest == highest else f"{mean} ({lowest} to {highest})"


def show(comparison: Comparison, folder: Path, by_strategy: bool) -> None:
    """Prints the differing settings, the verdicts, and where the report is (`folder`). `by_strategy`: of the many cases
    of an acceptance, a row for each strategy, and each case that did not pass."""
    console = Console(highlight=False, width=None if Console().is_terminal else 160)
    for difference in comparison.differences:
        console.print(f"[bold]not the same: {escape(difference.setting)}[/] {escape(str(difference))}", soft_wrap=True)
    console.print(_table_by_strategy(comparison) if by_strategy else _table(comparison))
    lines = [f"[bold]{escape(comparison.headline)}[/]", *map(escape, comparison.notes)]
    if by_strategy:
        failed = [each for each in comparison.variants if not each.passed]
        lines = [*(f"[red]{escape(each.name)}[/]: {escape(each.outcome)}" for each in failed), *lines]
    for line in lines:
        console.print(line, soft_wrap=True)
    console.print(f"[dim]report  [/]{escape(str(folder / 'report.html'))}", soft_wrap=True)
    if any(folder.glob("*/version_*/events.out.tfevents.*")):  # not with --runs
        from torch.utils.tensorboard import SummaryWriter

        rows = "\n".join(f"| {variant.name} | {variant.outcome} |" for variant in comparison.variants)
        table = f"| variant | verdict |\n|---|---|\n{rows}"
        with SummaryWriter(str(folder)) as writer:
            writer.add_text("comparison", f"`{comparison.command}`\n\n**{comparison.headline}**\n\n{table}")
        console.print(f"[dim]curves  [/]{escape(curves(folder))}", soft_wrap=True)


def _table(comparison: Comparison) -> Table:
    found = figures(comparison, ON_THE_CONSOLE)
    table = Table("variant", "verdict", *found)
    for place, variant in enumerate(comparison.variants):
        style = "green" if variant.passed else "red"
        cells = [cells[place].text for cells in found.values()]
        table.add_row(escape(variant.name), f"[{style}]{escape(variant.outcome)}[/]", *cells)
    return table


def _table_by_strategy(comparison: Comparison) -> Table:
    kinds = ("bit-identical", "within rounding")
    table = Table("strategy", "cases", *kinds, "failed", "values judged", "most of a bound used")
    for strategy in dict.fromkeys(variant.strategy for variant in comparison.variants):
        variants = [variant for variant in comparison.variants if variant.strategy == strategy]
        counts = [sum(variant.kind == kind for variant in variants) for kind in kinds]
        failed = len(variants) - sum(counts)
        judged = min((variant.check.get("judged", 0.0) for variant in variants), default=0.0)
        used = max((variant.check.get("used") or 0.0 for variant in variants), default=0.0)
        style = "red" if failed else "green"
        cells = [*map(str, counts), f"[{style}]{failed}[/]", f"{judged:.1%}", f"{used:.1%}"]
        table.add_row(strategy, str(len(variants)), *cells)
    return table


def write_comparison(comparison: Comparison, file: Path) -> None:
    """Writes comparison.json atomically; NaN and infinity become null."""
    write_json(file, {"schema": SCHEMA, "passed": comparison.passed, **asdict(comparison)})


def write_junit(comparison: Comparison, file: Path) -> None:
    """Writes a test suite for CI systems (format: https://github.com/testmoapp/junitxml) with a test case per
    variant; one that did not train or agree is a failure."""
    failures = sum(not variant.passed for variant in comparison.variants)
    counts = {"tests": str(len(comparison.variants)), "failures": str(failures), "errors": "0"}
    about = {"name": comparison.title, "timestamp": comparison.created.removesuffix("Z")}
    root = ET.Element("testsuites")
    suite = ET.SubElement(root, "testsuite", about | counts)
    for variant in comparison.variants:
        seconds = variant.seconds + sum(run.metrics.get("perf/fit_seconds") or 0.0 for run in variant.runs)
        case = ET.SubElement(suite, "testcase", classname="compare", name=variant.name, time=f"{seconds:.3f}")
        if variant.passed:
            ET.SubElement(case, "system-out").text = variant.outcome
        else:
            lines = [variant.outcome, f"again: {variant.command}"]
            ET.SubElement(case, "failure", message=variant.outcome).text = "\n".join(lines)
    ET.indent(root)
    text = ET.tostring(root, encoding="utf-8", xml_declaration=True).decode()
    file.write_text(NOT_IN_XML.sub("", text), encoding="utf-8")
