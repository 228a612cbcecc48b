"""The number of steps that a schedule is drawn for is the one that it is trained with."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

import build
import checks
import cli
import train
from errors import UsageError
from run_steps import prepare, run_steps
from schedules import Cosine


@pytest.mark.parametrize(
    "flags",
    [
        "--batch_size 30 --epochs 3",
        "--batch_size 30 --accumulate 3 --epochs 2",
        "--batch_size 16 --epochs 2 --max_steps 50",
        "--batch_size 16 --epochs 3 --trainer.limit_train_batches 5 --accumulate 2",
        "--batch_size 16 --epochs 3 --trainer.limit_train_batches 0.5",
        "--batch_size 16 --epochs 7 --trainer.overfit_batches 1",
    ],
)
def test_is_lightnings(flags: str, small_data: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    config = cli.parse([*small_data, *shlex.split(flags), "--schedule", "cosine", "--accelerator", "cpu"])
    checks.settle(config)
    config.logger, config.trainer = ["none"], {**config.trainer, "limit_val_batches": 0}
    module, trainer = build.module(config), build.trainer(config, None)
    trainer.fit_loop.max_epochs, epochs = 0, trainer.max_epochs  # all of a fit but its steps

    def configure_optimizers(theirs=module.configure_optimizers):
        trainer.fit_loop.max_epochs = epochs
        made = theirs()
        trainer.fit_loop.max_epochs = 0
        return made

    monkeypatch.setattr(module, "configure_optimizers", configure_optimizers)
    trainer.fit(module, datamodule=build.datamodule(config))
    assert isinstance(module.schedule, Cosine)
    assert module.schedule.total_steps == run_steps(config) > 0


def test_plot_schedule_draws_and_does_not_train(
    small_data: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["train.py", *small_data, "--schedule", "onecycle", "--plot_schedule"])
    assert train.main() == 0
    assert "schedule.png" in capsys.readouterr().out
    assert (tmp_path / "schedule.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "runs").exists()


def test_what_cannot_be_had_is_found_before_the_run(small_data: list[str]):
    with pytest.raises(UsageError, match=r"--trainer.limit_train_batch is no option .* limit_train_batches"):
        prepare(cli.parse([*small_data, "--trainer.limit_train_batch", "5"]))
