"""The number of steps that a schedule is planned for is the number that the run trains."""

import shlex
from pathlib import Path

import pytest

from cifar_module import CIFARModule
from cifar_zero import train
from cifar_zero.config import command_line
from cifar_zero.schedules import Cosine
from cifar_zero.training import build
from cifar_zero.training.instead import run_steps
from cifar_zero.training.resolve import resolve
from datamodule import CIFARDataModule


@pytest.mark.parametrize(
    "flags",
    [
        "--batch_size 30 --epochs 3",
        "--batch_size 30 --accumulate 3 --epochs 2",
        "--batch_size 16 --epochs 2 --max_steps 50",
        "--batch_size 16 --epochs 3 --trainer.limit_train_batches 6 --accumulate 2",
        "--batch_size 16 --epochs 3 --trainer.limit_train_batches 0.5",
        "--batch_size 16 --epochs 7 --trainer.overfit_batches 1",
    ],
)
def test_equals_lightnings_number_of_steps(
    flags: str, small_data: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    config = command_line.parse([*small_data, *shlex.split(flags), "--schedule", "cosine", "--accelerator", "cpu"])
    config = config.changed(logger=["none"], trainer={**config.recipe.trainer, "limit_val_batches": 0})
    run = resolve(config)
    module, trainer = CIFARModule(run, run.num_classes), build.trainer(run, None)
    trainer.fit_loop.max_epochs, epochs = 0, trainer.max_epochs  # a whole fit without its steps

    def configure_optimizers(theirs=module.configure_optimizers):
        trainer.fit_loop.max_epochs = epochs
        made = theirs()
        trainer.fit_loop.max_epochs = 0
        return made

    monkeypatch.setattr(module, "configure_optimizers", configure_optimizers)
    trainer.fit(module, datamodule=CIFARDataModule(config))
    assert isinstance(module.schedule, Cosine)
    assert module.schedule.total_steps == run_steps(config, CIFARDataModule(config)) > 0


def test_plot_schedule_draws_and_does_not_train(
    small_data: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["train.py", *small_data, "--schedule", "onecycle", "--plot_schedule"])
    assert train.main() == 0
    assert "plotted in runs/schedule.png" in capsys.readouterr().out
    assert (tmp_path / "runs" / "schedule.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.rglob("*") if path.suffix == ".png" or path.name == "checkpoints"] == [
        "schedule.png"
    ]
