"""A checkpoint that lacks something, or is of another version, is refused in one line."""

from pathlib import Path

import pytest
import torch

from cifar_zero.checkpoints.read import check_resumable, read
from cifar_zero.core.errors import UsageError
from tests.support.helpers import last_checkpoint, train_all

FLAGS = ["--batch_size", "64", "--max_steps", "2", "--accelerator", "cpu", "--logger", "none", "--optimizer", "adam"]


def test_a_checkpoint_that_cannot_be_resumed_is_refused(small_data: list[str], tmp_path: Path):
    train_all({tmp_path: [*small_data, *FLAGS]})
    content = last_checkpoint(tmp_path)
    record, optimizer = content["cifar_zero"], content["optimizer_states"][0]
    rms = {**record["config"], "optimizer": {"name": "rmsprop", "options": {"momentum": 0.0}}}
    changes = {
        "it has no 'config'": {"cifar_zero": {"classes": record["classes"]}},
        "unknown options: new": {"cifar_zero": {**record, "config": {**record["config"], "new": 1}}},
        "NoneType": {"cifar_zero": None},
        "has no optimizer state: start a run from its weights with": {"optimizer_states": [{**optimizer, "state": {}}]},
        "has no optimizer state": {
            "optimizer_states": [{**optimizer, "state": {}}],
            "cifar_zero": {**record, "config": rms},
        },
    }
    for message, change in changes.items():
        torch.save({**content, **change}, tmp_path / "last.ckpt")
        with pytest.raises(UsageError, match=message):
            check_resumable(read(tmp_path / "last.ckpt"), "last.ckpt", epochs=3)
    content["loops"]["fit_loop"]["epoch_progress"]["current"]["ready"] = 5
    check_resumable(content, "last.ckpt", epochs=5)
    for epochs in (3, 4):
        with pytest.raises(UsageError, match=f"is from epoch 5: --epochs must be at least 5, not {epochs}"):
            check_resumable(content, "last.ckpt", epochs)
