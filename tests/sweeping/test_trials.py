"""The order of runs and their results, with a short program that replaces train.py."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from torch.utils.tensorboard.writer import SummaryWriter

from cifar_zero.core.errors import UsageError
from cifar_zero.core.programs import command
from cifar_zero.sweeping import runs
from cifar_zero.sweeping.report import report, results
from cifar_zero.sweeping.trials import Trials, enqueue, is_grid, open_study, parse

PROGRAM = """
import json, sys, time
from pathlib import Path
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
folder = Path(flags["--out"], flags["--name"], "version_0")
folder.mkdir(parents=True, exist_ok=True)
Path(flags["--out"], "order").open("a").write(flags["--name"] + "\\n")
{what}
accuracy = 0.5 + int(flags.get("--seed", 0)) / 10
(folder / "metrics.json").write_text(json.dumps({{"val/acc": accuracy, "perf/fit_seconds": 1.0}}))
"""

Sweep = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    """Starts the sweep in tmp_path, or starts it again, and returns the result of each setting."""

    def carry_out(
        what: str, search: list[str], parallel: int = 1, prune: bool = False, settings: int = 3, sampler: str = ""
    ) -> list[dict[str, Any]]:
        program = tmp_path / "program.py"
        program.write_text(PROGRAM.format(what=what))
        space = parse(search)
        study = open_study(tmp_path, "", "val/acc")
        to_sample = enqueue(study, space, sampler or ("grid" if is_grid(space) else "tpe"), settings, seed=0)
        trials = Trials(tmp_path, study, space, "val/acc", ["--out", str(tmp_path)], prune, to_sample, str(program))
        trials.train([({}, set())] * parallel)
        return results(study, "val/acc")

    return carry_out


def order(folder: Path) -> list[str]:
    return (folder / "order").read_text().split()


def test_a_setting_has_the_mean_of_its_seeds(sweep: Sweep, tmp_path: Path) -> None:
    (row,) = sweep("", ["optimizer.lr=0.1", "seed=0,2"], parallel=2)
    assert (row["setting"], row["state"], row["mean"]) == ({"optimizer.lr": "0.1"}, "complete", 0.6)
    assert row["standard_deviation"] == pytest.approx(0.02**0.5)
    folders = [str(tmp_path / f"optimizer.lr_0.1-seed_{seed}" / "version_0") for seed in (0, 2)]
    assert [run["folder"] for run in sorted(row["runs"], key=lambda run: run["seed"])] == folders


def test_a_failed_run_is_reported_and_tried_again(sweep: Sweep, tmp_path: Path) -> None:
    search = ["optimizer.lr=0.1,0.2", "seed=0,1"]
    fails = "if flags['--optimizer.lr'] == '0.1' and flags['--seed'] == '0': sys.exit('error: out of memory')"
    finished, failed = sweep(fails, search)
    assert (failed["state"], failed["mean"]) == ("fail", None)
    assert failed["error"] == "optimizer.lr_0.1-seed_0: out of memory"
    assert (finished["state"], finished["mean"]) == ("complete", 0.55)
    assert order(tmp_path) == [f"optimizer.lr_{lr}-seed_{seed}" for lr in ("0.1", "0.2") for seed in (0, 1)]

    (tmp_path / "order").unlink()
    assert [row["state"] for row in sweep("", search)] == ["complete"] * 2
    assert order(tmp_path) == ["optimizer.lr_0.1-seed_0"]


def test_a_run_without_the_metric_has_failed(sweep: Sweep) -> None:
    (row,) = sweep("(folder / 'metrics.json').write_text('{}'); sys.exit()", ["optimizer.lr=0.1"])
    assert row["state"] == "fail"
    assert "it ended without val/acc; val/acc needs an epoch that ends before --max_steps" in row["error"]


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_a_sampled_setting_is_trained_with_each_seed(sweep: Sweep, sampler: str) -> None:
    """A second start samples other settings."""
    search = ["optimizer.lr=1e-4..1e-1:log", "batch_size=16..64:16", "seed=0,1"]
    first = sweep("", search, parallel=2, settings=2, sampler=sampler)
    rows = sweep("", search, settings=3, sampler=sampler)
    assert (len(first), len(rows)) == (2, 3)
    assert all({run["seed"] for run in row["runs"]} == {"0", "1"} for row in rows)
    assert len({row["setting"]["optimizer.lr"] for row in rows}) == 3
    assert all(1e-4 <= row["setting"]["optimizer.lr"] <= 1e-1 for row in rows)
    assert {row["setting"]["batch_size"] for row in rows} <= {16, 32, 48, 64}


def test_a_setting_that_is_drawn_again_is_not_trained_again(sweep: Sweep, tmp_path: Path) -> None:
    """Nor at the same time. It counts as one of the settings, so that the same command adds none."""
    search = ["optimizer.lr=0.1,0.2"]
    for _ in range(2):
        sweep("time.sleep(0.5)", search, parallel=3, settings=6, sampler="random")
        names = order(tmp_path)
        assert len(names) == len({*names})
        assert len(open_study(tmp_path, "", "val/acc").trials) == 6


def test_a_run_behind_the_median_is_pruned(sweep: Sweep, tmp_path: Path) -> None:
    """The median is taken once five runs have finished (Optuna's default)."""
    for number in range(7):
        with SummaryWriter(tmp_path / f"optimizer.lr_{number}" / "version_0") as events:
            events.add_scalar("val/acc", 0.2 if number == 5 else 0.6, 10)
    slow = "time.sleep(3600 if flags['--optimizer.lr'] == '5' else 0.5)"
    rows = sweep(slow, ["optimizer.lr=0,1,2,3,4,5,6"], prune=True)
    assert [row["state"] for row in rows] == ["complete"] * 6 + ["pruned"]
    assert rows[-1]["setting"] == {"optimizer.lr": "5"}


def test_ctrl_c_ends_the_runs_and_keeps_what_has_finished(sweep: Sweep, tmp_path: Path) -> None:
    def press(main: int = threading.get_ident()) -> None:
        while not (tmp_path / "order").exists() or len(order(tmp_path)) < 2:
            time.sleep(0.05)
        signal.pthread_kill(main, signal.SIGINT)

    search = ["optimizer.lr=0.1,0.2,0.3"]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background job ignores
    threading.Thread(target=press, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        sweep("if flags['--optimizer.lr'] == '0.2': time.sleep(3600)", search)
    rows = results(open_study(tmp_path, "", "val/acc"), "val/acc")
    states = {row["setting"]["optimizer.lr"]: row["state"] for row in rows}
    assert states == {"0.1": "complete", "0.2": "fail", "0.3": "waiting"}
    assert [row["state"] for row in sweep("", search)] == ["complete"] * 3
    assert order(tmp_path) == [f"optimizer.lr_{lr}" for lr in ("0.1", "0.2", "0.3", "0.2")]


def test_another_sweep_is_refused(tmp_path: Path) -> None:
    open_study(tmp_path, "one", "val/acc")
    open_study(tmp_path, "one", "val/acc")
    with pytest.raises(UsageError, match="another --search, --metric or recipe: choose another --name"):
        open_study(tmp_path, "another", "val/acc")


def test_the_last_validation_is_read_from_all_folders_of_a_resumed_run(tmp_path: Path) -> None:
    for version, points in enumerate([{10: 0.1, 20: 0.2}, {20: 0.2, 30: 0.3}, {}]):
        with SummaryWriter(tmp_path / "a" / f"version_{version}") as events:
            for step, value in points.items():
                events.add_scalar("val/acc", value, step)
    assert runs.result(tmp_path, "a", "val/acc") is None
    (tmp_path / "a" / "version_2" / "metrics.json").write_text(json.dumps({"perf/fit_seconds": 1.0}))
    result = runs.result(tmp_path, "a", "val/acc")
    assert result is not None
    assert result["value"] == pytest.approx(0.3)


def test_the_report(
    sweep: Sweep, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    titles: list[str] = []
    monkeypatch.setattr(Figure, "suptitle", lambda figure, title: titles.append(title))
    search = ["optimizer.lr=0.1..1.5:log", "model.hidden=[64],[128]", "seed=0,2"]
    sweep("if flags['--model.hidden'] == '[64]': sys.exit('error: no [bold] idea')", search, settings=6, parallel=4)
    study = open_study(tmp_path, "", "val/acc")
    assert report(study, parse(search), "val/acc", ["--epochs", "3"], tmp_path) == 1
    content = json.loads((tmp_path / "sweep.json").read_text())
    setting = content["settings"][0]["setting"]
    best = f"{command('train')} --epochs 3 --optimizer.lr {setting['optimizer.lr']} --model.hidden '[128]'"
    assert content["best_command"] == best
    assert content["settings"][0]["mean"] == 0.6
    assert content["settings"][-1]["state"] == "fail"
    assert (tmp_path / "sweep.png").stat().st_size > 0
    (title,) = titles
    assert title.startswith("val/acc of each run; the best setting: optimizer.lr ")
    assert title.endswith(", model.hidden [128] (mean 0.6)")
    printed = capsys.readouterr().out
    assert f"best    {best}" in printed
    assert "-seed_0: no [bold] idea" in printed
    rows = [[*map(str.strip, line.split("│")[1:-1])] for line in printed.splitlines() if line.startswith("│")]
    assert rows[0] == [f"{setting['optimizer.lr']:.4g}", "[128]", "0.6", "0.1414", "2", "2", "complete"]
    assert rows[-1][1:] == ["[64]", "", "", "0", "0", "fail"]
