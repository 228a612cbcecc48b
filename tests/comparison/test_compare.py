"""cifar-zero compare's own part: what it refuses, and what it reports if something failed."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from cifar_zero.comparison import compare
from cifar_zero.comparison.trainings import Planned, plan, prepare
from cifar_zero.core.errors import RunError, UsageError
from tests.comparison.made_up import made_up

pytestmark = pytest.mark.usefixtures("signal_handlers")

SMALL = ["--data.source", "synthetic", "--accelerator", "cpu", "--batch_size", "16"]


@pytest.fixture
def planned() -> list[Planned]:
    return plan(["baseline", "ddp"], ["1"], [], 1, SMALL)


def test_a_full_disk_ends_with_the_folder_of_the_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device", "a.log")

    monkeypatch.setattr(compare, "train_all", full)
    monkeypatch.setattr(compare, "prepare", lambda planned: None)
    arguments = Namespace(
        strategies=["baseline", "ddp"],
        devices=["1"],
        accumulate=None,
        seeds=None,
        launcher="",
        trust=False,
        out=str(tmp_path),
        name="n",
    )
    with pytest.raises(RunError, match=r"No space left on device \(a.log\); the runs are in"):
        compare.of_trainings(arguments, SMALL)


def test_every_variant_is_checked_before_the_first_is_trained(planned: list[Planned]) -> None:
    planned[1].run.recipe.trainer["limit_train_batch"] = 5
    with pytest.raises(UsageError, match=r"--trainer.limit_train_batch is not an option .* limit_train_batches"):
        prepare(planned)


def run(monkeypatch: pytest.MonkeyPatch, *flags: str) -> int:
    monkeypatch.setattr("sys.argv", ["compare", *flags])
    return compare.main()


def test_a_launcher_of_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="start it once"):
        run(monkeypatch, "--strategies", "baseline", "ddp")


def test_a_minimum_of_the_accuracy_is_a_share_of_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="--min_accuracy 50: give a share from 0 to 1, such"):
        run(monkeypatch, "--strategies", "baseline", "ddp", "--min_accuracy", "50")
    with pytest.raises(UsageError, match="leave it out with --acceptance"):
        run(monkeypatch, "--acceptance", "--min_accuracy", "0.5")


def test_a_directory_as_junit_file_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a directory"):
        run(monkeypatch, "--runs", "one", "two", "--junit", str(tmp_path))
    with pytest.raises(UsageError, match="one"):  # that it is no run: --out is made later, and the file may be in it
        run(monkeypatch, "--runs", "one", "two", "--out", str(tmp_path / "new"), "--junit", str(tmp_path / "new" / "x"))


def test_runs_of_one_variant_or_given_twice_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "load", lambda run: made_up(folder=str(run), seed=len(str(run))))
    with pytest.raises(UsageError, match="give each run once"):
        run(monkeypatch, "--runs", "one", "one")
    with pytest.raises(UsageError, match="of the same variant"):
        run(monkeypatch, "--runs", "one", "three")


def test_the_verdicts_are_kept_if_the_report_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any) -> None:
        raise OSError("no fonts")

    monkeypatch.setattr(compare, "load", lambda run: made_up(strategy=str(run), folder=str(run)))
    monkeypatch.setattr("cifar_zero.comparison.verdicts._weights", lambda *arguments: {})
    monkeypatch.setattr("cifar_zero.comparison.page.write_page", broken)
    with pytest.raises(OSError, match="no fonts"):
        run(monkeypatch, "--runs", "baseline", "ddp", "--out", str(tmp_path), "--junit", str(tmp_path / "compare.xml"))
    assert "bit-identical" in capsys.readouterr().out
    assert (tmp_path / "compare.xml").is_file()
    assert (tmp_path / "runs" / "version_0" / "comparison.json").is_file()
