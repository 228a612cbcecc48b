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
from tests.support.helpers import of_test_all, run_folder_of, run_program


class Poison:
    """Makes the images of one micro-batch NaN."""

    def __init__(self, at: int):
        self.at, self.made = at, 0

    def __call__(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        images, labels = batch
        self.made += 1
        return (images * torch.nan if self.made == self.at else images), labels


@pytest.mark.parametrize("log_interval", [4, 100])
def test_the_step_is_named_at_any_log_interval(fit: Callable[..., Any], log_interval: int):
    """A step has two micro-batches, so that micro-batch 9 is the first one of step 5. From then on the weights are NaN
    too."""
    config = make_settings(epochs=1, batch_size=4, accumulate=2, log_interval=log_interval)
    curves = TrainingCurves(writes_losses=False)
    with pytest.raises(RunError, match=r"from step 5 on: lower"):
        fit(config, 48, curves, Divergence(curves), change=Poison(9))


def test_no_checkpoint_is_written_after_divergence(fit: Callable[..., Any], tmp_path: Path):
    curves = TrainingCurves(writes_losses=False)
    saved = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=1, save_top_k=-1)
    config = make_settings(epochs=1, batch_size=4, log_interval=100)
    with pytest.raises(RunError, match="from step 3 on"):
        fit(config, 48, curves, Divergence(curves), saved, change=Poison(3), enable_checkpointing=True)
    assert [path.stem for path in sorted((tmp_path / "kept").iterdir())] == ["epoch=0-step=1", "epoch=0-step=2"]


@pytest.mark.parametrize(
    ("held_out", "batch_size", "split", "saved"),
    [("0.1", "576", "validation", []), ("0", "640", "test", ["last.ckpt"])],
)
def test_the_last_update_diverges(
    held_out: str, batch_size: str, split: str, saved: list[str], small_data: list[str], tmp_path: Path
):
    """No training loss shows the divergence. Without a validation, only the test loss shows it."""
    flags = [*small_data, "--data.val_fraction", held_out, "--epochs", "1", "--logger", "none"]
    flags += ["--optimizer.lr", "1e30", "--batch_size", batch_size, "--accelerator", "cpu", "--out", str(tmp_path)]
    done = run_program("train.py", *flags)
    assert done.returncode == 1, done.stderr[-2000:]
    message = f"error: the loss of the {split} after step 1 is NaN or infinite: lower --optimizer.lr"
    assert message in done.stderr
    assert [path.name for path in run_folder_of(tmp_path).glob("checkpoints/*")] == saved


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        ("deepspeed_stage_3", 2),
        pytest.param("baseline", 1, marks=of_test_all),
        pytest.param("fsdp2", 2, marks=of_test_all),
    ],
)
def test_infinite_weights_are_not_saved(strategy: str, ranks: int, small_data: list[str], tmp_path: Path):
    """The loss of the only step was finite, and no validation follows. Each rank holds a shard of the weights."""
    flags = [*small_data, "--data.val_fraction", "0", "--epochs", "1", "--batch_size", "640", "--logger", "none"]
    flags += ["--optimizer.lr", "1e38", "--optimizer.weight_decay", "1e30", "--out", str(tmp_path)]
    done = run_program("train.py", *flags, "--strategy", strategy, "--devices", str(ranks), "--accelerator", "cpu")
    assert done.returncode == 1, done.stderr[-2000:]
    assert "error: weights are NaN or infinite after step 1: lower" in done.stderr
    assert [*run_folder_of(tmp_path).glob("checkpoints/*")] == []
