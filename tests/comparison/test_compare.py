"""Tests which command lines `cifar-zero compare` refuses, and what it reports if something failed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from cifar_zero.comparison import compare, own_module
from cifar_zero.core.errors import RunError, UsageError
from tests.comparison.made_up import made_up
from tests.support.helpers import ROOT

pytestmark = pytest.mark.usefixtures("signal_handlers")

USERS_CODE = ROOT / "tests" / "users_code"
SMALL = "--data.source synthetic --accelerator cpu --batch_size 16"
TWO = f"--strategies baseline ddp --devices 1 {SMALL}"


def run(monkeypatch: pytest.MonkeyPatch, *flags: str) -> int:
    monkeypatch.setattr("sys.argv", ["compare", *flags])
    return compare.main()


def test_a_full_disk_ends_with_the_folder_of_the_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device", "a.log")

    monkeypatch.setattr(compare, "train_variants", full)
    monkeypatch.setattr(compare, "prepare", lambda planned: None)
    with pytest.raises(RunError, match=r"No space left on device \(a.log\); the runs are in"):
        run(monkeypatch, *TWO.split(), "--out", str(tmp_path))


MODULE = f"--module {USERS_CODE / 'own_code.py'}:Digits --datamodule {USERS_CODE / 'own_code.py'}:DigitsData"
RESUMED = f"{MODULE} --strategies deepspeed_stage_2 --devices 2 --accumulate 4 --max_steps 6 --resume_at"
SCRIPT = f"--script {USERS_CODE / 'scripts' / 'old_train.py'}"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (f"{TWO} --min_accuracy 50", "--min_accuracy 50: give a share from 0 to 1, such"),
        (f"{TWO} --against before", "--against works only with --acceptance or --module"),
        (f"{TWO} --quick", "--quick works only with --acceptance"),
        (f"{TWO} --datamodule data.py:Data", "--datamodule works only with --module"),
        (f"{TWO} --resume_under deepspeed_stage_3", "--resume_under works only with --resume_at: add --resume_at"),
        (f"{TWO} --rename a=b", "--rename works only with --script"),
        (f"{TWO} --resume last", "leave out --resume"),
        (f"{TWO} --tensor_parallel_size 2", "works only with fsdp2, fsdp, tensor_parallel"),
        (f"--strategies baseline {SMALL}", "nothing to compare"),
        (f"--strategies baseline ddq {SMALL}", "unknown strategy 'ddq'"),
        (f"--strategies ddp ddp {SMALL}", "two variants would share a folder"),
        (f"--strategies baseline deepspeed_stage_3_superoffload {SMALL}", "needs a CUDA GPU"),
        (f"--devices 1 3 {SMALL}", "no whole micro-batch"),
        (f"{TWO} --trainer.limit_train_batch 5", "--trainer.limit_train_batch is not an option of Lightning's Trainer"),
        ("--acceptance --min_accuracy 0.5", "--min_accuracy does not work with --acceptance"),
        (f"--acceptance --save_baseline {__file__}/before", f"before cannot be written: {__file__} is not a directory"),
        ("--acceptance --max_steps 5", "--acceptance defines the cases itself: leave out --max_steps 5"),
        ("--acceptance --strategies deepspeed_stage_9 ddp", "deepspeed_stage_9"),
        ("--acceptance --strategies nowhere.json", "nowhere.json cannot be read"),
        ("--acceptance --strategies auto", "--strategies auto cannot be compared: name the strategy that cifar-zero"),
        ("--acceptance --fuzz 3 --quick", "--fuzz draws strategies and recipes at random: leave out --strategies"),
        (MODULE.split(" --datamodule")[0], "no train_dataloader: name its data with --datamodule FILE.py:NAME"),
        (f"{MODULE} --module.lr fast", "--module.lr: expected float, not fast"),
        (f"{MODULE} --module.foo 3", "choose from lr, "),
        ("--acceptance --strategies pipeline --devices 2", "pipeline: no case can be trained on 2 ranks: "),
        (f"{MODULE} --batch_size 4", "--batch_size does not work with --module"),
        (f"{MODULE} --strategies pipeline", "splits only the built-in vit_* models"),
        (f"{RESUMED} 6", "--resume_at 6 must be from 1 to 5"),
        (f"{RESUMED} 3 --resume_devices 3", "--resume_devices 3 does not divide the micro-batches of a step"),
        (f"{RESUMED} 3 --resume_under deepspeed_stage_7", "deepspeed_stage_7"),
        (f"{RESUMED} 3 --resume_under deepspeed_stage_3_offload_nvme", "deepspeed_stage_3_offload_nvme"),
        (f"{SCRIPT} --acceptance", "--acceptance does not work with --script: leave it out"),
        (f"{SCRIPT} --seeds 2", "--seeds does not work with --script: leave it out"),
        (f"{MODULE} --steps 5", "--steps works only with --script: add --script"),
        (f"{SCRIPT} --own_data", "--own_data works only with --module"),
        (f"{SCRIPT} --rename a", "--rename a: give OLD=NEW"),
        ("--runs one two --junit .", "is a directory"),
        ("--runs one two --devices 2", "--devices does not work with --runs: leave it out"),
        ("--runs one one", "give each run once"),
        ("--runs one three", "belong to one variant"),
    ],
)
def test_a_mistake_is_refused_before_anything_is_trained(
    flags: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "load", lambda run: made_up(folder=str(run), seed=len(str(run))))
    for module, function in ((own_module, "train_cases"), (compare, "train_variants")):
        monkeypatch.setattr(module, function, lambda *arguments, **options: pytest.fail("it was trained"))
    with pytest.raises(UsageError, match=re.escape(expected)):
        run(monkeypatch, *flags.split())


def test_a_launcher_of_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="start it once"):
        run(monkeypatch, *TWO.split())


def test_the_verdicts_are_kept_if_the_report_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any) -> None:
        raise OSError("no fonts")

    monkeypatch.setattr(compare, "load", lambda run: made_up(strategy=str(run), folder=str(run)))
    monkeypatch.setattr("cifar_zero.comparison.finished_runs._weights", lambda *arguments: {})
    monkeypatch.setattr("cifar_zero.comparison.page.write_page", broken)
    with pytest.raises(OSError, match="no fonts"):
        run(monkeypatch, "--runs", "baseline", "ddp", "--out", str(tmp_path), "--junit", str(tmp_path / "compare.xml"))
    assert "bit-identical" in capsys.readouterr().out
    assert (tmp_path / "compare.xml").is_file()
    assert (tmp_path / "runs" / "version_0" / "comparison.json").is_file()
