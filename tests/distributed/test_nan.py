"""The loss is NaN or infinite on one of two ranks, with --on_nan skip: both skip the batch and stay in step."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from cifar_zero.comparison.reading import read_losses
from tests.support.helpers import largest_difference, last_weights, run_folder_of, train_all

TRAIN, HIDDEN, PIXELS = 16, 8, 3 * 32 * 32


def write_images(root: Path) -> None:
    """Writes dark random images of two classes; one training image is white."""
    rng = np.random.default_rng(0)
    for split, count in (("train", TRAIN), ("test", 4)):
        for number in range(count):
            pixels = rng.integers(0, 128, (32, 32, 3), np.uint8)
            if (split, number) == ("train", 0):
                pixels[:] = 255
            file = root / split / f"class {number % 2}" / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(file)


def write_weights(file: Path) -> None:
    """Writes a perceptron's weights. One neuron reacts to light images only; its share of the scores overflows."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(HIDDEN + 1, PIXELS, generator=generator) / math.sqrt(PIXELS)
    last = torch.randn(2, HIDDEN + 1, generator=generator) / math.sqrt(HIDDEN)
    bias = torch.zeros(HIDDEN + 1)
    first[-1], last[:, -1], bias[-1] = (
        1.0,
        1e37,
        -PIXELS / 2,
    )  # a threshold for the sum of the pixels, each from -1 to 1
    torch.save({"1.weight": first, "1.bias": bias, "3.weight": last, "3.bias": torch.zeros(2)}, file)


@pytest.mark.distributed
def test_both_ranks_skip_a_batch_that_is_nan_on_one(tmp_path: Path):
    """One device skips the whole batch too: one step per epoch, because one image is white."""
    write_images(tmp_path / "images")
    write_weights(tmp_path / "weights.pt")
    same = ["--data.source", "folder", "--data.root", str(tmp_path / "images"), "--data.val_fraction", "0"]
    same += ["--weights", str(tmp_path / "weights.pt"), "--model", "mlp", "--model.hidden", f"[{HIDDEN + 1}]"]
    same += ["--on_nan", "skip", "--batch_size", "4", "--epochs", "2", "--optimizer.lr", "0.05", "--accelerator", "cpu"]
    same += ["--log_interval", "1", "--logger", "none"]
    ranks = {"baseline": 1, "ddp": 2, "deepspeed_stage_2": 2}
    for devices in (1, 2):
        names = [name for name, of_run in ranks.items() if of_run == devices]
        train_all({tmp_path / name: [*same, "--strategy", name, "--devices", str(devices)] for name in names})
    runs = {name: run_folder_of(tmp_path / name) for name in ranks}
    expected = read_losses(runs["baseline"] / "losses.csv").values
    assert [expected[:4].count(0), expected[4:].count(0), len(expected)] == [1, 1, 8]
    weights = last_weights(runs["baseline"])
    assert all(value.isfinite().all() for value in weights.values())
    for name in ("ddp", "deepspeed_stage_2"):
        # The loss is the mean over both ranks: different weights on the other rank would show in later steps.
        assert read_losses(runs[name] / "losses.csv").values == pytest.approx(expected, rel=1e-5, abs=0), name
        assert largest_difference(last_weights(runs[name]), weights) < 1e-6, name
