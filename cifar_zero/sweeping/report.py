"""The report of a sweep: a table, sweep.json and a plot; no torch."""

import statistics
import sys
from pathlib import Path
from typing import Any

from optuna import Study
from optuna.trial import TrialState
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cifar_zero.core.programs import command
from cifar_zero.reports.summary import curves, write_json
from cifar_zero.sweeping.runs import METRICS, flags_of, shown
from cifar_zero.sweeping.trials import SEED, Space, is_grid, latest, lists, options


def report(study: Study, space: Space, metric: str, rest: list[str], folder: Path) -> int:
    """Prints and writes what became of each setting; returns the exit code: 1 if a run failed."""
    rows = results(study, metric)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    names = [name for name in space if name != SEED]
    table = Table(*map(escape, names), metric, "standard deviation", "runs", "training (s)", "state")
    for row in rows:
        figures = row["mean"], row["standard_deviation"], len(row["runs"]), sum(run["seconds"] for run in row["runs"])
        cells = [*(row["setting"][name] for name in names), *figures, row["state"]]
        table.add_row(*("" if cell is None else escape(shown(cell)) for cell in cells))
    console.print(table)
    for row in (row for row in rows if row["error"]):
        console.print(f"failed: {row['error']}", style="red", markup=False, soft_wrap=True)
    best = ""
    if rows and rows[0]["mean"] is not None:
        best = command("train", *rest, *flags_of(rows[0]["setting"]))
        plot(rows, {name: space[name] for name in names}, metric, folder / "sweep.png")
        print(f"best    {best}\nplot    {folder / 'sweep.png'}")
    if any(row["state"] in ("fail", "waiting") for row in rows):
        print("resume  the same command trains what is interrupted, failed or waiting")
    print(f"curves  {curves(folder)}")
    content = {"schema": 1, "command": command("sweep", *sys.argv[1:]), "metric": metric, "best_command": best}
    write_json(folder / "sweep.json", {**content, "settings": rows})
    return int(any(row["state"] == "fail" for row in rows))


def results(study: Study, metric: str) -> list[dict[str, Any]]:
    """Returns what became of each setting, as sweep.json has it, the best first."""
    settings: dict[str, dict[str, Any]] = {}
    for trial in latest(study):
        setting = {name: value for name, value in options(trial).items() if name != SEED}
        row = settings.setdefault(str(setting), {"setting": setting, "state": "complete", "error": "", "runs": []})
        if trial.state == TrialState.COMPLETE:
            row["runs"].append(trial.user_attrs["run"])
        elif not row["error"]:
            row |= {"state": trial.state.name.lower(), "error": trial.user_attrs.get("error", "")}
    for row in settings.values():
        figures = [run["value"] for run in row["runs"]]
        row["mean"] = statistics.fmean(figures) if row["state"] == "complete" else None
        row["standard_deviation"] = statistics.stdev(figures) if len(figures) > 1 else None
    sign = -1 if METRICS[metric] == "maximize" else 1
    return sorted(settings.values(), key=lambda row: (row["mean"] is None, sign * (row["mean"] or 0)))


def plot(rows: list[dict[str, Any]], space: Space, metric: str, file: Path) -> None:
    """Plots the metric of every run against each option, into a PNG file; a star marks the mean of the best setting."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * max(1, len(space)), 4), layout="constrained")
    best = ", ".join(f"{name} {shown(value)}" for name, value in rows[0]["setting"].items())
    figure.suptitle(f"{metric} of each run; the best setting: {best} (mean {shown(rows[0]['mean'])})")
    panels = figure.subplots(1, max(1, len(space)), squeeze=False, sharey=True)[0]
    for axes, (name, distribution) in zip(panels, space.items(), strict=False):
        if is_grid({name: distribution}):
            axes.xaxis.update_units(lists(space)[name])  # in the order of --search
        elif getattr(distribution, "log", False):
            axes.set_xscale("log")
        dots = [(row["setting"][name], run["value"]) for row in rows for run in row["runs"]]
        axes.plot(*zip(*dots, strict=True), "o", color="C0", alpha=0.6, label="run")
        axes.plot(rows[0]["setting"][name], rows[0]["mean"], "*", color="C3", markersize=14, label="best (mean)")
        axes.set(xlabel=name, ylabel=metric)
        axes.legend()
    figure.savefig(file, dpi=150)
