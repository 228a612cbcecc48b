"""A checkpoint that lacks something, or is of another version, is refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cifar_zero.checkpoints.read import check_resumable, read
from cifar_zero.core.errors import UsageError
from tests.support.helpers import run_folder_of, run_program, train_all

FLAGS = ["--batch_size", "64", "--max_steps", "2", "--accelerator", "cpu", "--logger", "none", "--optimizer", "adam"]


@pytest.fixture(scope="module")
def checkpoint(small_data: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs")
    train_all({out: [*small_data, *FLAGS]})
    return run_folder_of(out) / "checkpoints" / "last.ckpt"


def test_a_checkpoint_that_cannot_be_resumed_is_refused(checkpoint: Path, tmp_path: Path):
    content = torch.load(checkpoint, weights_only=False)
    record, optimizer = content["cifar_zero"], content["optimizer_states"][0]
    changes = {
        "it has no 'config'": {"cifar_zero": {"classes": record["classes"]}},
        "unknown options: new": {"cifar_zero": {**record, "config": {**record["config"], "new": 1}}},
        "NoneType": {"cifar_zero": None},
        "has no optimizer state: start a run from its weights with": {"optimizer_states": [{**optimizer, "state": {}}]},
    }
    for message, change in changes.items():
        torch.save({**content, **change}, tmp_path / "last.ckpt")
        with pytest.raises(UsageError, match=message):
            check_resumable(read(tmp_path / "last.ckpt"), "last.ckpt")


def test_a_resumed_run_must_have_the_images_that_it_had(checkpoint: Path, tmp_path: Path):
    """The images have as many classes as before. There is one image more, so other images would be held out."""
    images = ["--data.source", "synthetic", "--data.synthetic_size", "650", "--data.root", str(tmp_path)]
    flags = ["--resume", str(checkpoint), "--max_steps", "3", "--out", str(tmp_path / "out"), "--test_figures", "false"]
    done = run_program("train.py", *images, *FLAGS, *flags)
    assert done.returncode == 2, done.stderr[-2000:]
    message = "had 640 training and 640 test images, but --data.source synthetic now has other images (650 training"
    assert message in done.stderr
    assert not (tmp_path / "out").exists()
