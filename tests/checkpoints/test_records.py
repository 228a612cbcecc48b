"""A checkpoint that lacks something, or is of another version, is refused in one line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cifar_zero.checkpoints.read import check_resumable, read
from cifar_zero.core.errors import UsageError
from cifar_zero.training import evaluate
from tests.support.helpers import run_folder_of, run_program, train_all

FLAGS = ["--batch_size", "64", "--max_steps", "2", "--accelerator", "cpu", "--logger", "none", "--optimizer", "adam"]


@pytest.fixture(scope="module")
def checkpoint(small_data: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs")
    train_all({out: [*small_data, *FLAGS]})
    return run_folder_of(out) / "checkpoints" / "last.ckpt"


Change = Callable[[dict[str, Any]], Any]

CHANGES: dict[str, tuple[Change, str]] = {
    "no config": (lambda content: content["cifar_zero"].pop("config"), "it has no 'config'"),
    "an unknown option": (lambda content: content["cifar_zero"]["config"].update(new=1), "unknown options: new"),
    "no record": (lambda content: content.update(cifar_zero=None), "NoneType"),
    "an empty state": (
        lambda content: content["optimizer_states"][0].update(state={}),
        "has no optimizer state: start a run from its weights with --weights",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_checkpoint_that_cannot_be_resumed_is_refused(change: str, checkpoint: Path, tmp_path: Path):
    content = torch.load(checkpoint, weights_only=False)
    edit, message = CHANGES[change]
    edit(content)
    torch.save(content, tmp_path / "last.ckpt")
    with pytest.raises(UsageError, match=message) as error:
        check_resumable(read(tmp_path / "last.ckpt"), "last.ckpt")
    assert "\n" not in str(error.value)


def test_a_resumed_run_must_have_the_images_that_it_had(checkpoint: Path, tmp_path: Path):
    """The images have as many classes as before. There is one image more, so other images would be held out."""
    images = ["--data.source", "synthetic", "--data.synthetic_size", "650", "--data.root", str(tmp_path)]
    flags = ["--resume", str(checkpoint), "--max_steps", "3", "--out", str(tmp_path / "out"), "--test_figures", "false"]
    done = run_program("train.py", *images, *FLAGS, *flags)
    assert done.returncode == 2, done.stderr[-2000:]
    message = "had 640 training and 640 test images, but --data.source synthetic now has other images (650 training"
    assert message in done.stderr
    assert not (tmp_path / "out").exists()


def test_the_classes_are_compared_before_the_weights(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    flags = ["--data.source", "cifar100", "--data.root", str(tmp_path), "--accelerator", "cpu"]
    monkeypatch.setattr(sys, "argv", ["evaluate", str(checkpoint), *flags])
    with pytest.raises(UsageError, match=r"was trained on other classes than --data.source cifar100 \(apple"):
        evaluate.main()
