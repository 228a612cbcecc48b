"""The order of runs and what becomes of them, with a program in train.py's place that takes a moment."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import run_process
from sweeping import trials
from sweeping.planned import planned
from sweeping.progress import Progress
from sweeping.slots import Slot
from sweeping.space import space
from sweeping.study import Study
from sweeping.trials import Job, Trial, Trials, begun

PROGRAM = """
import json, os, signal, sys, time
from pathlib import Path
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
folder = Path(flags["--out"], flags["--name"], "version_0")
folder.mkdir(parents=True)
Path(flags["--out"], "order").open("a").write(flags["--name"] + "\\n")
{what}
accuracy = 0.5 + int(flags["--seed"]) / 10
(folder / "metrics.json").write_text(json.dumps({{"val/acc": accuracy, "perf/fit_seconds": 1.0}}))
"""
REST = ["--data.source", "synthetic", "--accelerator", "cpu", "--batch_size", "16"]


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Study]:
    """Tries a grid, with so many runs at the same time."""

    def carry_out(what: str, search: list[str], parallel: int = 1, prunes: bool = False) -> Study:
        monkeypatch.setattr(run_process, "TRAIN", ("-I", "-S", "-c", PROGRAM.format(what=what)))
        monkeypatch.setattr(trials, "run_steps", lambda config: 10)
        searched = space(search)
        study = Study(tmp_path, {}, searched, set(), "val/acc", "grid", 0, seed=0)
        plan = partial(planned, searched, rest=REST, metric="val/acc")
        with Progress(study.left * len(searched.seeds)) as progress:
            Trials(tmp_path, study, plan, [Slot()] * parallel, "val/acc", prunes, progress).carry_out()
        return study

    return carry_out


def test_a_setting_has_the_mean_of_its_seeds(sweep: Callable[..., Study], tmp_path: Path) -> None:
    (result,) = sweep("", ["optimizer.lr=0.1", "seed=0,2"], parallel=2).results()
    assert (result.state, [run.value for run in result.runs], result.mean) == ("finished", [0.5, 0.7], 0.6)
    assert result.deviation == pytest.approx(0.02**0.5)
    assert result.runs[0].folder == str(tmp_path / "optimizer.lr_0.1-seed_0" / "version_0")


def test_a_failed_setting_is_told_and_tried_again(
    sweep: Callable[..., Study], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    search = ["optimizer.lr=0.1,0.2", "seed=0,1"]
    fails = "if flags['--optimizer.lr'] == '0.1': sys.exit('error: out of memory')"
    failed, finished = sweep(fails, search).results()
    assert (failed.state, failed.error) == ("failed", "seed 0: out of memory")
    assert (finished.state, finished.mean) == ("finished", 0.55)
    names = [f"optimizer.lr_{lr}-seed_{seed}" for lr, seed in (("0.1", 0), ("0.2", 0), ("0.2", 1))]
    assert (tmp_path / "order").read_text().split() == names  # its second seed is left out, the next one goes on
    assert "[2/4] optimizer.lr 0.1, seed 1: left out" in capfd.readouterr().err

    (tmp_path / "order").unlink()
    assert {result.state for result in sweep("", search).results()} == {"finished"}
    assert (tmp_path / "order").read_text().split() == ["optimizer.lr_0.1-seed_0", "optimizer.lr_0.1-seed_1"]


def test_a_setting_that_cannot_be_trained_has_failed(sweep: Callable[..., Study]) -> None:
    """Of many settings not every combination is checked before."""
    failed, finished = sweep("", ["accumulate=3,2", "seed=0"]).results()
    assert (failed.state, finished.state) == ("failed", "finished")
    assert "accumulate 3 gives no whole micro-batch" in failed.error


def test_a_run_without_the_metric_has_failed(sweep: Callable[..., Study]) -> None:
    nothing = "(folder / 'metrics.json').write_text('{}'); sys.exit()"
    (result,) = sweep(nothing, ["optimizer.lr=0.1", "seed=0"]).results()
    assert (result.state, result.error) == ("failed", "it has no val/acc")


def test_a_setting_behind_is_ended_with_all_its_seeds(
    sweep: Callable[..., Study], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "PRUNING_SECONDS", 0.0)
    monkeypatch.setattr(Study, "prunes", lambda self, number, values: number == 1)
    slow = "if flags['--optimizer.lr'] == '0.2': time.sleep(60)"
    began = time.monotonic()
    results = sweep(slow, ["optimizer.lr=0.1,0.2", "seed=0,1,2"], parallel=2, prunes=True).results()
    assert [result.state for result in results] == ["finished", "pruned"]
    assert time.monotonic() - began < 50


def test_ctrl_c_ends_the_runs_and_keeps_what_has_finished(
    sweep: Callable[..., Study], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupt(self: Progress, going: list[Any]) -> None:
        if going and going[0][0].startswith("optimizer.lr 0.2") and (tmp_path / "order").read_text().count("\n") == 2:
            raise KeyboardInterrupt

    search = ["optimizer.lr=0.1,0.2", "seed=0"]
    with monkeypatch.context() as patch:
        patch.setattr(Progress, "show", interrupt)
        with pytest.raises(KeyboardInterrupt):
            sweep("if flags['--optimizer.lr'] == '0.2': time.sleep(60)", search)
    assert not (tmp_path / "optimizer.lr_0.2-seed_0" / "version_0" / "metrics.json").exists()
    assert [result.state for result in sweep("", search).results()] == ["finished", "finished"]
    names = (tmp_path / "order").read_text().split()
    assert names == ["optimizer.lr_0.1-seed_0", *["optimizer.lr_0.2-seed_0"] * 2]


@pytest.mark.parametrize(
    ("more", "metric", "goes_on"),
    [
        ("", "train/loss", True),
        ("", "perf/fit_seconds", False),
        ("--strategy deepspeed_stage_3_offload_nvme --nvme_path /tmp", "train/loss", False),
    ],
)
def test_what_cannot_go_on_begins_anew(
    more: str, metric: str, goes_on: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its --resume would be refused, or its figure be that of its last part."""
    monkeypatch.setattr("checks.here.check_nvme", lambda path: None)
    searched = space(["optimizer.lr=0.1"])
    (run,) = planned(searched, 0, {"optimizer.lr": "0.1"}, [*REST, *more.split()], metric)
    cut_off = tmp_path / run.name / "version_0"
    (cut_off / "checkpoints").mkdir(parents=True)
    (cut_off / "checkpoints" / "last.ckpt").touch()
    made = Trials(tmp_path, None, None, [], metric, False, None)  # pyright: ignore[reportArgumentType]
    found = made._begun(Job(Trial(0, {}, 1), run, True))
    assert found == ([], ["--resume", str(cut_off)] if goes_on else [])
    assert cut_off.exists() == goes_on


def test_what_there_is_of_a_run(tmp_path: Path) -> None:
    assert begun(tmp_path, "a") == ([], [])
    for version in range(3):
        (tmp_path / "a" / f"version_{version}" / "checkpoints").mkdir(parents=True)
    saved = tmp_path / "a" / "version_1"
    (saved / "checkpoints" / "last.ckpt").touch()
    assert begun(tmp_path, "a") == ([], ["--resume", str(saved)])
    assert [folder.name for folder in sorted((tmp_path / "a").iterdir())] == ["version_0", "version_1"]
    (saved / "metrics.json").write_text(json.dumps({}))
    assert begun(tmp_path, "a") == ([tmp_path / "a" / "version_0", saved], [])
