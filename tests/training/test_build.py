"""The number of steps that a schedule is planned for is the number that the run trains."""

import shlex
from pathlib import Path

import pytest
from lightning.pytorch import Callback

from cifar_module import CIFARModule
from cifar_zero import train
from cifar_zero.config import command_line
from cifar_zero.schedules import Cosine
from cifar_zero.training import build
from cifar_zero.training.instead import run_steps
from cifar_zero.training.resolve import resolve
from datamodule import CIFARDataModule


class Started(Exception):
    """The training has begun."""


class AtStart(Callback):
    """Ends the training before its first step, when Lightning has planned it."""

    def on_train_start(self, *_: object) -> None:
        raise Started


@pytest.mark.parametrize(
    "flags",
    [
        "--batch_size 30 --accumulate 3 --epochs 2",
        "--batch_size 16 --epochs 2 --max_steps 50",
        "--batch_size 16 --epochs 3 --trainer.limit_train_batches 6 --accumulate 2",
        "--batch_size 16 --epochs 3 --trainer.limit_train_batches 0.5",
        "--batch_size 16 --epochs 7 --trainer.overfit_batches 1",
    ],
)
def test_equals_lightnings_number_of_steps(flags: str, small_data: list[str], monkeypatch: pytest.MonkeyPatch):
    for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    run = resolve(
        command_line.parse([*small_data, *shlex.split(flags), "--schedule", "cosine", "--accelerator", "cpu"])
    )
    module = CIFARModule(run, run.num_classes)
    with pytest.raises(Started):
        build.trainer(run, None, [AtStart()]).fit(module, datamodule=CIFARDataModule(run))
    assert isinstance(module.schedule, Cosine)
    assert module.schedule.total_steps == run_steps(run, CIFARDataModule(run)) > 0


def test_plot_schedule_draws_and_does_not_train(small_data: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["train.py", *small_data, "--schedule", "onecycle", "--plot_schedule"])
    assert train.main() == 0
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["schedule.png"]
    assert (tmp_path / "runs" / "schedule.png").read_bytes().startswith(b"\x89PNG")
