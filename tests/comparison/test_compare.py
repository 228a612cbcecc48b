"""Tests which command lines `cifar-zero compare` refuses, and what it reports if something failed."""

from pathlib import Path
from typing import Any

import pytest

from cifar_zero.comparison import compare
from cifar_zero.comparison.result import Variant
from cifar_zero.core.errors import Stopped, UsageError
from tests.comparison.made_up import made_up
from tests.support.helpers import refused

pytestmark = pytest.mark.usefixtures("signal_handlers")

SMALL = "--data.source synthetic --accelerator cpu --batch_size 16"
TWO = f"--strategies baseline ddp --devices 1 {SMALL}"


def run(monkeypatch: pytest.MonkeyPatch, *flags: str) -> int:
    monkeypatch.setattr("sys.argv", ["compare", *flags])
    return compare.main()


@pytest.mark.parametrize(
    ("failing", "error", "said"),
    [
        ("compare.train_variants", OSError(28, "No space left", "a.log"), "No space left: 'a.log'\nthe runs are in"),
        ("compare.train_variants", Stopped(2), "the runs are in"),
        ("finished_runs.summarize", Stopped(2), "the runs are in"),
        ("plot.write_plot", ValueError("no fonts"), "no fonts\nthe runs are in"),
    ],
)
def test_an_error_ends_with_the_folder_of_the_runs(
    failing: str, error: BaseException, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(compare, "train_variants", lambda *_: [Variant("baseline", outcome="not trained")] * 2)
    monkeypatch.setattr(compare, "prepare", lambda planned: None)
    monkeypatch.setattr(f"cifar_zero.comparison.{failing}", fail)
    with pytest.raises((OSError, Stopped, ValueError), match=said):
        run(monkeypatch, *TWO.split(), "--out", str(tmp_path))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (f"{TWO} --min_accuracy 50", "--min_accuracy 50: give a share from 0 to 1, such"),
        (f"{TWO} --resume last", "leave out --resume"),
        (f"{TWO} --num_nodes 2", "leave out --num_nodes, or train the runs with their launcher"),
        (f"{TWO} --tensor_parallel_size 2", "works only with fsdp2, fsdp, tensor_parallel"),
        (f"--strategies baseline {SMALL}", "nothing to compare"),
        (f"--strategies baseline ddq {SMALL}", "unknown strategy 'ddq'"),
        (f"--strategies ddp ddp {SMALL}", "two variants would share a folder"),
        (f"--strategies baseline deepspeed_stage_3_superoffload {SMALL}", "needs a CUDA GPU"),
        (f"--devices 1 3 {SMALL}", "is not a multiple of 3 ranks"),
        (f"{TWO} --trainer.limit_train_batch 5", "--trainer.limit_train_batch is not an option of Lightning's Trainer"),
        (f"{TWO} --junit {__file__}/xml", "xml cannot be written (File exists)"),
        ("--runs one two --junit .", "--junit: . is a folder; give a file"),
        (f"--strategies auto ddp {SMALL}", "--strategies auto cannot be compared: name the strategy"),
        ("--runs one two --max_steps 5", "--runs only reads finished runs: leave out --max_steps 5"),
        ("--runs one two --devices 2", "--devices does not work with --runs: leave it out"),
        ("--runs one one", "give each run once"),
        ("--runs one", "give at least two runs"),
    ],
)
def test_a_mistake_is_refused_before_anything_is_trained(flags: str, expected: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compare, "load_run", lambda run: made_up(folder=str(run)))
    monkeypatch.setattr(compare, "train_variants", lambda *arguments: pytest.fail("it was trained"))
    with refused(expected):
        run(monkeypatch, *flags.split())


def test_a_launcher_of_ranks_is_refused(monkeypatch: pytest.MonkeyPatch):
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="start it once"):
        run(monkeypatch, *TWO.split())


def test_the_verdicts_are_kept_if_the_report_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    def broken(*_: Any) -> None:
        raise OSError("no fonts")

    monkeypatch.setattr(compare, "load_run", lambda run: made_up(strategy=str(run), folder=str(run)))
    monkeypatch.setattr("cifar_zero.comparison.finished_runs._weights", lambda *arguments: {})
    monkeypatch.setattr("cifar_zero.comparison.plot.write_plot", broken)
    with pytest.raises(OSError, match="no fonts"):
        run(monkeypatch, "--runs", "baseline", "ddp", "--out", str(tmp_path), "--junit", str(tmp_path / "compare.xml"))
    assert "bit-identical" in capsys.readouterr().out
    assert (tmp_path / "compare.xml").is_file()
    assert (tmp_path / "runs" / "version_0" / "comparison.json").is_file()
