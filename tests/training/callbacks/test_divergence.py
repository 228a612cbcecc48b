import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from cifar_zero.config.settings import make_settings
from cifar_zero.core.errors import RunError
from cifar_zero.training.callbacks.curves import TrainingCurves
from cifar_zero.training.callbacks.monitors import Divergence
from tests.support.helpers import run_folder_of, run_program


def poison(at: int) -> Callable[[tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]:
    """Returns a function that makes the images of one micro-batch NaN."""
    numbers = itertools.count(1)

    def change(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        images, labels = batch
        if next(numbers) == at:
            images = images * torch.nan
        return images, labels

    return change


def test_the_first_step_with_a_nan_is_named_and_no_later_checkpoint_is_written(fit: Callable[..., Any], tmp_path: Path):
    """A step has two micro-batches, so that micro-batch 9 is the first one of step 5. From then on the weights are NaN
    too."""
    config = make_settings(epochs=1, batch_size=4, accumulate=2, log_interval=100)
    curves = TrainingCurves(writes_losses=False)
    saved = ModelCheckpoint(tmp_path / "kept", "{step}", every_n_train_steps=1, save_top_k=-1)
    with pytest.raises(RunError, match=r"from step 5 on: lower"):
        fit(config, 48, curves, Divergence(curves), saved, change=poison(9), enable_checkpointing=True)
    assert sorted(path.stem for path in (tmp_path / "kept").iterdir()) == [f"step={step}" for step in range(1, 5)]


@pytest.mark.parametrize(
    ("flags", "message", "saved"),
    [
        ("--optimizer.lr 1e30 --batch_size 576", "the loss of the validation after step 1 is NaN or infinite", []),
        (
            "--optimizer.lr 1e30 --batch_size 640 --data.val_fraction 0",
            "the loss of the test after step 1 is NaN or infinite",
            ["last.ckpt"],
        ),
        (
            "--optimizer.lr 1e38 --optimizer.weight_decay 1e30 --batch_size 640 --data.val_fraction 0",
            "weights are NaN or infinite after step 1",
            [],
        ),
    ],
)
def test_the_last_update_diverges(flags: str, message: str, saved: list[str], small_data: list[str], tmp_path: Path):
    """No training loss shows the divergence. Without a validation, only the weights and the test loss show it."""
    same = [*small_data, "--epochs", "1", "--logger", "none", "--accelerator", "cpu", "--out", str(tmp_path)]
    done = run_program("train.py", *same, *flags.split())
    assert done.returncode == 1, done.stderr[-2000:]
    assert f"error: {message}: lower --optimizer.lr" in done.stderr
    assert [path.name for path in run_folder_of(tmp_path).glob("checkpoints/*")] == saved
